"""`flashgen compare` of a forward pass with its backward pass, without a GPU: who takes part, what a call is, and what is said of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.bench.eager import Eager
from flashgen.bench.peer import Call, Peer
from flashgen.bench.peers import FamilyPeer, make_peers
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import sdpa_settings_kept
from flashgen.bench.work import prepare_with_backward
from flashgen.build.gpu.driver import Gpu
from flashgen.cells import Cell
from flashgen.codegen.devices import find_device
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.compare import measured, report, shapes
from flashgen.compare.plot import draw_lengths, draw_roofline
from flashgen.compare.predicted import predict
from flashgen.compare.result import CellComparison, Comparison
from flashgen.compare.with_backward import FamilyWithBackward, with_backward
from flashgen.progress import Progress
from flashgen.selection.picks import picked_spec
from tests.support.bench_results import ENVIRONMENT

CPU, H200 = torch.device("cpu"), find_device("h200")
FORWARD = Cell(Problem(Dtype.FP16, 64), Workload(1, 16, 16, 2048, 2048))
BOTH = replace(FORWARD, problem=replace(FORWARD.problem, operation="backward"))
SMALL = Cell(Problem(Dtype.FP16, 16, 8, Mask.CAUSAL, "backward"), Workload(1, 2, 2, 20, 33))


# ---- who takes part ----


def test_each_rung_has_its_gradients_or_eager_stands_for_it() -> None:
    for rung, family in shapes.BACKWARD_FAMILIES.items():
        assert find_family(rung).operation == "forward"
        assert family is None or find_family(family).operation == "backward"
    names = [*shapes.RUNGS, "flash"]
    assert list(shapes.participants(names, "forward")) == names
    assert shapes.participants(names, "backward") == {
        **dict.fromkeys((*shapes.BACKWARD_FAMILIES, "flash"), ()), "eager_fp16": ("standard_attention", "memory_efficient_attention"),
    }  # fmt: skip
    assert shapes.participants(["eager_fp16", "flash1_forward"], "backward") == {"eager_fp16": (), "flash1_forward": ()}
    assert shapes.all_participants(names, [FORWARD]) == names
    assert shapes.all_participants(names, [FORWARD, BOTH]) == [*names, "eager_fp16"]


def test_calls() -> None:
    assert shapes.calls_of(FORWARD) == (FORWARD,)
    assert shapes.calls_of(BOTH) == (FORWARD, BOTH)


# ---- predicted ----


@pytest.fixture(scope="module")
def predicted() -> Comparison:
    return predict({"lengths": [FORWARD, BOTH]}, shapes.RUNGS, H200)


def test_a_prediction_is_of_both_calls(predicted: Comparison) -> None:
    forward, both = predicted.cells
    rows = {row.name: row for row in both.rows}
    assert list(rows) == [*shapes.BACKWARD_FAMILIES, "eager_fp16"]
    assert [row.backward for row in both.rows][:3] == ["flash1_backward", "flash2_backward", "attention_backward"]
    assert find_family(rows["attention_forward_sm90"].backward).name.endswith("_sm90"), "Hopper's own"
    assert both.flops == pytest.approx(3.5 * forward.flops)
    tensor, numbers = 16 * 2048 * 64 * 2, 16 * 2048 * 4
    assert both.input_bytes == 4 * tensor, "d_out, too"
    assert both.bounds.compulsory == 4 * tensor + (8 * tensor + numbers)
    for row in forward.rows[2:]:
        alone, together = row.ms, rows[row.name].ms
        assert alone is not None
        assert together is not None
        assert together.median > 2 * alone.median
    for row in both.rows[:-1]:
        assert row.peak_bytes is not None
        assert row.peak_bytes >= 4 * tensor + numbers, "out and lse are there while gradients are written"
        assert row.peak_bytes < 16 * tensor, "no scores"
        assert row.kernel.count(" + ") == 1


def test_bytes_are_those_of_both_passes_where_both_families_say_them(predicted: Comparison) -> None:
    both = predicted.cells[1]
    rows = {row.name: row for row in both.rows}
    for version in ("flash1", "flash2"):
        found = rows[f"{version}_forward"].traffic
        specs = [
            picked_spec(call.problem, call.workload, H200, ("", ""), f"{version}_{call.problem.operation}")
            for call in shapes.calls_of(both.cell)
        ]
        own = [spec.family.traffic(spec.problem, spec.config, both.cell.workload, H200) for spec in specs]
        assert found is not None
        assert (found.read, found.written, found.reduced) == tuple(
            sum(getattr(each, name) for each in own) for name in ("read", "written", "reduced")
        )
        assert both.intensity(rows[f"{version}_forward"]) == both.flops / (found.read + found.written + found.reduced)
    assert all(rows[name].traffic for name in ("attention_forward", "attention_forward_sm90"))
    assert draw_roofline(predicted).axes, "points of both passes, too"


def test_what_is_said_of_it(predicted: Comparison) -> None:
    (_, forward), (_, both) = report.comparison_tables(predicted)
    assert (forward.title, both.title) == (
        "lengths: fp16_d64_full B1 H16 S2048", "lengths: fp16_d64_full B1 H16 S2048, with backward",
    )  # fmt: skip
    assert both.columns == forward.columns == report.COLUMNS
    assert [line[0] for line in both.rows][:2] == ["flash1_forward + flash1_backward", "flash2_forward + flash2_backward"]
    assert both.rows[-1] == ["eager_fp16, for standard_attention, memory_efficient_attention", "not predicted", *["-"] * 8]
    summary = report.comparison_summary(predicted)
    assert "standard_attention has no backward pass: with backward, eager_fp16 stands for it" in summary
    assert "eager_fp16: not predicted: there is no model of it" in summary
    alone = report.comparison_summary(replace(predicted, cells=[predicted.cells[1]], environment=ENVIRONMENT))
    assert any(line.startswith("formula: ") for line in alone)
    assert any(line.startswith("counted: ") for line in alone)
    facts = predicted.to_json()
    assert [cell["pass"] for cell in facts["cells"]] == ["forward", "forward_backward"]
    assert facts["cells"][1]["rows"][-1]["stands_for"] == ["standard_attention", "memory_efficient_attention"]


def test_memory_grows_by_pass_and_a_figure_has_a_row_for_each() -> None:
    lengths = [replace(cell, workload=replace(cell.workload, len_q=s, len_kv=s)) for cell in (FORWARD, BOTH) for s in (1024, 2048, 4096)]
    result = predict({"lengths_causal": lengths}, ["flash2_forward"], H200)
    growth = {(grid, operation): found["flash2_forward"] for grid, operation, found in result.memory_growth()}
    assert growth == {("lengths_causal", operation): pytest.approx(1, abs=0.01) for operation in ("forward", "backward")}
    figure = draw_lengths(result, result.cells)
    assert [ax.get_title() for ax in figure.axes] == [
        "forward: time of a call", "forward: peak memory beyond the inputs",
        "forward with backward: time of a call", "forward with backward: peak memory beyond the inputs",
    ]  # fmt: skip
    assert len(draw_lengths(result, result.cells[:3]).axes) == 2


def test_a_rung_that_a_device_lacks_is_said() -> None:
    (cell,) = predict({"articles": [BOTH]}, ["attention_forward_sm90"], find_device("a100")).cells
    assert cell.rows[0].error == "target must be sm_90a; got sm_80"


# ---- what a call is ----


@pytest.fixture
def _settings() -> Iterator[None]:
    with sdpa_settings_kept():
        yield


def test_every_call_goes_forward_and_back() -> None:
    calls, inputs = list[int](), {name: torch.randn(1, 4, 1, 8) for name in ("q", "k", "v", "d_out")}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return q * k + v, q

    run = prepare_with_backward(attention, inputs)
    calls.clear()
    with torch.no_grad():  # as the runner calls it
        for _ in range(2):
            d_q, d_k, d_v = run()
    assert len(calls) == 2
    assert torch.equal(d_q, inputs["k"] * inputs["d_out"])
    assert torch.equal(d_k, inputs["q"] * inputs["d_out"])
    assert torch.equal(d_v, inputs["d_out"])


class Recorded:
    """A bound call that writes down addresses instead of launching."""

    def __init__(self) -> None:
        self.addresses: tuple[int, ...] = ()

    def __call__(self, stream: int, *addresses: int) -> None:
        self.addresses = addresses


def test_a_family_reads_back_what_its_forward_pass_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    bound: dict[str, Recorded] = {}
    monkeypatch.setattr(FamilyPeer, "_bound", lambda self, cell, device: bound.setdefault(cell.problem.operation, Recorded()))
    inputs = Runner._drawn(SMALL, torch.Generator().manual_seed(0))
    peer = with_backward(FamilyPeer("flash1_forward"))
    gradients = peer.prepare(SMALL, CPU)(inputs)()
    assert [tuple(gradient.shape) for gradient in gradients] == [tuple(inputs[name].shape) for name in ("q", "k", "v")]
    *_, out, lse = bound["forward"].addresses
    q, k, v, read_out, read_lse, d_out, d_lse, *_ = bound["backward"].addresses
    assert (q, k, v, d_out, d_lse) == (*(inputs[name].data_ptr() for name in ("q", "k", "v", "d_out")), 0)
    assert 0 not in (out, lse)
    assert (read_out, read_lse) == (out, lse)
    assert inputs["out"].data_ptr() != out, "the reference's is not what is read"


def test_the_kernels_of_a_rung() -> None:
    peer = FamilyWithBackward(FamilyPeer("attention_forward_sm90"))
    forward, backward = peer.specs(BOTH, Gpu(0, H200, "uuid", "580.0"))
    assert (forward.family.name, backward.family.operation) == ("attention_forward_sm90", "backward")
    assert backward.family.automatic


# ---- measured ----


class Hungry(Eager):
    """Runs out of memory on its way back."""

    name = "eager_fp16"

    def bind(self, cell: Cell, device: torch.device) -> Call:
        class Backless(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return q.new_zeros((*q.shape[:3], v.shape[3]))

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

        return Backless.apply


@pytest.mark.usefixtures("_settings")
def test_a_measured_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: each cell's own participants, what runs out of memory, and no counters with a backward pass."""
    made: dict[str, type[Peer]] = {"eager": Eager, "eager_fp16": Hungry}
    stopwatch = SimpleNamespace(seconds=lambda work: (work(), 1e-3)[1], graph=lambda work: work)

    class CpuRunner(Runner):
        def __init__(self, given: Any, device: torch.device, l2_bytes: int, rounds: int) -> None:
            super().__init__(given, device, 0, rounds, stopwatch)

    def make(names: Any) -> tuple[dict[str, Peer], dict[str, str]]:
        return {name: made[name]() for name in names if name in made}, {"flash": "no module"}

    monkeypatch.setattr(measured, "make_peers", make)
    monkeypatch.setattr(measured, "Runner", CpuRunner)
    monkeypatch.setattr(measured, "measured_environment", lambda *given: ENVIRONMENT)
    monkeypatch.setattr(measured, "exclusive", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(measured, "torch_device", lambda on: CPU)
    monkeypatch.setattr(measured, "peak_bytes", lambda peer, cell, runner: 5)
    counted = list[Any]()

    def count(calls: Any, *given: object) -> list[None]:
        counted.extend(calls)
        return [None for _ in calls]

    monkeypatch.setattr(measured, "count_bytes", count)
    run = measured.Measurement(["eager", "flash", "standard_attention"], Gpu(0, H200, "uuid", "580.0"), 2, "command", "ncu")
    run.run({"articles": list(shapes.calls_of(SMALL))}, Progress(), lambda found: None)
    forward, both = run.result.cells
    assert run.result.names == ["eager", "flash", "standard_attention", "eager_fp16"]
    assert [row.name for row in forward.rows] == ["eager", "flash", "standard_attention"]
    assert [row.name for row in both.rows] == ["eager", "flash", "eager_fp16"]
    assert both.rows[0].ms is not None
    assert both.rows[0].peak_bytes == 5
    assert counted == [("eager", call) for call in shapes.calls_of(SMALL)]
    assert both.rows[2].stands_for == ("standard_attention",)
    (_, (_, table)) = report.comparison_tables(run.result)
    assert [line[:2] for line in table.rows][1:] == [["flash", "failed"], ["eager_fp16, for standard_attention", "out of memory"]]
    assert [line for line in report.comparison_summary(run.result) if "Tried to allocate" in line] == [
        "eager_fp16: OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB"
    ]


@pytest.mark.usefixtures("_settings")
def test_gradients_of_pytorch_pass_the_check() -> None:
    peers = {name: with_backward(peer) for name, peer in make_peers(["math", "eager_fp16"])[0].items()}
    stopwatch: Any = SimpleNamespace(seconds=lambda work: (work(), 1e-2)[1], graph=lambda work: work)
    result = Runner(peers, CPU, 0, 1, stopwatch).measure("grid", SMALL)
    assert (list(result.times), result.errors) == (["math", "eager_fp16"], {})


def test_a_cell_says_what_it_is() -> None:
    found = [CellComparison("articles", cell, None) for cell in (FORWARD, BOTH)]  # type: ignore[arg-type]
    assert [cell.with_backward for cell in found] == [False, True]
