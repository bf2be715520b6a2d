"""The benchmark on a GPU: the command, peers that fail or compute something else, and the clock."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashgen.bench import files
from flashgen.bench.call_overhead import call_overheads
from flashgen.bench.peer import AttentionPeer, Call, Peer
from flashgen.bench.peers import PEERS, Flashgen, make_peers
from flashgen.bench.relative import RELATIVE
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaFlash, SdpaMath, sdpa_settings_kept
from flashgen.build.gpu.driver import gpu
from flashgen.cells import Cell
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.timing.protocol import CudaStopwatch, Timer

pytestmark = pytest.mark.gpu

CAUSAL = Cell(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), Workload(2, 8, 2, 300, 500))
BACKWARD = replace(CAUSAL, problem=replace(CAUSAL.problem, operation="backward"))


def runner(**made: Peer) -> Runner:
    return Runner(made, torch.device("cuda", 0), gpu(0).device.l2_bytes, rounds=3)


def test_the_command(tmp_path: Path) -> None:
    options = ["--peers", "flashgen,flash", "--head-dim", "64", "--seqlen", "1024", "--causal", "--rounds", "3", "--call-overhead"]
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "bench", *options, "--out", str(tmp_path), "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "bench.json").read_text())
    assert found["complete"]
    (cell,) = found["cells"]
    assert cell["errors"] == {}
    assert re.match("kernel attention_forward(_sm90)?_bf16_d64_causal", cell["notes"]["flashgen"])
    for times in cell["peers"].values():
        assert len(times["rounds_ms"]) == 3
        assert 1 < times["speed"]["median"] < 5000
    assert 0.1 < cell["peers"]["flashgen"]["ratio_to_baseline"]["median"] < 10
    assert all(1 < cost["us"] < 1000 and 1 < cost["us_grad"] < 1000 for cost in found["call_overhead"].values())
    environment = found["environment"]
    assert environment["device"] == torch.cuda.get_device_name()
    assert environment["torch"] == torch.__version__
    assert environment["driver"] == gpu(0).driver_version
    assert files.read_result(tmp_path / "bench.json").complete
    assert "flashgen TFLOP/s" in (tmp_path / "bench.md").read_text()


def test_the_command_backward() -> None:
    options = ["--pass", "backward", "--peers", "flashgen,flash,attention_backward", "--head-dim", "64", "--seqlen", "2048", "--causal"]
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "bench", *options, "--rounds", "3", "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["pass"], found["complete"]) == ("backward", True)
    (cell,) = found["cells"]
    assert (cell["problem"]["pass"], cell["errors"]) == ("backward", {})
    assert re.match("kernel attention_backward(_persistent_sm90|_sm90)?_bf16_d64_causal", cell["notes"]["flashgen"])
    assert re.match("kernel attention_backward_bf16_d64_causal", cell["notes"]["attention_backward"])
    for times in cell["peers"].values():
        assert len(times["rounds_ms"]) == 3
        assert 1 < times["speed"]["median"] < 5000


class TopLeft(SdpaMath):
    """What a user writes who does not know that SDPA aligns `is_causal` top-left."""

    def bind(self, cell: Cell, device: torch.device) -> Call:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Nothing(AttentionPeer):
    """Returns memory that it has not written, both ways."""

    def bind(self, cell: Cell, device: torch.device) -> Call:
        class Unwritten(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(q, k, v)
                return torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)

        return Unwritten.apply


@pytest.mark.parametrize("cell", [CAUSAL, BACKWARD], ids=["forward", "backward"])
def test_what_computes_something_else_gets_no_time(cell: Cell) -> None:
    result = runner(flashgen=Flashgen(), top_left=TopLeft(), nothing=Nothing()).measure("workload", cell)
    assert list(result.times) == ["flashgen"]
    assert result.errors["top_left"].startswith("wrong: ")
    assert result.errors["nothing"].startswith("wrong: "), "an earlier peer's right result was in that memory"


@pytest.mark.parametrize("cell", [CAUSAL, BACKWARD], ids=["forward", "backward"])
def test_every_peer_that_is_here_is_right_where_lengths_differ_or_says_why_not(cell: Cell) -> None:
    made, _ = make_peers(PEERS)
    with sdpa_settings_kept():
        result = runner(**made).measure("workload", cell)
    assert {"flashgen", "math"} <= set(result.times), result.errors
    assert not [why for why in result.errors.values() if why.startswith("wrong: ")], result.errors
    assert set(result.times) | set(result.errors) == set(made)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("modifier", "having"),
    [
        ("document_ids", {"flashgen", "flex", "math", "eager"}),
        (RELATIVE, {"flashgen", "eager"}),
        ("dropout", {"flashgen", "flash", "math", "eager"}),
    ],
    ids=["documents", "relative", "dropout"],
)
def test_every_peer_that_is_here_has_a_modifier_or_says_why_not(modifier: str, having: set[str], operation: str) -> None:
    cell = Cell(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, operation=operation, modifiers=(modifier,)), Workload(2, 8, 2, 2500, 3000))
    made, _ = make_peers(PEERS)
    with sdpa_settings_kept():
        result = runner(**made).measure("grid", cell)
    assert having <= set(result.times), result.errors
    assert not [why for why in result.errors.values() if why.startswith("wrong: ")], result.errors
    assert set(result.times) | set(result.errors) == set(made)


@pytest.mark.parametrize("grid", ["bias", "key-bias"])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_every_peer_that_is_here_has_a_bias_or_says_why_not(operation: str, grid: str) -> None:
    cell = Cell(Problem(Dtype.BF16, 64, operation=operation, modifiers=("bias",)), Workload(2, 8, 8, 512, 1024))
    made, _ = make_peers(PEERS)
    with sdpa_settings_kept():
        result = runner(**made).measure(grid, cell)
    assert {"flashgen", "math", "eager"} <= set(result.times), result.errors
    assert not [why for why in result.errors.values() if why.startswith("wrong: ")], result.errors
    assert set(result.times) | set(result.errors) == set(made)


def test_a_peer_that_cannot_do_a_cell_says_why() -> None:
    mixed = Cell(Problem(Dtype.BF16, 192, 128), Workload(1, 2, 2, 256, 256))
    with sdpa_settings_kept():
        result = runner(flashgen=Flashgen(), flash=SdpaFlash()).measure("workload", mixed)
    assert list(result.times) == ["flashgen"]
    assert result.errors["flash"].startswith("RuntimeError: ")
    assert "last dimension" in result.errors["flash"], "PyTorch's reason is missing"


def test_a_short_backward_pass_is_replays_of_a_graph() -> None:
    made, _ = make_peers(["flash", "attention_backward"])
    with sdpa_settings_kept():
        result = runner(flashgen=Flashgen(), **made).measure("workload", replace(BACKWARD, workload=Workload(1, 8, 2, 512, 512)))
    assert result.errors == {}
    assert {name: times.graph for name, times in result.times.items()} == dict.fromkeys(result.times, True), result.notes


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_cells_free_their_memory(operation: str) -> None:
    measuring = runner(flashgen=Flashgen(), math=SdpaMath())
    cell = Cell(Problem(Dtype.BF16, 64, operation=operation), Workload(4, 16, 16, 512, 512))
    measuring.measure("workload", cell)
    before = torch.cuda.memory_allocated()
    measuring.measure("workload", cell)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("cycles", [20_000, 2_000_000])
def test_the_clock_agrees_with_a_long_run_of_the_same(cycles: int) -> None:
    """Spinning takes as long in a graph and beside others as alone."""
    timer = Timer(lambda i: torch.cuda._sleep(cycles), 1, 4e-3)
    assert timer.graphed is (cycles < 100_000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(cycles * 50)
    end.record()
    end.synchronize()
    assert timer.seconds() == pytest.approx(begin.elapsed_time(end) * 1e-3 / 50, rel=0.25)


def test_a_call_that_cannot_be_captured_is_timed_all_the_same() -> None:
    class Synchronizing(Flashgen):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            inner = super().bind(cell, device)

            def call(*tensors: torch.Tensor) -> torch.Tensor:
                torch.cuda.synchronize()
                return inner(*tensors)

            return call

    stream, measuring = torch.cuda.current_stream(), runner(syncing=Synchronizing(), flashgen=Flashgen())
    for _ in range(2):  # the failed capture leaves nothing behind
        result = measuring.measure("workload", CAUSAL)
        assert torch.cuda.current_stream() == stream
        torch.randn(8, device="cuda")
    assert result.errors == {}
    assert result.times["flashgen"].graph
    assert not result.times["syncing"].graph
    assert "no CUDA graph" in result.notes["syncing"]


def test_the_cpu_cost_waits_for_nothing() -> None:
    def failed(name: str, error: Exception) -> None:
        raise error

    cost = call_overheads({"flashgen": Flashgen()}, torch.device("cuda", 0), torch.cuda.synchronize, failed)["flashgen"]
    assert 1 < cost.us < 500
    assert CudaStopwatch().seconds(lambda: None) < 1e-3
