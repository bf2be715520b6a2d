"""What one eager call costs the CPU, on a problem so small that the GPU is never what is waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

from ..cells import Cell
from ..numerics.oracle import TORCH_DTYPES
from .peer import Peer
from .result import CallOverhead

CELL = Cell(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), Workload(1, 8, 8, 128, 128))
WARM_UP, CALLS, ROUNDS = 30, 100, 7


def call_overhead(peer: Peer, device: torch.device, settle: Callable[[], object]) -> CallOverhead:
    """Medians over `ROUNDS` of `CALLS` calls: gradients off, on, and each with its backward pass. `settle` waits for the GPU.

    Raises what the peer raises. A peer whose outputs have no gradient has no time of a backward pass.
    """
    prepare = peer.prepare(CELL, device)
    peer.select()
    w, p = CELL.workload, CELL.problem
    shape = (w.batch, w.len_q, w.heads_q, p.head_dim) if peer.layout == "bshd" else (w.batch, w.heads_q, w.len_q, p.head_dim)
    inputs = {name: torch.randn(shape, dtype=TORCH_DTYPES[p.dtype], device=device) for name in ("q", "k", "v")}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}

    def microseconds(call: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            call()
        rounds = []
        for _ in range(ROUNDS):
            settle()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            rounds.append((time.perf_counter() - begun) / CALLS * 1e6)
        settle()
        return statistics.median(rounds)

    with torch.no_grad():
        us = microseconds(prepare(inputs))
    with torch.enable_grad():
        run = prepare(leaves)
        us_grad = microseconds(run)
        given = run()
        out = given if isinstance(given, Tensor) else given[0]
        if not out.requires_grad:
            return CallOverhead(us, us_grad)
        d_out, sources = torch.ones_like(out, requires_grad=False), tuple(leaves.values())

        def with_backward() -> object:
            given = run()
            return torch.autograd.grad(given if isinstance(given, Tensor) else given[0], sources, d_out)

        return CallOverhead(us, us_grad, microseconds(with_backward))
