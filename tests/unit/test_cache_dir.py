"""Where the cache folder is, and which folders are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgen.build.cache_dir import UnsafeCacheError, cache_dir, chosen_by, make_safe_dir, require_safe
from flashgen.codegen.errors import FlashgenError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHGEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_order_of_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (cache_dir(), chosen_by()) == (tmp_path / "home/.cache/flashgen", "HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (cache_dir(), chosen_by()) == (tmp_path / "xdg/flashgen", "XDG_CACHE_HOME")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "own"))
    assert (cache_dir(), chosen_by()) == (tmp_path / "own", "FLASHGEN_CACHE_DIR")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "")
    assert (cache_dir(), chosen_by()) == (tmp_path / "xdg/flashgen", "XDG_CACHE_HOME")
    assert list(tmp_path.iterdir()) == []


def test_relative_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert (cache_dir(), chosen_by()) == (tmp_path / "home/.cache/flashgen", "HOME")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "relative")
    assert cache_dir() == tmp_path / "relative"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "~/mine")
    assert cache_dir() == tmp_path / "home/mine"


def test_without_a_home_nothing_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(OSError, match="flashgen"):
        make_safe_dir(cache_dir())


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_made_with_mode_0700(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert make_safe_dir(tmp_path / "a/b") == tmp_path / "a/b"
        make_safe_dir(tmp_path / "a/b")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755 & ~umask
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "safe"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False), (0o777, False)])
def test_writable_by_others_is_refused(tmp_path: Path, mode: int, safe: bool) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.touch()
    for path in (folder, file):
        path.chmod(mode)
        if safe:
            require_safe(path)
        else:
            with pytest.raises(UnsafeCacheError, match=rf"{path} is writable .*mode {mode:04o}.*chmod go-w {path}"):
                require_safe(path)
    if not safe:
        with pytest.raises(FlashgenError):
            make_safe_dir(folder)


def test_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    for refuse in (require_safe, make_safe_dir):
        with pytest.raises(UnsafeCacheError, match=f"{link} is a symbolic link: set FLASHGEN_CACHE_DIR"):
            refuse(link)


def test_dangling_link_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UnsafeCacheError, match="symbolic link"):
        make_safe_dir(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


def test_other_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, user = tmp_path, os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(UnsafeCacheError, match=rf"{path} belongs to user {user}, this process runs as {user + 1}: .*FLASHGEN_CACHE_DIR"):
        require_safe(path)


def test_a_device_is_refused_without_bad_advice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        for refuse in (require_safe, make_safe_dir):
            with pytest.raises(
                UnsafeCacheError, match=f"^{path} is neither a folder nor a file: set FLASHGEN_CACHE_DIR to a folder"
            ) as caught:
                refuse(path)
            assert "chmod" not in str(caught.value)


def test_what_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    with pytest.raises(NotADirectoryError):
        make_safe_dir(file)
    with pytest.raises(OSError, match="file"):
        make_safe_dir(file / "below")
    with pytest.raises(FileNotFoundError):
        require_safe(tmp_path / "missing")
