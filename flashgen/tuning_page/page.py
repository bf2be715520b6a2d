"""The page of a tune as one file: its text, whether it may be where the user wants it, and putting it there."""

from __future__ import annotations

import os
from pathlib import Path

from flashgen.build.files import require_writable, write_file
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError

from ..pages.html import self_contained_page
from ..tuning.passed_over import passed_over
from ..tuning.request import Request
from ..tuning.result import TuneResult
from .data import tune_page_data

_FOLDER = Path(__file__).parent
_SCRIPTS = ("charts.js", "plots.js", "tables.js", "cell.js", "controls.js")
MARK = b'<meta name="generator" content="flashgen tune">'  # of a page that may be replaced by another
_MARK_WITHIN = 4096  # bytes from the beginning
LARGEST_PAGE = 1_000_000  # bytes


def tune_page(request: Request, result: TuneResult, device: Device) -> str:
    """The page. Of so many cells that it would be too large, refused configs are counted and not named."""
    others = [passed_over(request, row, device) for row in result.rows]
    page = self_contained_page(_FOLDER, _SCRIPTS, tune_page_data(result, others, device))
    if len(page.encode()) > LARGEST_PAGE:
        page = self_contained_page(_FOLDER, _SCRIPTS, tune_page_data(result, others, device, names=False))
    return page


def require_page_place(path: Path) -> None:
    """Raises ArgumentError, which starts with `html`, unless a page can be written there: a new file, or another such page."""
    if path.suffix != ".html":
        raise ArgumentError(f"html must be a file that ends in .html; got {path}")
    try:
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise ArgumentError(f"html must be in a folder that is there; got {path}")
        require_writable(target.parent)
        with open(target, "rb") as file:
            if MARK in file.read(_MARK_WITHIN):
                return
    except FileNotFoundError:
        return
    except OSError as error:
        raise ArgumentError(f"html must be a file that can be written; got {path}: {error.strerror or error}") from error
    raise ArgumentError(f"html must be a new file or a page that flashgen tune wrote; got {path}, which is neither: move that away")


def write_tune_page(path: Path, page: str) -> None:
    """Writes the page, whole or not at all. Raises ArgumentError as `require_page_place`, as hours may have passed since."""
    require_page_place(path)
    write_file(path, page.encode())
