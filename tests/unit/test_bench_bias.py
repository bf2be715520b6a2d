"""The benchmark's cells with a bias, on the CPU: one of scores, one of keys, and whole ones; its gradient is checked, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.bench.check import CellCheck
from flashgen.bench.eager import Eager
from flashgen.bench.flex import Flex, changed_attention
from flashgen.bench.peer import Call, Peer
from flashgen.bench.peers import PEERS, FamilyPeer, Flashgen
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaMath, sdpa_settings_kept
from flashgen.cells import Cell
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.numerics.oracle import oracle_of
from tests.support.fake_gpu import FakeGpu
from tests.support.plan import few_of

CPU = torch.device("cpu")
SHAPES = {"bias": (1, 4, 20, 33), "key-bias": (2, 4, 1, 33), "workload": (2, 4, 20, 33)}
SCALARS = {"scale": 0.25}


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with sdpa_settings_kept():
        yield


def cell_of(operation: str = "forward", mask: Mask = Mask.FULL, *modifiers: str) -> Cell:
    return Cell(Problem(Dtype.FP16, 16, 8, mask, operation, modifiers=("bias", *modifiers)), Workload(2, 4, 2, 20, 33))


def fault_of(peer: Peer, cell: Cell, grid: str) -> str:
    """What is wrong with the peer in a cell, empty if nothing."""
    measuring = Runner({}, CPU, 0, 1)
    inputs = measuring.inputs(cell, peer.layout, grid)
    peer.select()
    with torch.no_grad():
        return peer.fault(CellCheck(cell, measuring.inputs(cell, "bshd", grid)), peer.prepare(cell, CPU)(inputs), inputs)


@pytest.mark.parametrize("grid", SHAPES)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_peers_that_have_it_pass(operation: str, grid: str) -> None:
    for peer in (Eager(), SdpaMath()):
        assert fault_of(peer, cell_of(operation), grid) == ""
    assert fault_of(Eager(), cell_of(operation, Mask.CAUSAL, "alibi"), grid) == ""


@pytest.mark.parametrize("grid", SHAPES)
def test_what_the_cells_of_a_grid_have(grid: str) -> None:
    measuring, cell = Runner({}, CPU, 0, 1), cell_of("backward")
    for layout in ("bshd", "bhsd"):
        bias = measuring.inputs(cell, layout, grid)["bias"]
        assert (bias.shape, bias.is_contiguous(), bias.dtype) == (SHAPES[grid], True, torch.float16)
    assert measuring._input_sets(cell, grid)["bshd"][0]["bias"].equal(bias)


@pytest.mark.parametrize("grid", SHAPES)
def test_the_reference_sums_up_what_is_the_same(grid: str) -> None:
    """By PyTorch's derivative, in float64."""
    cell = cell_of("backward")
    inputs = Runner({}, CPU, 0, 1).inputs(cell, "bshd", grid)
    leaf = inputs["bias"].double().requires_grad_()
    q, k, v = (inputs[name].double().transpose(1, 2) for name in ("q", "k", "v"))
    s = q @ k.repeat_interleave(2, 1).mT * 0.25 + leaf
    out = (torch.softmax(s, -1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    (wanted,) = torch.autograd.grad(out, leaf, inputs["d_out"].double())
    oracle = oracle_of(cell.problem)
    torch.testing.assert_close(oracle.exact(cell.problem, inputs, SCALARS)["d_bias"], wanted)
    plain = oracle.plain(cell.problem, inputs, SCALARS)["d_bias"]
    assert (plain.dtype, plain.shape) == (torch.float16, leaf.shape)
    torch.testing.assert_close(plain.double(), wanted, rtol=0.02, atol=0.02)
    rows = oracle.sample(cell.problem, cell.workload, 12, 0)
    sampled = oracle.exact(cell.problem, inputs, SCALARS, rows)["d_bias"]
    torch.testing.assert_close(sampled, oracle.sampled(oracle.exact(cell.problem, inputs, SCALARS), rows)["d_bias"])


class Spoilt(Eager):
    """Its bias is changed by `spoil`, and the gradient of its bias by `spoil_gradient`."""

    def __init__(self, spoil: Callable[[Tensor], Tensor], spoil_gradient: Callable[[Tensor], Tensor] = lambda d_bias: d_bias) -> None:
        self._spoil, self._spoil_gradient = spoil, spoil_gradient

    def bind(self, cell: Cell, device: torch.device) -> Call:
        call, peer = super().bind(cell, device), self

        class Spoils(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, bias: Tensor) -> Tensor:
                return peer._spoil(bias)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return peer._spoil_gradient(gradients[0])

        spoils: Callable[[Tensor], Tensor] = Spoils.apply
        return lambda q, k, v, bias: call(q, k, v, bias=spoils(bias))


@pytest.mark.parametrize("grid", SHAPES)
@pytest.mark.parametrize(
    "spoil",
    [lambda bias: bias * 0, lambda bias: bias.roll(1, 3), lambda bias: bias.flip(1), lambda bias: bias * 1.1],
    ids=["none", "keys", "heads", "more"],
)
def test_another_bias_gets_no_time(spoil: Callable[[Tensor], Tensor], grid: str) -> None:
    assert fault_of(Spoilt(spoil), cell_of(), grid).startswith("wrong: ")
    assert fault_of(Spoilt(spoil), cell_of("backward"), grid).startswith("wrong: ")
    assert fault_of(Spoilt(lambda bias: bias + 0), cell_of("backward"), grid) == ""


@pytest.mark.parametrize("grid", SHAPES)
@pytest.mark.parametrize(
    "spoil",
    [lambda d: d * 0, lambda d: d * 1.1, lambda d: d.flip(1), lambda d: d * torch.nan, lambda d: d.roll(1, 3)],
    ids=["none", "more", "heads", "nan", "keys"],
)
def test_another_gradient_of_the_bias_gets_no_time(spoil: Callable[[Tensor], Tensor], grid: str) -> None:
    found = fault_of(Spoilt(lambda bias: bias + 0, spoil), cell_of("backward"), grid)
    assert "sampled rows of d_bias are not the reference's, first at batch 0, heads_q " in found


@pytest.mark.parametrize("grid", few_of(SHAPES, "key-bias"))
def test_flex_has_it_and_is_compiled(grid: str) -> None:
    class Traced(Flex):
        def __init__(self) -> None:
            self._attention = torch.compile(changed_attention, dynamic=False, backend="eager")

    torch.compiler.reset()
    assert fault_of(Traced(), cell_of(), grid) == ""


@pytest.mark.slow
@pytest.mark.parametrize("grid", SHAPES)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_flashgen_has_it(operation: str, grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    assert fault_of(Flashgen(), cell_of(operation), grid) == ""


def test_who_has_it_and_who_says_that_it_has_not() -> None:
    class Ticking(FakeGpu):
        def seconds(self, work: Callable[[], object]) -> float:
            work()
            return 1.0

    peers = {"math": SdpaMath(), "eager": Eager()}
    result = Runner(peers, CPU, 0, 1, Ticking()).measure("key-bias", cell_of("forward", Mask.CAUSAL))
    assert list(result.times) == ["eager"]
    assert result.errors == {"math": "math has a bias only where no mask is; got causal, bias"}
    having = {name for name, peer in PEERS.items() if "bias" in getattr(peer, "modifiers", ())}
    assert having == {"flashgen", "flashgen_deterministic", "flex", "flex_flash", "flash", "cudnn", "efficient", "math", "eager"}


def test_families_take_whole_biases_alone() -> None:
    inputs = Runner({}, CPU, 0, 1).inputs(cell_of(), "bshd", "bias")
    with pytest.raises(ArgumentError, match=r"a family takes a bias of the shape \(2, 4, 20, 33\) here; got \(1, 4, 20, 33\)"):
        FamilyPeer._run(cell_of(), None, False, inputs)  # type: ignore[arg-type]
