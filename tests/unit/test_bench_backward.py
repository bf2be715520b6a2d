"""The benchmark of the backward pass on the CPU: what is timed, with what inputs, and what gets no time."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashgen.bench import peers
from flashgen.bench.check import CellCheck
from flashgen.bench.peer import AttentionPeer, Call, Peer
from flashgen.bench.peers import FamilyPeer, make_peers
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaMath, sdpa_settings_kept
from flashgen.bench.work import Inputs, prepare
from flashgen.cells import Cell
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.numerics.oracle import oracle_of

CPU = torch.device("cpu")
CELL = Cell(Problem(Dtype.BF16, 16, 8, Mask.CAUSAL, "backward"), Workload(2, 4, 2, 20, 33))
LONG = Cell(Problem(Dtype.BF16, 32, operation="backward"), Workload(1, 2, 1, 256, 256))


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with sdpa_settings_kept():
        yield


class Clock:
    """A stopwatch that goes on when a peer says so, and by a second else. It captures by remembering what to call."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        begun = self.now
        work()
        return self.now - begun or 1.0

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work


def runner(clock: Clock, /, **made: Peer) -> Runner:
    return Runner(made, CPU, 0, 2, clock)


class Costly(SdpaMath):
    """A second forward, 10 ms backward; its gradients made wrong by `spoil`."""

    def __init__(self, clock: Clock, spoil: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] = lambda *gradients: gradients) -> None:
        self.clock, self.spoil, self.forwards = clock, spoil, 0

    def bind(self, cell: Cell, device: torch.device) -> Call:
        attention, peer = super().bind(cell, device), self

        class Costs(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Tensor) -> Tensor:
                peer.clock.now += 1.0
                peer.forwards += 1
                ctx.save_for_backward(*tensors)
                return attention(*tensors)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
                peer.clock.now += 1e-2
                leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                with torch.enable_grad():
                    out = attention(*leaves)
                return peer.spoil(*torch.autograd.grad(out, leaves, gradients[0]))

        return Costs.apply


def test_only_the_way_back_is_timed() -> None:
    clock = Clock()
    costly = Costly(clock)
    result = runner(clock, costly=costly).measure("grid", CELL)
    assert (result.errors, result.notes) == ({}, {})
    assert result.times["costly"].rounds_ms == pytest.approx((10.0,) * 2)
    assert costly.forwards == 1, "one for each set of inputs"


@pytest.mark.parametrize("cell", [CELL, LONG], ids=["causal", "full"])
def test_what_computes_gradients_gets_a_time(cell: Cell) -> None:
    made, _ = make_peers(["math", "eager"])
    result = runner(Clock(), **made).measure("grid", cell)
    assert (list(result.times), result.errors) == (["math", "eager"], {})


class TopLeft(SdpaMath):
    """What a user writes who does not know that SDPA aligns `is_causal` top-left."""

    def bind(self, cell: Cell, device: torch.device) -> Call:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Rigid(AttentionPeer):
    """Attention that nobody can differentiate."""

    def bind(self, cell: Cell, device: torch.device) -> Call:
        return lambda q, k, v: torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype)


def test_another_mask_and_no_gradient_get_no_time() -> None:
    result = runner(Clock(), top_left=TopLeft(), rigid=Rigid()).measure("grid", CELL)
    assert not result.times
    assert result.errors["top_left"].startswith("wrong: ")
    assert result.errors["rigid"].startswith("RuntimeError: element 0 of tensors does not require grad")


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda d_q, d_k, d_v: (d_q * 1.2, d_k, d_v), "rows of d_q are not the reference's, first at batch 0, len_q "),
        (lambda d_q, d_k, d_v: (d_q, torch.zeros_like(d_k), d_v), "rows of d_k are not the reference's, first at batch 0, len_kv "),
        (lambda d_q, d_k, d_v: (d_q, d_k, d_v * torch.nan), "rows of d_v are not the reference's"),
        (lambda d_q, d_k, d_v: (d_q.flip(1), d_k, d_v), "rows of d_q are not the reference's"),
        (lambda d_q, d_k, d_v: (d_q, d_k.index_fill(2, torch.tensor([32]), 0.0), d_v), "rows of d_k are not the reference's"),
    ],
)
def test_a_wrong_gradient_is_named(spoil: Callable[..., tuple[Tensor, ...]], wrong: str) -> None:
    clock = Clock()
    result = runner(clock, spoilt=Costly(clock, spoil)).measure("grid", CELL)
    assert not result.times
    assert wrong in result.errors["spoilt"]


