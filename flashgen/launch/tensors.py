"""`Tensors`: one set of inputs and outputs for a kernel, in ordinary and in awkward memory layouts."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

from flashgen.codegen.attention import TENSORS
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .arguments import TORCH_DTYPES, axis_strides

_FAR = 2**31  # elements: an offset of 32 bits does not reach the next row
_NORESERVE = 0x4000  # of Linux; the module mmap lacks it in Python 3.11


@dataclass(frozen=True)
class Tensors:
    """One set of inputs and outputs in layout bshd, with outputs poisoned by NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def random(cls, problem: Problem, workload: Workload, generator: torch.Generator) -> Tensors:
        """Inputs from N(0, 1), on the generator's device."""
        dtype, on = TORCH_DTYPES[problem.dtype], generator.device

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device=on, generator=generator)

        w = workload
        out = torch.empty(w.batch, w.len_q, w.heads_q, problem.head_dim_v, dtype=dtype, device=on)
        lse = torch.empty(w.batch, w.heads_q, w.len_q, dtype=torch.float32, device=on)
        q = normal(w.batch, w.len_q, w.heads_q, problem.head_dim)
        k = normal(w.batch, w.len_kv, w.heads_kv, problem.head_dim)
        tensors = cls(q, k, normal(w.batch, w.len_kv, w.heads_kv, problem.head_dim_v), out, lse)
        tensors.poison()
        return tensors

    def apart(self) -> Tensors:
        """The same values, where no stride of a tensor is one of another: a kernel that takes one for the other is wrong.

        What lies between rows is NaN. Plans of launches on a GPU know dense outputs alone, so that out is dense there.
        """
        batch, length, head = 0, 1, 2
        out = _laid_apart(self.out, (head, batch, length), 32) if self.out.device.type == "cpu" else self.out
        return Tensors(
            _laid_apart(self.q, (batch, length, head), 8),
            _laid_apart(self.k, (batch, head, length), 16),
            _laid_apart(self.v, (length, batch, head), 24),
            out,
            self.lse,
        )

    def far(self) -> Tensors:
        """The same values on the CPU, where no row, head or batch is within 2^31 elements of the next: an offset of 32 bits is wrong."""
        order, tensors = (1, 0, 2), (self.q, self.k, self.v, self.out)
        q, k, v, out = (_laid_apart(tensor, order, _FAR + 8 * units) for units, tensor in enumerate(tensors, 1))
        return Tensors(q, k, v, out, self.lse)

    def strides(self) -> dict[str, tuple[int, ...]]:
        """Of q, k, v and out, by name, as `attention_call` takes them."""
        return {name: axis_strides(getattr(self, name), "bshd") for name in TENSORS}

    def poison(self) -> None:
        """Fills the outputs with NaN: what a kernel does not write shows."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)


def _laid_apart(tensor: torch.Tensor, order: tuple[int, int, int], gap: int) -> torch.Tensor:
    """A copy whose dimensions lie in memory in this `order`, outermost first, each with so many elements between its entries."""
    strides, step = [0, 0, 0, 1], tensor.shape[3]
    for dim in reversed(order):
        strides[dim] = step + gap
        step = strides[dim] * max(1, tensor.shape[dim])
    if gap < _FAR:
        memory = torch.full((gap + step,), math.nan, dtype=tensor.dtype, device=tensor.device)
    else:
        memory = torch.frombuffer(untouched((gap + step) * tensor.element_size()), dtype=tensor.dtype)
    return memory.as_strided(tuple(tensor.shape), tuple(strides), gap).copy_(tensor)


def untouched(size: int) -> mmap.mmap:
    """So many bytes of address space, of which only pages that somebody writes take memory."""
    space = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    space.madvise(mmap.MADV_NOHUGEPAGE)  # each row would take 2 MiB
    return space
