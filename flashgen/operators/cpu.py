"""`flashgen.attention` of CPU tensors, by kernels in the emulator."""

from __future__ import annotations

from functools import cache

import torch

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import find_target

from ..launch import arguments, cpu
from ..launch.tensors import Tensors
from ..selection.families import default_spec, excluded_families


def attention_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of CPU tensors that have passed `arguments.check_call`, by the default kernel.

    Raises ArgumentError for memory that a kernel cannot take.
    """
    arguments.require_memory(q, k, v)
    problem, workload = arguments.problem_and_workload(q, k, v, causal, layout)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((workload.batch, workload.heads_q, workload.len_q), dtype=torch.float32)
    if lse.numel():
        q, k, v, written = (t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v, out))
        tensors = Tensors(problem, workload, {"q": q, "k": k, "v": v, "out": written, "lse": lse})
        scalars = {} if scale is None else {"scale": scale}
        excluded = excluded_families(tensors.call(scalars), find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(problem, excluded), tensors, scalars)
    return out, lse


@cache
def _default_kernel(problem: Problem, excluded: frozenset[str]) -> EmulatedKernel:
    return cpu.load_emulated(default_spec(problem, find_target(cpu.ARCHITECTURE), excluded))
