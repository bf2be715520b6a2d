"""What reaches the terminal: text as it is meant, and no control sequences out of a device's name, a record, a file or a path."""

from __future__ import annotations

import io
import re
import sys
from typing import Any, TextIO, cast

# C0 but tab and newline, DEL, C1; what reorders text that is read; and halves of characters, which no stream can encode.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with each control character as its escape: a backslash, x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class PrintableStream:
    """A text stream that gets printable text only. What rich draws goes past it: it is made of control sequences."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # the attribute by which rich finds the stream below one like this

    def write(self, text: str) -> int:
        """Writes; says how many characters of `text` that were."""
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Writes several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def guard_streams() -> None:
    """From here on, stdout and stderr of this process get printable text only, and escapes for what their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, PrintableStream(sys.stdout))
    sys.stderr = cast(TextIO, PrintableStream(sys.stderr))
