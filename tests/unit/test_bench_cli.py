"""`flashgen bench` without a GPU: dry runs, saved results, messages and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from flashgen.bench import files
from flashgen.bench.peers import parse_peers
from flashgen.bench.result import BenchResult
from flashgen.bench.session import BenchRequest, Session
from flashgen.build.gpu.driver import DriverError
from flashgen.build.own_files import LIST
from flashgen.cli import bench as command
from flashgen.codegen.errors import FlashgenError
from flashgen.tuning import Progress
from tests.support.bench_results import result
from tests.support.command_line import as_json, flashgen
from tests.support.misuse import misuse


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    files.save(result(), tmp_path)
    return tmp_path / "bench.json"


def test_the_help_of_peers_names_those_of_a_plain_run() -> None:
    out, _ = flashgen("bench", "--help")
    assert f"Default: {', '.join(parse_peers(None))}." in " ".join(out.split())


def test_dry_run_lists_cells_and_peers() -> None:
    out, err = flashgen("bench", "--dry-run", "--grid", "decode,tutorial", "--peers", "flash,fa4")
    assert "decode    bf16_d128_full   B1 H32/8 S1x65536" in out
    assert "No module named 'flash_attn'" in out
    assert not err
    out, _ = flashgen("bench", "--dry-run", "--grid", "relative", "--peers", "flash")
    assert "relative  bf16_d64_causal_relative   B4 H32 S4096 " in out
    facts = as_json("bench", "--dry-run", "--peers", "math,flash")
    assert len(facts["cells"]) == 28
    assert facts["cells"][0]["workload"] == {"batch": 1, "heads_q": 16, "heads_kv": 16, "len_q": 16384, "len_kv": 16384}
    assert (facts["peers"], facts["baseline"]) == (["math", "flash"], "flash")


def test_dry_run_of_one_workload() -> None:
    options = ["--head-dim", "64", "--head-dim-v", "32", "--dtype", "fp16", "--causal", "--batch", "2", "--heads", "8", "--kv-heads", "2"]
    facts = as_json("bench", "--dry-run", "--peers", "math", *options, "--seqlen", "1", "--seqlen", "128", "--seqlen-kv", "4096")
    assert [cell["grid"] for cell in facts["cells"]] == ["workload"] * 2
    assert facts["cells"][1]["problem"] == {"pass": "forward", "dtype": "fp16", "head_dim": 64, "head_dim_v": 32, "mask": "causal"}
    assert [cell["workload"]["len_q"] for cell in facts["cells"]] == [1, 128]
    assert facts["cells"][0]["workload"]["len_kv"] == 4096


def test_dry_run_of_the_backward_pass() -> None:
    out, err = flashgen("bench", "--pass", "backward", "--dry-run", "--grid", "further", "--peers", "math,attention_backward")
    assert "further  backward_bf16_d192x128_causal  B4 H16 S4096     859.0  " in out, "2.5 times the forward pass"
    assert not err
    facts = as_json("bench", "--pass", "backward", "--dry-run", "--peers", "flash")
    assert len(facts["cells"]) == 12
    by_hand = as_json("bench", "--pass", "backward", "--dry-run", "--peers", "math", "--head-dim", "64", "--seqlen", "512", "--causal")
    assert [cell["problem"]["pass"] for cell in (*facts["cells"], *by_hand["cells"])] == ["backward"] * 13


def test_call_overhead_alone_measures_no_cell() -> None:
    assert as_json("bench", "--dry-run", "--peers", "math", "--call-overhead")["cells"] == []
    assert as_json("bench", "--dry-run", "--peers", "math", "--host", "--grid", "mixed")["cells"]


def test_a_saved_result_is_shown(saved: Path) -> None:
    out, err = flashgen("bench", "--from", str(saved))
    assert "flashgen TFLOP/s" in out
    assert "bf16_d64_causal" in out
    assert "geometric mean 2.000 x over 3 cells" in out
    assert not err


def test_a_saved_result_as_json_is_the_file(saved: Path) -> None:
    assert as_json("bench", "--from", str(saved)) == json.loads(saved.read_text())


def test_a_saved_result_is_drawn(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    _, err = flashgen("bench", "--from", str(saved), "--out", str(folder))
    names = ["bench-decode.png", "bench-standard.png", "bench.json", "bench.md"]
    assert sorted(p.name for p in folder.iterdir()) == [LIST, *names]
    assert all(f"wrote {folder / name}" in err for name in names)
    assert (folder / "bench.json").read_text() == saved.read_text()


@pytest.mark.slow
def test_a_file_of_the_users_is_kept(saved: Path, tmp_path: Path) -> None:
    flashgen("bench", "--from", str(saved), "--out", str(tmp_path))  # in its own place, and again
    flashgen("bench", "--from", str(saved), "--out", str(tmp_path))
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "bench-of-mine.png").write_bytes(b"mine")
    out, err = flashgen("bench", "--from", str(saved), "--out", str(folder), code=2)
    assert (out, sorted(p.name for p in folder.iterdir())) == ("", ["bench-of-mine.png"])
    assert f"out must be a folder in which flashgen replaces its own files only; got {folder}, in which {folder}/bench-of-mine.png" in err


def test_what_cannot_be_written_is_shown(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> list[Path]:
        raise FlashgenError("bench.json cannot be written: No space left on device")

    monkeypatch.setattr(files, "save", full)
    with pytest.raises(FlashgenError, match="No space left"):
        command.bench(source=saved, out=tmp_path / "new")
    assert "geometric mean" in capsys.readouterr().out


def test_what_cannot_be_shown_is_written(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 (until the test ends)
    with pytest.raises(OSError, match="No space left"):
        command.bench(source=saved, out=tmp_path / "new")
    monkeypatch.undo()
    assert (tmp_path / "new/bench.json").read_text() == saved.read_text()


def test_without_matplotlib_everything_else_is_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> list[Path]:
        raise files.PlotError("plots need matplotlib: pip install 'flashgen[plot]'")

    monkeypatch.setattr(files, "draw", none)
    command.bench(source=saved, out=tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [LIST, "bench.json", "bench.md"]
    out, err = capsys.readouterr()
    assert "geometric mean" in out
    assert "flashgen: plots need matplotlib" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--grid", "fwd"],
            "grid must be one of standard, gqa, mixed, short, decode, tutorial, window, "
            "softcap, alibi, sinks, documents, relative, dropout, bias, key-bias, varlen, paged, ragged, prefill, all-forward; got 'fwd'",
        ),
        (["--peers", "fa3"], "peers must be one of flashgen, flash,"),
        (["--peers", "flash", "--baseline", "cudnn"], "baseline must be one of flash; got 'cudnn'"),
        (["--rounds", "0"], "rounds must be an integer from 1 to 1000; got 0"),
        (["--batch", "0"], "head_dim must be given with options of one workload; got --batch without it"),
        (["--seqlen", "5", "--causal"], "head_dim must be given with options of one workload; got --seqlen, --causal without it"),
        (["--head-dim", "64", "--batch", "0"], "batch must be an integer from 1 to 2147483647; got 0"),
        (["--head-dim", "64", "--seqlen-kv", "0"], "seqlen_kv must be an integer from 1"),
        (["--pass", "both"], "pass must be one of forward, backward; got 'both'"),
        (["--pass", "both", "--head-dim", "64"], "pass must be one of forward, backward; got 'both'"),
        (
            ["--pass", "backward", "--grid", "decode"],
            "grid must be one of standard, further, gqa, mixed, short, tutorial, window, "
            "softcap, alibi, sinks, documents, relative, dropout, bias, key-bias, varlen, all-backward; got",
        ),
        (
            ["--pass", "backward", "--call-overhead"],
            "pass must be forward with call_overhead, which measures forward calls, gradients off and on; got backward",
        ),
        (["--from", "x.json", "--pass", "backward"], "from must stand without options of measuring; got --pass as well"),
        (["--head-dim", "64", "--grid", "gqa"], "grid must stand without head_dim; got grid gqa and head_dim 64"),
        (["--from", "nowhere.json"], "from must be a bench.json that can be read; got nowhere.json: No such file"),
        (["--from", "x.json", "--grid", "gqa", "--call-overhead", "--batch", "3"], "got --grid, --call-overhead, --batch as well"),
    ],
)
def test_misuse_exits_2_and_names_the_argument(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err = misuse(monkeypatch, capsys, "bench", *arguments)
    assert message in err
    assert err.startswith("flashgen: ")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU: /dev/nvidia0 is there")
def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path) -> None:
    out, err = flashgen("bench", "--out", str(tmp_path / "new"), code=1)
    assert "driver must be 580 or newer" in err
    assert not out
    assert not (tmp_path / "new").exists()


def test_a_pytorch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.bench.session.gpu", lambda ordinal: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DriverError, match="finds no GPU: install one that was built for CUDA"):
        Session.here(BenchRequest({}, ["math"]), Progress())


class FakeSession:
    """Has measured `found`, and then ends with `error`."""

    found: BenchResult
    error: BaseException | None

    @classmethod
    def here(cls, request: BenchRequest, progress: object) -> FakeSession:
        return cls()

    @property
    def result(self) -> BenchResult:
        return self.found

    def run(self, save: Any) -> None:
        save(self.found)
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("error", "failing", "code", "message"),
    [
        (None, "", 0, ""),
        (None, "cudnn", 0, ""),
        (None, "flashgen", 1, ""),
        (KeyboardInterrupt(), "", 130, "stopped; what was measured so far follows"),
        (FlashgenError("the GPU's context was lost to flex"), "", 1, "context was lost to flex"),
    ],
)
def test_what_was_measured_is_told_and_kept_however_a_run_ends(
    error: BaseException | None, failing: str, code: int, message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = result()
    found.complete = error is None
    if failing:
        found.cells[0].errors[failing] = "wrong: something"
    monkeypatch.setattr(FakeSession, "found", found, raising=False)
    monkeypatch.setattr(FakeSession, "error", error, raising=False)
    monkeypatch.setattr("flashgen.bench.session.Session", FakeSession)
    monkeypatch.setattr("flashgen.bench.plot._png", lambda figure: b"drawn")
    try:
        command.bench(peers="math", out=tmp_path, json=True)
        given = 0
    except typer.Exit as stop:
        given = stop.exit_code
    assert given == code
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "bench.json").read_text())
    assert files.read_result(tmp_path / "bench.json") == found
    assert message in err
    assert (tmp_path / "bench.md").is_file()
