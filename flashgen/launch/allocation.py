"""Memory of a call, from PyTorch's allocator: on the current device, by the fastest way there is."""

from __future__ import annotations

import torch


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# What PyTorch's own compiled graphs allocate with: on the current device, without the dispatcher, in half the time.
empty_strided = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", _empty_strided)
