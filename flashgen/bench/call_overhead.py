"""What one eager call costs the CPU, on a problem so small that the GPU is never what is waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

from ..cells import Cell
from ..numerics.oracle import TORCH_DTYPES
from .peer import Peer
from .result import CallOverhead

CELL = Cell(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), Workload(1, 8, 8, 128, 128))
WARM_UP, CALLS, ROUNDS = 30, 100, 15


def call_overheads(
    peers: Mapping[str, Peer], device: torch.device, settle: Callable[[], object], failed: Callable[[str, Exception], object]
) -> dict[str, CallOverhead]:
    """Medians over `ROUNDS` of `CALLS` calls: gradients off, on, and each with its backward pass.

    Peers take turns in each round, so that a slow phase of the processor meets them all. `settle` waits for the GPU; `failed` is told of a
    peer that raises, and the others go on. A peer whose outputs have no gradient has no time of a backward pass.
    """
    measured: dict[str, _Measured] = {}
    for name, peer in peers.items():
        try:
            measured[name] = _Measured(peer, device, settle)
        except Exception as error:
            failed(name, error)
    for _ in range(ROUNDS):
        for name, mine in list(measured.items()):
            try:
                mine.take_turn()
            except Exception as error:
                del measured[name]
                failed(name, error)
    return {name: mine.overhead() for name, mine in measured.items()}


class _Measured:
    """A peer, its calls, and what each took in the rounds so far, in microseconds. The GPU's errors are those of whose turn it is."""

    def __init__(self, peer: Peer, device: torch.device, settle: Callable[[], object]) -> None:
        """Makes the calls ready, and some of each. Raises what the peer raises."""
        w, p = CELL.workload, CELL.problem
        shape = (w.batch, w.len_q, w.heads_q, p.head_dim) if peer.layout == "bshd" else (w.batch, w.heads_q, w.len_q, p.head_dim)
        inputs = {name: torch.randn(shape, dtype=TORCH_DTYPES[p.dtype], device=device) for name in ("q", "k", "v")}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        self._peer, self._settle, prepare = peer, settle, peer.prepare(CELL, device)
        peer.select()
        run = prepare(leaves)
        self._calls: list[tuple[bool, Callable[[], object]]] = [(False, prepare(inputs)), (True, run)]  # whether gradients are enabled
        with torch.enable_grad():
            given = run()
        out = given if isinstance(given, Tensor) else given[0]
        if out.requires_grad:
            d_out, sources = torch.ones_like(out, requires_grad=False), tuple(leaves.values())

            def with_backward() -> object:
                given = run()
                return torch.autograd.grad(given if isinstance(given, Tensor) else given[0], sources, d_out)

            self._calls.append((True, with_backward))
        self._rounds: list[list[float]] = [[] for _ in self._calls]
        for _ in self._seconds(WARM_UP):
            pass

    def take_turn(self) -> None:
        self._peer.select()
        for rounds, seconds in zip(self._rounds, self._seconds(CALLS), strict=True):
            rounds.append(seconds / CALLS * 1e6)

    def _seconds(self, count: int) -> Iterator[float]:
        """What so many calls take, of each kind."""
        for differentiable, call in self._calls:
            with torch.set_grad_enabled(differentiable):
                begun = time.perf_counter()
                for _ in range(count):
                    call()
                seconds = time.perf_counter() - begun
            self._settle()
            yield seconds

    def overhead(self) -> CallOverhead:
        return CallOverhead(*map(statistics.median, self._rounds))
