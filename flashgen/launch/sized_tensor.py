"""`SizedTensor`: what a plan is told of a tensor, with numbers that remember how they came about: see codegen/sizes.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_DENSE = slice(None)


class SizedTensor:
    """In place of a tensor on a GPU, for checks and calls. shape, strides: of ints and `Size`s."""

    layout, is_nested, requires_grad, is_cuda = torch.strided, False, False, True

    def __init__(self, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device, self.ndim = tuple(shape), dtype, device, len(shape)
        self._strides = tuple(strides)

    def stride(self, dim: int | None = None) -> Any:
        """See torch.Tensor."""
        return self._strides if dim is None else self._strides[dim]

    def numel(self) -> Any:
        """See torch.Tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """See torch.Tensor."""
        return self.dtype.itemsize

    def new_empty(self, shape: Sequence[Any], dtype: torch.dtype | None = None) -> SizedTensor:
        """A dense one of that shape."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step = step * size
        return SizedTensor(shape, strides[::-1], dtype or self.dtype, self.device)

    def is_contiguous(self) -> bool:
        """See torch.Tensor."""
        dense = self.new_empty(self.shape).stride()
        return not self.numel() or all(size == 1 or own == step for size, own, step in zip(self.shape, self._strides, dense, strict=True))

    def view(self, *shape: Any) -> SizedTensor:
        """[entries, length, heads, head_dim] of [1, entries * length, heads, head_dim]."""
        return SizedTensor(shape, (shape[1] * self._strides[1], *self._strides[1:]), self.dtype, self.device)

    def __getitem__(self, key: Any) -> SizedTensor:
        """With one more dimension, as a table that has one page for each sequence; or without a batch."""
        if key == 0:
            return SizedTensor(self.shape[1:], self._strides[1:], self.dtype, self.device)
        if key != (_DENSE, None):
            raise TypeError(f"{key} of a tensor is not remembered")
        return SizedTensor((*self.shape, 1), (*self._strides, 1), self.dtype, self.device)
