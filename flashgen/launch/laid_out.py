"""How what a call makes lies in memory: dense, and under layout "bhsd" with rows before heads where its tensor lies so.

Models hold [batch, len, heads, head_dim] and call with transposed views of it. They transpose out back: if it lies in memory as q does,
that is dense without a copy. Gradients lie as the tensors that they belong to, for the same reason. One rule holds for all that tells or
makes such tensors: plans, fakes, kernels on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.codegen.operation import dense


def has_rows_first(tensor: Any, layout: str) -> bool:
    """Whether rows come before heads in memory, though the layout says heads first. Of one row or head both are the same memory.

    It follows from strides alone, so that tracers know it of most tensors, whatever their sizes.
    """
    if layout != "bhsd":
        return False
    strides = tensor.stride()
    found = strides[1] < strides[2]
    if isinstance(found, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(found)  # a size that only the device knows leaves it open where heads come first
    return found  # type: ignore[no-any-return]


def dense_strides(sizes: tuple[Any, ...], tensor: Any, layout: str) -> tuple[Any, ...]:
    """Strides of a dense tensor of 4 dimensions in that layout, whose rows and heads lie in memory as the tensor's do."""
    if has_rows_first(tensor, layout):
        _, heads, rows, width = sizes
        return rows * heads * width, width, heads * width, 1
    return dense(sizes)


def empty(sizes: tuple[Any, ...], tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor without numbers, which has `dense_strides`, and the dtype and the device of the tensor."""
    if has_rows_first(tensor, layout):
        return tensor.new_empty_strided(sizes, dense_strides(sizes, tensor, layout))
    return tensor.new_empty(sizes)
