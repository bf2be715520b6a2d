"""What a run leaves in a folder: `bench.json`, `bench.md` and `bench-*.png`, each whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from flashgen.build.files import make_folders, require_writable, write_file
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.plain import parse

from .report import markdown
from .result import BenchResult, result_from_json

JSON, MARKDOWN, PLOTS = "bench.json", "bench.md", "bench-*.png"


class PlotError(FlashgenError):
    """Figures cannot be drawn here."""


def make_folder(folder: Path) -> None:
    """Makes the folder, and finds out now rather than after an hour whether it can be written. Raises ArgumentError."""
    try:
        make_folders(folder)
        require_writable(folder)
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror}") from error


def save(result: BenchResult, folder: Path) -> list[Path]:
    """Writes the JSON and the Markdown; those of an earlier run are replaced."""
    write_file(folder / JSON, (json.dumps(result.to_json(), indent=2) + "\n").encode())
    write_file(folder / MARKDOWN, markdown(result).encode())
    return [folder / JSON, folder / MARKDOWN]


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """Writes the figures; those of an earlier run are removed. Raises PlotError without matplotlib."""
    try:
        from .plot import figures
    except ImportError as error:
        raise PlotError(f"plots need matplotlib: pip install 'flashgen[plot]'; {error}") from error
    images = {folder / PLOTS.replace("*", name): image for name, image in figures(result).items()}
    for path, image in images.items():
        write_file(path, image)
    for path in set(folder.glob(PLOTS)) - set(images):
        path.unlink()
    return list(images)


def read(path: Path) -> BenchResult:
    """A result that `save` wrote. Raises ArgumentError, which starts with `from`, if it is not one."""
    try:
        return result_from_json(parse(path.read_bytes(), "text"))
    except OSError as error:
        raise ArgumentError(f"from must be a {JSON} that can be read; got {path}: {error.strerror}") from error
    except ArgumentError as error:
        raise ArgumentError(f"from must be a {JSON} that `flashgen bench` wrote; got {path}: {error}") from error
