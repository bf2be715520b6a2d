"""Files in a folder of the user's: those that were written here before are replaced, others and altered ones stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgen.build.files import write_file
from flashgen.build.own_files import LIST, adopt, remove_own, require_own, write_own
from flashgen.codegen.errors import ArgumentError, FlashgenError

REFUSED = r"^out must be a folder in which flashgen replaces its own files only; got "


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in os.listdir(folder) if name != LIST}


def test_what_was_written_is_replaced(tmp_path: Path) -> None:
    assert write_own(tmp_path, {"a": b"1", "b": b"2"}) == [tmp_path / "a", tmp_path / "b"]
    write_own(tmp_path, {"a": b"3"}, 0o700)
    require_own(tmp_path, ["*"])
    assert contents(tmp_path) == {"a": b"3", "b": b"2"}
    assert os.access(tmp_path / "a", os.X_OK)
    remove_own(tmp_path, ["a", "b", "never there"])
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_altered_file_stays(tmp_path: Path, name: str) -> None:
    write_own(tmp_path, {"a": b"1", "b": b"2"})
    (tmp_path / name).write_bytes(b"mine")
    before = contents(tmp_path)
    for action in (
        lambda: write_own(tmp_path, {"a": b"3", "b": b"4"}),
        lambda: remove_own(tmp_path, ["a", "b"]),
        lambda: require_own(tmp_path, ["?"]),
    ):
        with pytest.raises(ArgumentError, match=rf"{REFUSED}{tmp_path}, in which {tmp_path / name} is of somebody else, or was altered"):
            action()
        assert contents(tmp_path) == before


def test_a_file_that_nobody_wrote_here_stays(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    (tmp_path / "real").write_bytes(b"1")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("a", "link", "broken", "folder"):
        with pytest.raises(ArgumentError, match=rf"{REFUSED}.*/{name} is of somebody else"):
            write_own(tmp_path, {name: b"1"})
    assert sorted(os.listdir(tmp_path)) == ["a", "broken", "folder", "link", "real"]


def test_a_file_that_holds_the_same_already_stays_its_owners(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    require_own(tmp_path, ["a"], {"a": b"mine"})
    write_own(tmp_path, {"a": b"mine"})
    with pytest.raises(ArgumentError, match=REFUSED):
        write_own(tmp_path, {"a": b"ours"})
    assert contents(tmp_path) == {"a": b"mine"}


def test_what_a_program_of_ours_wrote_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a program's")
    adopt(tmp_path, "a")
    adopt(tmp_path, "never there")
    remove_own(tmp_path, ["a"])
    assert contents(tmp_path) == {}


def test_a_write_that_is_cut_short_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own(tmp_path, {"a": b"1", "b": b"2"})

    def cut(path: Path, data: bytes, mode: int = 0o666) -> None:
        if path.name == "b":
            raise FlashgenError("no space")
        write_file(path, data, mode)

    monkeypatch.setattr("flashgen.build.own_files.write_file", cut)
    with pytest.raises(FlashgenError, match="no space"):
        write_own(tmp_path, {"a": b"3", "b": b"4"})
    assert contents(tmp_path) == {"a": b"3", "b": b"2"}
    monkeypatch.undo()
    write_own(tmp_path, {"a": b"5", "b": b"6"})
    assert contents(tmp_path) == {"a": b"5", "b": b"6"}


@pytest.mark.parametrize("text", [b"", b"[]", b'{"files": {"a": "x"}}', b'{"files": {"a": []}, "more": 1}', b"\xff", b"[" * 100_000])
def test_a_list_that_cannot_be_read_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / LIST).write_bytes(text)
    with pytest.raises(ArgumentError, match=rf"^out must be a folder whose list of files can be read; got {tmp_path / LIST} "):
        write_own(tmp_path, {"a": b"1"})
    assert (tmp_path / LIST).read_bytes() == text
    assert contents(tmp_path) == {}
