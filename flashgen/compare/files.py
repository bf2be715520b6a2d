"""What a comparison leaves in a folder: `compare.json`, `compare.md` and `compare-*.png`. Files of the user's there are not replaced."""

from __future__ import annotations

import json
from pathlib import Path

from flashgen.bench.files import PlotError
from flashgen.build.files import make_folders, require_writable
from flashgen.build.own_files import own_names, remove_own, require_own, write_own
from flashgen.codegen.errors import ArgumentError

from .report import comparison_page
from .result import Comparison

JSON, MARKDOWN, PLOTS = "compare.json", "compare.md", "compare-*.png"


def prepare_folder(folder: Path) -> None:
    """Makes the folder, before anything is measured. Raises ArgumentError if it cannot, or somebody else's file is in the way."""
    try:
        make_folders(folder)
        require_writable(folder)
        require_own(folder, (JSON, MARKDOWN, PLOTS), None)
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror}") from error


def save_comparison(result: Comparison, folder: Path) -> list[Path]:
    """Writes the JSON and the Markdown; those of an earlier run are replaced."""
    return write_own(folder, {JSON: (json.dumps(result.to_json(), indent=2) + "\n").encode(), MARKDOWN: comparison_page(result).encode()})


def draw_comparison(result: Comparison, folder: Path) -> list[Path]:
    """Writes the figures; those of an earlier run are removed. Raises PlotError without matplotlib."""
    try:
        from .plot import comparison_figures
    except ImportError as error:
        raise PlotError(f"plots need matplotlib: pip install 'flashgen[plot]'; {error}") from error
    images = {PLOTS.replace("*", name): image for name, image in comparison_figures(result).items()}
    written = write_own(folder, images)
    remove_own(folder, own_names(folder, PLOTS) - images.keys())
    return written
