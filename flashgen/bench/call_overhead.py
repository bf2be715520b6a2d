"""What one eager call costs the CPU, on a problem so small that the GPU is never what is waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

from ..cells import Cell
from ..numerics.oracle import TORCH_DTYPES
from .peer import Peer
from .result import CallOverhead

CELL = Cell(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), Workload(1, 8, 8, 128, 128))
WARM_UP, CALLS, ROUNDS = 30, 100, 7


def call_overhead(peer: Peer, device: torch.device, settle: Callable[[], object]) -> CallOverhead:
    """The median over `ROUNDS` of `CALLS` calls, with gradients off and on. `settle` waits for the GPU. Raises what the peer raises."""
    prepare = peer.prepare(CELL, device)
    peer.select()

    def microseconds(gradients: bool) -> float:
        w, p = CELL.workload, CELL.problem
        shape = (w.batch, w.len_q, w.heads_q, p.head_dim) if peer.layout == "bshd" else (w.batch, w.heads_q, w.len_q, p.head_dim)
        inputs = {name: torch.randn(shape, dtype=TORCH_DTYPES[p.dtype], device=device, requires_grad=gradients) for name in ("q", "k", "v")}
        with torch.set_grad_enabled(gradients):
            run = prepare(inputs)
            for _ in range(WARM_UP):
                run()
            rounds = []
            for _ in range(ROUNDS):
                settle()
                begun = time.perf_counter()
                for _ in range(CALLS):
                    run()
                rounds.append((time.perf_counter() - begun) / CALLS * 1e6)
            settle()
        return statistics.median(rounds)

    return CallOverhead(microseconds(gradients=False), microseconds(gradients=True))
