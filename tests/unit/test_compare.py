"""`flashgen compare` without a GPU: what follows from sizes, predictions, tables, figures, and a measured run with peers made up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from flashgen import tuning
from flashgen.bench.peer import AttentionPeer, Call
from flashgen.bench.runner import ContextLostError, Runner
from flashgen.build.gpu import driver
from flashgen.build.gpu.driver import Gpu
from flashgen.cells import Cell
from flashgen.cli import compare as command
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import Traffic, find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.compare import measured, report, shapes
from flashgen.compare.counters import CountersError
from flashgen.compare.formula import ByteBounds, Roofline
from flashgen.compare.predicted import predict
from flashgen.compare.result import CellComparison, ComparedRow, Comparison, CountedBytes
from flashgen.numerics.forward import plain
from flashgen.timing.spread import Spread
from flashgen.tuning import Progress
from tests.support.bench_results import ENVIRONMENT
from tests.support.command_line import as_json, flashgen

H200 = find_device("h200")
Capture = pytest.CaptureFixture[str]
CELL = Cell(Problem(Dtype.FP16, 64, 32, Mask.CAUSAL), Workload(2, 4, 2, 100, 300))


# ---- what follows from sizes ----


def test_the_bounds_of_the_papers() -> None:
    """By hand: 8 heads, d (64 + 32) / 2, 2 bytes a number, 228 KB of shared memory an SM."""
    bounds = ByteBounds.of(CELL, H200)
    assert bounds.compulsory == CELL.io_bytes
    assert bounds.quadratic == 8 * (100 * 48 + 100 * 300) * 2
    assert bounds.tiled == pytest.approx(8 * 100 * 300 * 48**2 / (228 * 1024 / 2) * 2)


def test_the_roofline() -> None:
    roof = Roofline.of(H200)
    assert roof.flops == 4096 * H200.sm_count * H200.clock_hz, "wgmma's rate"
    assert Roofline.of(find_device("rtx4090")).flops == 0.5 * 1024 * 128 * find_device("rtx4090").clock_hz
    ridge = roof.flops / roof.bandwidth
    assert (roof.bound(0.9 * ridge), roof.bound(1.1 * ridge)) == ("memory", "compute")
    assert roof.attainable(0.5 * ridge) == pytest.approx(0.5 * roof.flops)
    assert roof.attainable(2 * ridge) == roof.flops


def test_grids() -> None:
    cells = shapes.compared_cells(passes="forward")
    assert {(c.problem.head_dim, c.problem.mask.value, c.workload.name) for c in cells["articles"]} == {
        (64, "full", "B32 H16 S512"), (64, "causal", "B32 H16 S512"), (32, "full", "B64 H32 S256"),
    }  # fmt: skip
    for grid, mask in (("lengths", Mask.FULL), ("lengths_causal", Mask.CAUSAL)):
        assert [c.workload.len_q for c in cells[grid]] == [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
        assert {c.problem.mask for c in cells[grid]} == {mask}
    assert {c.problem.operation for some in cells.values() for c in some} == {"forward"}
    both = shapes.compared_cells("articles")["articles"]
    assert [c.problem.operation for c in both] == ["forward"] * 3 + ["backward"] * 3
    assert both[3:] == shapes.compared_cells("articles", "backward")["articles"]
    with pytest.raises(ArgumentError, match="grid must be one of articles, lengths, lengths_causal, beyond_l2; got 'x'"):
        shapes.compared_cells("x")


def test_rungs_are_families_and_the_others_are_peers() -> None:
    from flashgen.bench.peers import PEERS

    assert all(find_family(name).operation == "forward" for name in shapes.RUNGS)
    assert PEERS.keys() >= {*shapes.OTHERS}


# ---- predicted ----


@pytest.fixture(scope="module")
def predicted() -> Comparison:
    return predict(shapes.compared_cells("articles,lengths,beyond_l2", "forward"), [*shapes.RUNGS, "flash"], H200)


def test_predicted_memory_grows_as_the_papers_say(predicted: Comparison) -> None:
    exponents = predicted.memory_exponents()
    assert exponents.keys() == {*shapes.RUNGS}
    assert exponents.pop("standard_attention") == pytest.approx(2, abs=0.1)
    for name, exponent in exponents.items():
        assert exponent == pytest.approx(1, abs=0.1), name


def test_a_prediction_is_of_models_and_formulas(predicted: Comparison) -> None:
    assert predicted.predicted
    cell = [cell for cell in predicted.cells if cell.grid == "lengths"][-1]
    rows = {row.name: row for row in cell.rows}
    assert rows["flash"] == ComparedRow("flash", error="not predicted: there is no model of it")
    standard, flash2 = rows["standard_attention"], rows["flash2_forward"]
    out, scores = 16 * 16384 * 64 * 2, 16 * 16384**2
    assert standard.peak_bytes == pytest.approx(out + scores * (4 + 2), rel=0.001), "S in fp32 and P"
    assert flash2.peak_bytes == out
    assert flash2.moved_bytes is not None
    assert flash2.moved_bytes >= cell.bounds.compulsory
    assert standard.ms is not None
    assert flash2.ms is not None
    assert standard.ms.median > flash2.ms.median


def test_what_a_device_cannot_do_is_said() -> None:
    (cell,) = predict({"articles": [CELL]}, ["attention_forward_sm90"], find_device("a100")).cells
    assert cell.rows[0].ms is None
    assert cell.rows[0].error == "target must be sm_90a; got sm_80"


# ---- told ----


def test_the_command_without_a_gpu_predicts_and_says_so(tmp_path: Path) -> None:
    out, err = flashgen("compare", "--grid", "articles", "--pass", "forward", "--device", "h200", "--out", str(tmp_path))
    assert out.startswith("NVIDIA H200: PREDICTED")
    assert "articles: fp16_d64_causal B32 H16 S512: 17.2 GFLOP" in out
    assert "standard_attention" in out
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert saved["predicted"] is True
    assert "PREDICTED" in (tmp_path / "compare.md").read_text()
    assert (tmp_path / "compare-roofline.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "compare-lengths.png").exists()
    assert "wrote" in err
    facts = as_json("compare", "--grid", "lengths", "--pass", "forward", "--device", "h200", "--peers", "flash2_forward,flash")
    assert [row["name"] for row in facts["cells"][0]["rows"]] == ["flash2_forward", "flash"]
    assert facts["memory_exponents"].keys() == {"flash2_forward"}
    row = facts["cells"][-1]["rows"][0]
    assert row["intensity"] == pytest.approx(facts["cells"][-1]["flops"] / row["moved_bytes"])


def test_nobody_s_time_is_a_failure() -> None:
    flashgen("compare", "--grid", "articles", "--pass", "forward", "--device", "h200", "--peers", "flash", code=1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--grid", "x"], "grid"),
        (["--pass", "softmax"], "pass"),
        (["--peers", "x"], "peers"),
        (["--rounds", "0"], "rounds"),
        (["--device", "x"], "device"),
    ],
)
def test_misuse_names_the_argument(options: list[str], named: str) -> None:
    _, err = flashgen("compare", *options, code=2)
    assert err.startswith(f"flashgen: {named} must be ")


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "compare.md").write_text("mine")
    _, err = flashgen("compare", "--grid", "articles", "--device", "h200", "--out", str(tmp_path), code=2)
    assert "compare.md" in err
    assert [path.name for path in tmp_path.iterdir()] == ["compare.md"]


def test_failures_and_figures_are_told_apart() -> None:
    counted = CountedBytes(3 * 10**9, 10**6, 5, 2 * 10**9, 4 * 10**6)
    rows = [
        ComparedRow("a", "k", Spread(1.0, 0.9, 1.1), 10**9, Traffic(10**9, 10**6, 5), counted),
        ComparedRow("b", error="CUDA out of memory"),
    ]
    result = Comparison(
        "GPU", Roofline.of(H200), ENVIRONMENT, ["a", "b"], [CellComparison("articles", CELL, ByteBounds.of(CELL, H200), rows)]
    )
    ((_, table),) = report.comparison_tables(result)
    assert table.rows[0][:2] == ["a", "1000.0 [900.0..1100.0]"]
    assert table.rows[0][3:6] == ["1000", f"{(10**9 + result.cells[0].input_bytes) / 1e6:.0f}", "1001"]
    assert table.rows[0][6:8] == ["3001", "2004"]
    assert table.rows[1] == ["b", "out of memory", *["-"] * 8]
    assert "b: CUDA out of memory" in report.comparison_summary(result)
    assert result.to_json()["cells"][0]["rows"][0]["moved_bytes"] == 10**9 + 10**6 + 5


# ---- measured ----


class Plain(AttentionPeer):
    name = "plain"

    def bind(self, cell: Cell, device: torch.device) -> Call:
        causal, scale = cell.problem.mask is Mask.CAUSAL, cell.problem.head_dim**-0.5

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain(q, k, v, causal=causal, scale=scale)[0]

        return call


class Wrong(Plain):
    name = "wrong"

    def bind(self, cell: Cell, device: torch.device) -> Call:
        call = super().bind(cell, device)
        return lambda q, k, v: 2 * call(q, k, v)


def test_a_measured_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where there is no peak to be read: the runner, what fails, and what is saved."""
    peers: dict[str, Any] = {"plain": Plain(), "wrong": Wrong()}
    stopwatch = SimpleNamespace(seconds=lambda work: (work(), 1e-3)[1], graph=lambda work: work)

    class CpuRunner(Runner):
        def __init__(self, given: Any, device: torch.device, l2_bytes: int, rounds: int) -> None:
            super().__init__(given, device, 0, rounds, stopwatch)

    monkeypatch.setattr(measured, "make_peers", lambda names: (peers, {"absent": "no module"}))
    monkeypatch.setattr(measured, "Runner", CpuRunner)
    monkeypatch.setattr(measured, "measured_environment", lambda *given: ENVIRONMENT)
    monkeypatch.setattr(measured, "exclusive", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(measured, "sdpa_settings_kept", contextlib.nullcontext)
    monkeypatch.setattr(measured, "torch_device", lambda on: torch.device("cpu"))
    peaks = iter([5])

    def peak(peer: Any, cell: Cell, runner: Any) -> int:
        for found in peaks:
            return found
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measured, "peak_bytes", peak)
    small = dataclasses.replace(CELL, workload=Workload(1, 2, 2, 20, 33))
    saved: list[int] = []
    given = ["plain", "wrong", "absent"], Gpu(0, H200, "uuid", "580.0"), 3, "command", "ncu"
    seen, asked = CountedBytes(1000, 200, 30, 4, 5), list[Any]()

    def count(calls: Any, *given: object) -> list[CountedBytes]:
        asked.append((calls, given))
        return [seen for _ in calls]

    monkeypatch.setattr(measured, "count_bytes", count)
    cells = {"articles": [small, small]}
    run = measured.Measurement(*given)
    run.run(cells, Progress(), lambda found: saved.append(len(found.cells)))
    result = run.result
    assert result.complete
    assert saved == [1, 2]
    first, second = ({row.name: row for row in cell.rows} for cell in result.cells)
    assert first["plain"].ms is not None
    assert (first["plain"].peak_bytes, first["plain"].error) == (5, "")
    assert asked == [([("plain", small)], (0, "ncu"))], "who was timed, and has a peak that says what a profiler must save"
    assert (first["plain"].counted, second["plain"].counted) == (seen, None)
    assert result.to_json()["cells"][0]["rows"][0]["counted"]["reduced"] == 30
    assert "wrong" in first["wrong"].error
    assert first["absent"].error == "no module"
    assert second["plain"].ms is not None, "its time is not lost with its memory"
    assert (second["plain"].peak_bytes, second["plain"].error) == (None, "memory not measured: RuntimeError: out of memory")

    def denied(*given: object) -> Any:
        raise CountersError("ERR_NVGPUCTRPERM")

    peaks = iter([5, 5])
    monkeypatch.setattr(measured, "count_bytes", denied)
    without = measured.Measurement(*given)
    without.run(cells, Progress(), lambda found: None)
    assert [row.counted for cell in without.result.cells for row in cell.rows if row.name == "plain"] == [None, None]
    assert "bytes were not counted: ERR_NVGPUCTRPERM" in report.comparison_summary(without.result)

    stopped = measured.Measurement(*given)

    def stop(found: Comparison) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.run(cells, Progress(), stop)
    assert (len(stopped.result.cells), stopped.result.complete) == (1, False)
    assert "the run was stopped before its end" in report.comparison_summary(stopped.result)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ContextLostError("the GPU is gone"), 1)])
def test_what_was_measured_before_a_run_ended_is_kept(
    error: BaseException, code: int, predicted: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    class Ending:
        def __init__(self, *given: object) -> None:
            self.result = dataclasses.replace(predicted, complete=False)

        def run(self, *given: object) -> None:
            raise error

    monkeypatch.setattr("flashgen.compare.plot._png", lambda figure: b"drawn")
    monkeypatch.setattr(measured, "Measurement", Ending)
    monkeypatch.setattr(tuning, "named_or_here", lambda text: 0)
    monkeypatch.setattr(driver, "gpu", lambda ordinal: None)
    with pytest.raises(typer.Exit) as exited:
        command.compare(out=tmp_path)
    assert exited.value.exit_code == code
    out, err = capsys.readouterr()
    assert "the run was stopped before its end" in out
    assert "stopped" in err or "the GPU is gone" in err
    assert json.loads((tmp_path / "compare.json").read_text())["complete"] is False
