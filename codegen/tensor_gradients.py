"""Gradients of modifiers' tensors: the kernels that a backward pass launches for them behind its own, one for each such modifier."""

from __future__ import annotations

from collections.abc import Mapping

from .gradient_kernel import GradientKernel
from .modifier import collects_gradients, modifier_named
from .operands import Call
from .packed_gradients import tensor_gradient_block
from .problem import Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText


def _with_gradients(problem: Problem) -> list[tuple[str, GradientKernel]]:
    collects = collects_gradients(problem)
    found = [(name, modifier_named(name).gradient) for name in problem.modifiers if collects or not modifier_named(name).sum_parameters]
    return [(name, kernel) for name, kernel in found if kernel is not None]


def gradient_kernels(problem: Problem) -> tuple[KernelText, ...]:
    """Those of a problem's modifiers, in the order of their names."""
    return tuple(
        KernelText(tensor_gradient_block(kernel.parameters, problem), kernel.suffix, kernel.struct)
        for _, kernel in _with_gradients(problem)
    )


def gradient_resources(problem: Problem) -> Mapping[str, BlockResources]:
    """What their blocks take, by suffix: of shared memory a number for each warp."""
    return {kernel.suffix: BlockResources(kernel.threads, kernel.threads // 8) for _, kernel in _with_gradients(problem)}


def gradient_launches(call: Call, buffers: tuple[Buffer, ...]) -> tuple[KernelLaunch, ...]:
    """Their launches, of those whose gradients the call has. They may read row_delta, one of the program's buffers.

    rows: that each head has in it, whole query tiles
    """
    w, launches = call.workload, []
    heads = w.heads_q * (1 if call.problem.is_packed else w.batch)
    for name, kernel in _with_gradients(call.problem):
        if not all(operand.name in call.views for operand in modifier_named(name).gradients(call.problem)):
            continue
        rows = next(buffer.bytes for buffer in buffers if buffer.name == "row_delta") // (4 * heads)
        blocks, values = modifier_named(name).gradient_values(call, rows)
        if call.problem.is_packed:
            fields = tensor_gradient_block(kernel.parameters, call.problem).values
            values = {field.name: {**values, "tokens_q": w.tokens_q}[field.name] for field in fields}
        launches.append(KernelLaunch(max(1, blocks), values, suffix=kernel.suffix))
    return tuple(launches)


def gradient_buffers(call: Call) -> tuple[Buffer, ...]:
    """`Modifier.gradient_buffers` of those whose gradients the call has."""
    each = [modifier_named(name) for name, _ in _with_gradients(call.problem)]
    having = [one for one in each if all(operand.name in call.views for operand in one.gradients(call.problem))]
    return tuple(buffer for one in having for buffer in one.gradient_buffers(call))
