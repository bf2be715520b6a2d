"""What the command line writes: printable text only, and a sentence where it cannot be written."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import flashgen
from flashgen.build.gpu.driver import gpu_count
from flashgen.build.store.store import ArtifactStore
from flashgen.cli import cache as cache_commands
from flashgen.cli import options, progress
from flashgen.cli.terminal import PrintableStream, printable
from flashgen.codegen.errors import FlashgenError
from flashgen.records import sources
from flashgen.records.store import Records
from flashgen.selection import compilation
from tests.support import command_line
from tests.support.made_records import DEVICE, make

EVIL = "GPU\x1b[2J\x1b]0;title\x07\r\u202e\x9b31m"
SHOW = [sys.executable, "-m", "flashgen", "show", "--head-dim", "8", "--arch", "sm_80"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with a record of a GPU that has a bad name."""
    path = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(path))
    Records(path / "records.sqlite3").add([make(device=dataclasses.replace(DEVICE, name=EVIL))])
    return path


def is_printable(text: str) -> bool:
    return re.search(r"[^\n\t -~\xa0-\u1fff]", text) is None


def test_control_characters_become_escapes() -> None:
    assert printable(EVIL) == r"GPU\x1b[2J\x1b]0;title\x07\r\u202e\x9b31m"
    assert printable("plain\ttext\nof µs, \ud800 and \udcff") == r"plain\ttext\nof µs, \ud800 and \udcff".replace(r"\t", "\t").replace(
        r"\n", "\n"
    )
    assert is_printable(printable("".join(map(chr, range(0x100)))))


def test_streams_let_nothing_else_through(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.StringIO()
    monkeypatch.setattr(sys, "stderr", PrintableStream(below))
    print(EVIL, file=sys.stderr)
    with progress.Bars(quiet=False) as bars:
        bars.begin(EVIL, 3)
        bars.say(EVIL)
    sys.stderr.writelines([EVIL])
    assert below.getvalue().count("GPU") == 4
    assert is_printable(below.getvalue())


def test_bars_on_a_terminal_show_no_foreign_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.StringIO()
    monkeypatch.setattr(below, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", PrintableStream(below))
    monkeypatch.setenv("TERM", "xterm")
    console = Console(stderr=True, force_terminal=True)
    monkeypatch.setattr(progress, "stderr", console)
    with progress.Bars(quiet=False) as bars:
        bars.begin("compiling" + EVIL, 3)
        bars.say("said" + EVIL)
    assert "\x1b[" in below.getvalue(), "bars are drawn"
    assert "\x1b[2J" not in below.getvalue()
    assert r"said" + printable(EVIL) in below.getvalue()


def test_tables_hold_no_control_sequences(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    options.print_table((("heading", False),), [["value"]])
    assert capsys.readouterr().out == "heading\nvalue\n"


@pytest.mark.slow
def test_a_device_name_reaches_no_terminal(cache: Path, tmp_path: Path) -> None:
    out, _ = command_line.flashgen("doctor", code=int(gpu_count() > 0))  # it finds fault with GPUs that are hidden from it
    _, err = command_line.flashgen("cache", "export", str(tmp_path / "x"), "--device-name", "other", code=2)
    for text in (out, err):
        assert r"GPU\x1b[2J\x1b]0;title" in text
        assert is_printable(text)


def test_version() -> None:
    assert command_line.flashgen("--version")[0] == f"flashgen {flashgen.__version__}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", [SHOW, [*SHOW[:3], "--version"]], ids=["much", "little"])
def test_a_full_disk_behind_stdout_is_a_sentence(command: list[str], unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "flashgen: output: No space left on device\n")


def test_what_the_encoding_lacks_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "caché"))
    done = subprocess.run([*SHOW[:3], "cache"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/cach\\xe9\n" in done.stdout


@pytest.mark.parametrize("stream", [1, 2])
def test_closed_streams(stream: int) -> None:
    done = subprocess.run(SHOW, capture_output=True, text=True, preexec_fn=lambda: os.close(stream))
    if stream == 1:
        assert done.returncode == 1
        assert done.stderr.startswith("flashgen: stdout is closed")
    else:
        assert done.returncode == 0
        assert done.stdout.startswith("// attention_forward")


def test_records_are_not_read_from_a_closed_stdin() -> None:
    command = [sys.executable, "-m", "flashgen", "cache", "import", "-"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.close(0))
    assert (done.returncode, done.stderr) == (2, "flashgen: file must be one that can be read; got -, and stdin is closed\n")


def test_a_pipe_that_nobody_reads_is_no_error_to_tell() -> None:
    with subprocess.Popen(SHOW, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_what_cannot_be_cleared_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = ArtifactStore(cache)
    monkeypatch.setattr(compilation, "store", lambda: store)
    monkeypatch.setattr(store, "_entries", lambda: iter([(cache / "artifacts/ab/entry", 1)]))

    def read_only(*_: object, **__: object) -> str:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", read_only)
        with pytest.raises(FlashgenError, match=rf"^{cache} cannot be cleared: Read-only file system$"):
            cache_commands.clear()
    monkeypatch.setattr(store, "_entries", lambda: iter([]))
    records = Records(cache / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: records)
    records.all()
    with monkeypatch.context() as patch:
        patch.setattr(records._file, "_run_on_file", read_only)
        with pytest.warns(RuntimeWarning, match="cannot hold tuning records"), pytest.raises(FlashgenError, match="its records stay"):
            cache_commands.clear(records=True)
    assert "records removed" not in capsys.readouterr().out
    assert len(Records(cache / "records.sqlite3")) == 1
