"""The benchmark's cells with dropout, on the CPU: peers draw their own elements, and what drops otherwise gets no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashgen.bench.dropout import DropoutCheck, dropout_p, dropout_seed
from flashgen.bench.eager import Eager, EagerFp16
from flashgen.bench.peer import Call, Peer
from flashgen.bench.peers import PEERS, Fa4, Flashgen
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaMath, sdpa_settings_kept
from flashgen.cells import Cell
from flashgen.codegen.modifiers.dropout import SEED
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.launch.seeds import drawn_seed
from flashgen.numerics.forward import plain
from flashgen.numerics.modifiers.dropout import DropoutLink
from tests.support.fake_gpu import FakeGpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with sdpa_settings_kept():
        yield


def cell_of(operation: str = "forward", mask: Mask = Mask.CAUSAL, *modifiers: str) -> Cell:
    return Cell(Problem(Dtype.FP16, 32, 32, mask, operation, modifiers=("dropout", *modifiers)), Workload(1, 4, 2, 160, 192))


def fault_of(peer: Peer, cell: Cell) -> str:
    """What is wrong with the peer in a cell, empty if nothing."""
    measuring = Runner({}, CPU, 0, 1)
    inputs = measuring.inputs(cell, peer.layout)
    peer.select()
    with torch.no_grad():
        return peer.fault(DropoutCheck(cell, measuring.inputs(cell, "bshd")), peer.prepare(cell, CPU)(inputs), inputs)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("peer", [SdpaMath, Eager, EagerFp16])
def test_what_drops_as_it_should_passes(peer: type[Peer], mask: Mask, operation: str) -> None:
    assert fault_of(peer(), cell_of(operation, mask)) == ""
    assert fault_of(peer(), cell_of(operation, mask)) == "", "whatever the seed is"


@pytest.mark.parametrize("modifier", ["sinks", "alibi", "document_ids"])
def test_other_modifiers_stand_beside_it(modifier: str) -> None:
    assert fault_of(Eager(), cell_of("forward", Mask.CAUSAL, modifier)) == ""


class Spoilt(Eager):
    """Its P is dropped by `spoil`."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        self._spoil = spoil

    def bind(self, cell: Cell, device: torch.device) -> Call:
        hidden = None if cell.problem.mask is Mask.FULL else torch.ones(160, 192, dtype=torch.bool).tril(32)

        def call(q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> Tensor:
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            s = (q @ k.mT).float() * 32**-0.5
            p = torch.softmax(s if hidden is None else s.masked_fill(~hidden, -torch.inf), -1)
            return self._spoil(p).to(q.dtype) @ v

        return call


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("mask", Mask)
def test_what_is_spoilt_in_these_tests_is_right_before(mask: Mask, operation: str) -> None:
    assert fault_of(Spoilt(lambda p: F.dropout(p, 0.1)), cell_of(operation, mask)) == ""
    assert fault_of(Spoilt(lambda p: F.dropout(p, 26 / 256)), cell_of(operation, mask)) == "", "FlashAttention-2 meets p so far"


@pytest.mark.parametrize("operation", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p, "without dropout as by a dropout_p of 0.1"),
        (lambda p: F.dropout(p, 0.2), "without dropout as by a dropout_p of 0.1"),
        (lambda p: F.dropout(p, 0.05), "without dropout as by a dropout_p of 0.1"),
        (lambda p: F.dropout(p, 0.1) * 0.9, "times what it is without dropout"),
        (lambda p: F.dropout(p, 0.1).flip(1), "times what it is without dropout"),
        (lambda p: F.dropout(p, 0.1) * torch.nan, "wrong: "),
        (lambda p: F.dropout(p, 0.1) * torch.zeros_like(p), "wrong: "),
        (lambda p: F.dropout(p, 0.1) * (torch.arange(p.shape[-2])[:, None] % 4 > 0), "times what it is without dropout"),
    ],
    ids=["none", "twice", "half", "undivided", "heads", "nan", "zeros", "rows"],
)
def test_what_drops_otherwise_gets_no_time(spoil: Callable[[Tensor], Tensor], message: str, mask: Mask, operation: str) -> None:
    found = fault_of(Spoilt(spoil), cell_of(operation, mask))
    assert found.startswith("wrong: ")
    assert message in found or operation == "backward"


class Meant(Flashgen):
    """With what `flashgen.attention` means in place of what it runs; `seeds` as it draws them."""

    def __init__(self, seeds: Callable[[], Tensor] = lambda: drawn_seed(CPU)) -> None:
        self._seeds = seeds
        self._attention = self._meant  # type: ignore[assignment]

    def _meant(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout_p: float, return_lse: bool = False, **more: Any) -> Any:
        assert SEED not in more
        links = (DropoutLink(self._seeds(), dropout_p),)
        both = plain(q, k, v, causal=causal, scale=q.shape[3] ** -0.5, links=links)
        return both if return_lse else both[0]


def test_flashgen_is_checked_by_its_elements_as_well() -> None:
    assert fault_of(Meant(), cell_of()) == ""
    other = fault_of(Meant(lambda: drawn_seed(CPU) + 1), cell_of())
    assert other.startswith("wrong: out max error"), "what others may give"


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_flashgen_has_it(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    assert fault_of(Flashgen(), cell_of(operation)) == ""
    monkeypatch.setattr("flashgen.bench.peers.repeat_seed", lambda: None)
    assert fault_of(Flashgen(), cell_of(operation)).startswith("wrong: ")


def test_the_seed_is_that_of_the_next_call() -> None:
    cell = cell_of()
    seed = dropout_seed(cell, CPU)[SEED]
    torch.manual_seed(0)
    assert (seed.shape, seed.dtype) == ((), torch.int64)
    assert seed.equal(drawn_seed(CPU))
    assert dropout_p(cell) == 0.1
    plain_cell = Cell(Problem(Dtype.FP16, 32), Workload(1, 1, 1, 8, 8))
    assert (dropout_seed(plain_cell, CPU), dropout_p(plain_cell)) == ({}, 0.0)


def test_peers_are_timed_or_say_what_they_have_not() -> None:
    class Ticking(FakeGpu):
        def seconds(self, work: Callable[[], object]) -> float:
            work()
            return 1.0

    class Told(Fa4):
        def __init__(self) -> None:
            self._attention = None

    result = Runner({"math": SdpaMath(), "fa4": Told()}, CPU, 0, 1, Ticking()).measure("dropout", cell_of())
    assert (list(result.times), result.errors) == (["math"], {"fa4": "fa4 has no dropout"})
    having = {name for name, peer in PEERS.items() if "dropout" in getattr(peer, "modifiers", ())}
    assert having == {"flashgen", "flashgen_deterministic", "flash", "cudnn", "efficient", "math", "eager", "eager_fp16"}
