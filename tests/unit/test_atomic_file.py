"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgen.atomic_file import write_text
from flashgen.codegen.errors import ArgumentError, FlashgenError


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    before = os.umask(0o022)
    try:
        write_text(path, "first\n")
        write_text(path, "sécond\n")
    finally:
        os.umask(before)
    assert path.read_text(encoding="utf-8") == "sécond\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("first")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "second"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_was_there_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a.json"
    path.write_text("first")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(FlashgenError, match=r"a\.json cannot be written: No space left on device") as caught:
        write_text(path, "second")
    assert not isinstance(caught.value, ArgumentError)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ArgumentError, match=r"^file must be a new or an ordinary one; got "):
            write_text(path, "text")
    with pytest.raises(ArgumentError, match=r"^file must be in a folder that is there; got "):
        write_text(tmp_path / "nowhere/a.json", "text")
    assert os.listdir(tmp_path) == ["pipe"]
