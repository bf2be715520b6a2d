"""The lock between processes: who waits, for whom, how long, and what is said of it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashgen.build import lock
from flashgen.build.lock import locked
from flashgen.codegen.errors import FlashgenError
from flashgen.records import sqlite_file as record_file
from flashgen.records.sqlite_file import RecordFile
from flashgen.timing import gpu_lock as tuning_lock
from flashgen.tuning import Progress

HOLDER = """
import fcntl, os, sys, time
handle = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def held(path: Path, seconds: float = 60, argument: bytes = b"") -> Iterator[int]:
    """Another process holds the lock of `path`; `argument` is one more of its command."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path), str(seconds), argument], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process.pid
        finally:
            process.kill()


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_that_stays_held_is_told_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / kind
    path.touch() if kind == "file" else path.mkdir()
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.1)
    said: list[str] = []
    with held(path) as pid:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=rf"^process {pid} \(.*python.*\) still holds the {kind} after 0\.5 s$"):
            locked(path, f"the {kind}", 0.5, said.append).__enter__()
        assert 0.5 <= time.monotonic() - begun < 5
    assert len(said) == 1
    assert said[0].startswith(f"process {pid} (")
    assert said[0].endswith(f"holds the {kind}: waiting for it, 0.5 s at most")


@pytest.mark.parametrize("argument", [b"\xff\xfe", "ü".encode()[:1]], ids=["no text", "half a letter"])
def test_a_command_that_is_no_utf_8_is_told(tmp_path: Path, argument: bytes) -> None:
    said: list[str] = []
    with held(tmp_path, argument=argument) as pid, pytest.raises(TimeoutError, match=rf"^process {pid} \(.* still holds it after 0 s$"):
        locked(tmp_path, "it", 0, said.append).__enter__()
    assert not said


def test_a_lock_that_gets_free_is_taken(tmp_path: Path) -> None:
    said: list[str] = []
    with held(tmp_path, seconds=0.2), locked(tmp_path, "the folder", 60, said.append):
        pass
    with locked(tmp_path / "new.lock", "the file", 60, said.append):
        assert (tmp_path / "new.lock").stat().st_mode & 0o777 == 0o600
    assert said == []


def test_a_link_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OSError, match="symbolic link"):
        locked(tmp_path / "link", "the file", 60).__enter__()
    assert os.listdir(tmp_path) == ["link"]


def test_records_do_not_hang_on_a_held_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "BUSY_SECONDS", 0.3)
    tmp_path.chmod(0o700)
    with (
        held(tmp_path) as pid,
        pytest.warns(RuntimeWarning, match=rf"cannot hold tuning records \(process {pid} .* still holds {tmp_path}"),
    ):
        assert RecordFile(tmp_path / "records.sqlite3").all() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RecordFile(tmp_path / "records.sqlite3").all() == []


def test_a_gpu_that_another_run_keeps_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(tuning_lock, "WAIT_SECONDS", 0.3)
    heard = Heard()
    with tuning_lock.exclusive("GPU-1", heard):
        assert heard.lines == []
    with held(tmp_path / "cache/locks/GPU-1.lock") as pid, pytest.raises(FlashgenError, match=rf"^process {pid} .* still holds this GPU"):
        tuning_lock.exclusive("GPU-1", heard).__enter__()
    assert len(heard.lines) == 1
    assert "holds this GPU" in heard.lines[0]


def test_without_a_cache_folder_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "/dev/null/cache")
    heard = Heard()
    with tuning_lock.exclusive("GPU-1", heard):
        assert heard.lines[0].startswith("no lock against a second run on this GPU: ")


def test_a_child_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of forks beside threads
        with locked(tmp_path, "it", 1):
            child.start()
    try:
        with locked(tmp_path, "it", 1):
            pass
    finally:
        child.kill()
        child.join()