def drawn(cell: Cell) -> Inputs:
    return Runner._drawn(cell, torch.Generator().manual_seed(0))


def test_rounding_is_no_error_and_flashgen_is_held_to_the_numerics_rule_as_well() -> None:
    inputs = drawn(LONG)
    check = CellCheck(LONG, inputs)
    plain = tuple(oracle_of(LONG.problem).plain(LONG.problem, inputs, {"scale": 32**-0.5}).values())
    assert (check.fault(plain), check.rule(plain)) == ("", "")
    near = tuple(gradient + 0.03 * gradient for gradient in plain)
    assert check.fault(near) == "", "within what others may err"
    assert check.rule(near).startswith("wrong: d_q max error")


def test_d_out_lies_in_memory_as_out_does() -> None:
    seen: list[Tensor] = []

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q.transpose(1, 2).contiguous().transpose(1, 2)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
            seen.append(gradients[0])
            return None, None, None

    inputs = drawn(LONG)
    with pytest.raises(RuntimeError, match="not have been used"):  # as this one says of its gradients
        prepare(LONG.problem, Turned.apply, inputs)()
    assert seen[0].stride() == inputs["q"].transpose(1, 2).contiguous().transpose(1, 2).stride() != inputs["d_out"].stride()
    assert torch.equal(seen[0], inputs["d_out"])


def test_an_operation_that_cannot_be_made_of_attention_is_refused() -> None:
    other = types.SimpleNamespace(operation="transposed")
    with pytest.raises(ArgumentError, match="pass must be one of forward, backward; got 'transposed'"):
        prepare(other, lambda q, k, v: q, {})  # type: ignore[arg-type]


class Recorded:
    """A bound call that writes down addresses instead of launching."""

    def __init__(self) -> None:
        self.addresses: tuple[int, ...] = ()

    def __call__(self, stream: int, *addresses: int) -> None:
        self.addresses = addresses


def test_a_family_launches_its_operation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    bound, peer, inputs = Recorded(), FamilyPeer("attention_backward"), drawn(CELL)
    monkeypatch.setattr(peer, "_bound", lambda cell, device: bound)
    gradients = peer.prepare(CELL, CPU)(inputs)()
    assert [tuple(gradient.shape) for gradient in gradients] == [tuple(inputs[name].shape) for name in ("q", "k", "v")]
    read = [inputs[name].data_ptr() for name in ("q", "k", "v", "out", "lse", "d_out")]
    assert bound.addresses == (*read, 0, *(gradient.data_ptr() for gradient in gradients)), "d_lse is left out"


def test_a_family_of_another_operation_says_what_it_computes() -> None:
    on = types.SimpleNamespace(device=find_device("h200"), driver_version="580.1", ordinal=0)
    with pytest.raises(ArgumentError, match=r"^pass must be forward; got backward$"):
        FamilyPeer("attention_forward").spec(CELL, on)  # type: ignore[arg-type]


def test_a_family_that_cannot_do_a_cell_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is its row, the others are timed, and the next cell follows."""
    on = types.SimpleNamespace(device=find_device("h200"), driver_version="580.1", ordinal=0)
    monkeypatch.setattr(peers, "gpu", lambda ordinal: on)
    made, _ = make_peers(["flash1_backward", "flash2_backward", "math"])
    measuring = runner(Clock(), **made)
    wide = Cell(Problem(Dtype.BF16, 256, operation="backward"), Workload(1, 1, 1, 16, 16))
    for result in (measuring.measure("grid", wide), measuring.measure("grid", wide)):
        assert list(result.times) == ["math"]
        assert list(result.errors) == ["flash1_backward", "flash2_backward"]
        assert all(why.startswith(f"head_dim must be at most 128 in {family}; got 256") for family, why in result.errors.items())
