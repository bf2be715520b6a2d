"""A page made of its frame, style, data and scripts; and a table for data that repeats itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SHARED = Path(__file__).parent


class ValueTable:
    """Values that come often, each once; the data has their numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        """The place of a value, which is added if it is new."""
        key = json.dumps(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def self_contained_page(folder: Path, scripts: Sequence[str], data: Any) -> str:
    """The text of `page.html` in `folder` with the theme, `page.css`, the scripts in their order and the data put in."""
    style = _read(_SHARED / "theme.css") + _read(folder / "page.css")
    script = "\n".join([_read(_SHARED / "elements.js"), *(_read(folder / name) for name in scripts)])
    html = _read(folder / "page.html")
    # The data last: a text of it may look like a mark.
    for mark, text in (("/*script*/", script), ("/*style*/", style), ("/*data*/", script_json(data))):
        before, _, after = html.partition(mark)
        html = before + text + after
    return html


def script_json(data: Any) -> str:
    """JSON that no text in it can lead out of its script element: neither `</script>` nor `<!--` is left."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
