"""Views that a call makes of tensors, by what PyTorch's own compiled graphs make them with: in less than half the time of its dispatcher.

Autograd does not know what they are views of, and does not see when that is changed: they are for what nobody changes, and for calls that
keep nothing.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .private_names import make_view
from .tracers import nobody_traces


def element(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """An element of a dense tensor of one dimension, which nobody changes; the tensor is PyTorch's own, not of a subclass."""
    if make_view is None or torch.is_inference_mode_enabled():  # what is made anew there cannot be kept for a backward pass
        return tensor[index]
    return make_view(tensor, (), (), index)  # type: ignore[no-any-return]


def may_wait(mask: torch.Tensor) -> bool:
    """Whether a padding mask, [batch, len_kv], may go without the axes it lacks until a plan is made: nobody keeps it, or traces here."""
    if is_dynamo_compiling() or torch.is_grad_enabled():
        return False
    return type(mask) is torch.Tensor and mask.ndim == 2 and mask.layout is torch.strided


def with_axes(tensor: torch.Tensor) -> torch.Tensor:
    """[a, b] as [a, 1, 1, b]. One that autograd knows of, unless gradients are disabled, so that nobody keeps it, and nobody traces."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if make_view is None or is_dynamo_compiling() or torch.is_grad_enabled() or not plain or not nobody_traces():
        return tensor.unsqueeze(1).unsqueeze(1)
    (rows, columns), (row, column) = tensor.shape, tensor.stride()
    return make_view(tensor, (rows, 1, 1, columns), (row, columns * column, columns * column, column), 0)  # type: ignore[no-any-return]
