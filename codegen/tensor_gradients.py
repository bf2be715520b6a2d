"""Gradients of modifiers' tensors: the kernels that a backward pass launches for them behind its own, one for each such modifier."""

from __future__ import annotations

from collections.abc import Mapping

from .modifier import GradientKernel, modifiers
from .operands import Call
from .problem import Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText


def _with_gradients(problem: Problem) -> list[tuple[str, GradientKernel]]:
    found = ((name, modifiers()[name].gradient) for name in problem.modifiers)
    return [(name, kernel) for name, kernel in found if kernel is not None]


def gradient_kernels(problem: Problem) -> tuple[KernelText, ...]:
    """Those of a problem's modifiers, in the order of their names."""
    return tuple(KernelText(kernel.parameters, kernel.suffix, kernel.struct) for _, kernel in _with_gradients(problem))


def gradient_resources(problem: Problem) -> Mapping[str, BlockResources]:
    """What their blocks take, by suffix: of shared memory a number for each warp."""
    return {kernel.suffix: BlockResources(kernel.threads, kernel.threads // 8) for _, kernel in _with_gradients(problem)}


def gradient_launches(call: Call, buffers: tuple[Buffer, ...]) -> tuple[KernelLaunch, ...]:
    """Their launches. They read row_delta, one of the program's buffers, in which each head has `rows`, whole query tiles."""
    w, launches = call.workload, []
    for name, kernel in _with_gradients(call.problem):
        rows = next(buffer.bytes for buffer in buffers if buffer.name == "row_delta") // (4 * w.batch * w.heads_q)
        blocks, values = modifiers()[name].gradient_values(call, rows)
        launches.append(KernelLaunch(blocks, values, suffix=kernel.suffix))
    return tuple(launches)
