"""`flashgen explain` on the command line: what it refuses before it compiles anything, and what it says of what it has written."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli import app
from flashgen.codegen.errors import ArgumentError


def refused(*options: str) -> str:
    """What is said of bad options."""
    done = CliRunner().invoke(app, ["explain", *options])
    assert isinstance(done.exception, ArgumentError), done.output
    return str(done.exception)


def test_options_are_refused_by_name(tmp_path: Path) -> None:
    page = str(tmp_path / "page.html")
    assert refused("--family", "softmax_safe", "--out", page).startswith("family must be one of standard_attention, memory_efficient")
    assert refused("--tiles", "0", "--out", page) == "tiles must be an integer from 1 to 8; got 0"
    assert refused("--device", "x", "--out", page).startswith("device must be one of a100")
    assert refused("--out", str(tmp_path / "page.txt")) == f"out must be a file that ends in .html; got {tmp_path}/page.txt"
    (tmp_path / "folder.html").mkdir()
    assert refused("--out", str(tmp_path / "folder.html")) == f"out must be a file that ends in .html; got {tmp_path}/folder.html"
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"], "nothing is written"


def test_a_file_of_somebody_elses_stays(tmp_path: Path) -> None:
    page = tmp_path / "notes[1].html"
    page.write_text("mine")
    assert f"{page} is of somebody else, or was altered: move that away" in refused("--out", str(page))
    assert page.read_text() == "mine"


def test_nothing_is_written_where_recording_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.explain.run.compile_ahead_of", lambda specs, done: None)
    monkeypatch.setattr("flashgen.explain.run.record", lambda *_: 1 // 0)
    done = CliRunner().invoke(app, ["explain", "--out", str(tmp_path / "page.html")])
    assert isinstance(done.exception, ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []
