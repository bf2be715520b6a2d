"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from pathlib import Path

import pytest

from flashgen.build import files
from flashgen.build.files import make_folders, require_writable, write_file
from flashgen.codegen.errors import ArgumentError, FlashgenError


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    before = os.umask(0o022)
    try:
        write_file(path, b"first\n")
        write_file(path, "sécond\n".encode())
    finally:
        os.umask(before)
    assert path.read_text(encoding="utf-8") == "sécond\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("first")
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", b"second")
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
        write_file(path, b"second")
    assert not isinstance(caught.value, ArgumentError)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ArgumentError, match=r"^file must be a new or an ordinary one; got "):
            write_file(path, b"text")
    with pytest.raises(ArgumentError, match=r"^file must be in a folder that is there; got "):
        write_file(tmp_path / "nowhere/a.json", b"text")
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_folders_are_made_for_their_owner_to_write(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_folders(tmp_path / "a/b")
        make_folders(tmp_path / "a/b/c")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.rglob("*"))] == [0o755 & ~umask] * 3


@pytest.mark.parametrize(("room", "enough"), [(0, False), (4096, False), (64 * 1024, True)])
def test_a_folder_is_tried_by_writing(tmp_path: Path, room: int, enough: bool) -> None:
    """Nothing but a write tells of a quota or a full disk. A limit on the size of files stands for them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with nullcontext() if enough else pytest.raises(OSError, match="File too large"):
            require_writable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("exchange", [True, False])
def test_what_may_not_be_removed_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    folder, staging = tmp_path / "folder", tmp_path / "staging"
    for path in (folder, staging):
        path.mkdir()
        (path / path.name).touch()
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)

    def refuse(old: Path) -> list[str]:
        assert os.listdir(old) == ["folder"]
        raise ArgumentError("no")

    with pytest.raises(ArgumentError, match=r"^no$"):
        files.put_folder(staging, folder, refuse)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(folder) == ["folder"]


def test_what_cannot_go_back_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, staging = tmp_path / "folder", tmp_path / "staging"
    for path in (folder, staging):
        path.mkdir()
        (path / "mine").touch()
    monkeypatch.setattr(files, "_exchange", lambda *_: False)

    def refuse(_: Path) -> list[str]:
        folder.mkdir()  # another process puts its own one there
        (folder / "other").touch()
        raise ArgumentError("no")

    with pytest.raises(FlashgenError, match=rf"^{folder} was replaced by another process .* is in {staging}\.old$"):
        files.put_folder(staging, folder, refuse)
    assert os.listdir(folder) == ["other"]
    assert os.listdir(f"{staging}.old") == ["mine"]


def test_what_cannot_be_removed_is_told_and_the_new_folder_stands(tmp_path: Path) -> None:
    folder, staging = tmp_path / "folder", tmp_path / "staging"
    for path in (folder, staging):
        path.mkdir()
        (path / path.name).touch()
    with pytest.warns(RuntimeWarning, match=rf"{staging}, which {folder} replaces, cannot be removed: Directory not empty"):
        files.put_folder(staging, folder, lambda _: [])
    assert os.listdir(folder) == ["staging"]


def test_a_folder_that_another_process_moves_away_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, staging = tmp_path / "folder", tmp_path / "staging"
    for path in (folder, staging):
        path.mkdir()
        (path / path.name).touch()

    def too_late(_: Path, other: Path) -> bool:
        other.rename(tmp_path / "away")
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(files, "_exchange", too_late)
    files.put_folder(staging, folder, os.listdir)
    assert os.listdir(folder) == ["staging"]
