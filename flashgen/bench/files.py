"""What a run leaves in a folder: `bench.json`, `bench.md` and `bench-*.png`. Files of the user's there are not replaced."""

from __future__ import annotations

import json
from pathlib import Path

from flashgen.build.own_files import make_own_folder, replace_own, write_own
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.plain import parse

from .report import markdown
from .result import BenchResult, result_from_json

JSON, MARKDOWN, PLOTS = "bench.json", "bench.md", "bench-*.png"


class PlotError(FlashgenError):
    """Figures cannot be drawn here."""


def make_folder(folder: Path, result: BenchResult | None = None) -> None:
    """See `make_own_folder`. `result`: if it is there already."""
    make_own_folder(folder, (JSON, MARKDOWN, PLOTS), _texts(result) if result is not None else None)


def save(result: BenchResult, folder: Path) -> list[Path]:
    """Writes the JSON and the Markdown; those of an earlier run are replaced."""
    return write_own(folder, _texts(result))


def _texts(result: BenchResult) -> dict[str, bytes]:
    return {JSON: (json.dumps(result.to_json(), indent=2) + "\n").encode(), MARKDOWN: markdown(result).encode()}


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """Writes the figures; those of an earlier run are removed. Raises PlotError without matplotlib."""
    try:
        from .plot import figures
    except ImportError as error:
        raise PlotError(f"plots need matplotlib: pip install 'flashgen[plot]'; {error}") from error
    images = {PLOTS.replace("*", name): image for name, image in figures(result).items()}
    return replace_own(folder, PLOTS, images)


def read_result(path: Path) -> BenchResult:
    """A result that `save` wrote. Raises ArgumentError, which starts with `from`, if it is not one."""
    try:
        return result_from_json(parse(path.read_bytes(), "text"))
    except OSError as error:
        raise ArgumentError(f"from must be a {JSON} that can be read; got {path}: {error.strerror}") from error
    except ArgumentError as error:
        raise ArgumentError(f"from must be a {JSON} that `flashgen bench` wrote; got {path}: {error}") from error
