"""What torch.autocast makes of the tensors of a call, as of those of PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import DTYPES


def cast_by_autocast(*tensors: Any) -> tuple[Any, ...]:
    """These tensors, None where one is not given: under torch.autocast of its dtype, unless all have one dtype of 16 bits already.

    So a rotated fp32 query meets bf16 values as it does in PyTorch's attention, while fp16 and bf16 stay what the caller asked for. fp64 is
    left to the checks, as autocast leaves it. torch.compile traces this.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not given or not all(isinstance(tensor, torch.Tensor) and tensor.device.type in _DEVICES for tensor in given):
        return tensors
    if not torch.is_autocast_enabled(given[0].device.type):
        return tensors
    if given[0].dtype in DTYPES and all(tensor.dtype == given[0].dtype for tensor in given):
        return tensors
    dtype = torch.get_autocast_dtype(given[0].device.type)
    return tuple(tensor.to(dtype) if tensor is not None and tensor.dtype in _CAST else tensor for tensor in tensors)


_DEVICES = ("cuda", "cpu")  # others, such as meta, may have no autocast
_CAST = (torch.float32, torch.float16, torch.bfloat16)
