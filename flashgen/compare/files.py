"""What a comparison leaves in a folder: `compare.json`, `compare.md` and `compare-*.png`. Files of the user's there are not replaced."""

from __future__ import annotations

import json
from pathlib import Path

from flashgen.bench.files import PlotError
from flashgen.build.own_files import make_own_folder, replace_own, write_own

from .report import comparison_page
from .result import Comparison

JSON, MARKDOWN, PLOTS = "compare.json", "compare.md", "compare-*.png"


def prepare_folder(folder: Path) -> None:
    """See `make_own_folder`."""
    make_own_folder(folder, (JSON, MARKDOWN, PLOTS))


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
    return replace_own(folder, PLOTS, images)
