"""Writing a file that is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from flashgen.codegen.errors import ArgumentError, FlashgenError


def write_text(path: Path, text: str) -> None:
    """Writes `text` beside the file and renames it into place; what was there stays until then. A link's file is written, not the link.

    Raises ArgumentError, which starts with `file`, for a path that holds anything but a file, or whose folder is missing; FlashgenError
    if it cannot be written.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        raise ArgumentError(f"file must be a new or an ordinary one; got {path}")
    if not place.parent.is_dir():
        raise ArgumentError(f"file must be in a folder that is there; got {path}")
    staged = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    try:
        # Not tempfile, whose files only their owner may read: this one gets the mode that any new file gets.
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, place)
    except OSError as error:
        raise FlashgenError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            staged.unlink()
