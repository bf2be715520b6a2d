"""Calls without gradients, of tensors that may require grad, as FlashAttention has them: who asks for gradients is told, not before.

torch.compile traces a backward pass when it compiles the forward one, whether anybody asks for gradients or not. So what raises is an
operator of its own, which does so when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ...operators.gradients import NoDerivativeError
from ...operators.registration import LIBRARY, register_for_all_others

_NO_GRADIENT = "flashgen computes no gradients of keys in a cache or in pages (block_table), as FlashAttention does not: detach the tensors"


def inference(call: Callable[[], Any], tensors: Sequence[torch.Tensor | None]) -> Any:
    """What `call` gives, a tensor or a tuple of tensors. Gradients by `tensors`, those of its arguments, raise NoDerivativeError."""
    if not torch.is_grad_enabled():
        return call()
    needed = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    if not needed:
        return call()
    with torch.no_grad():
        found = call()
    if isinstance(found, tuple):
        return tuple(_WithoutGradient.apply(part, *needed) for part in found)  # type: ignore[no-untyped-call]
    return _WithoutGradient.apply(found, *needed)  # type: ignore[no-untyped-call]


class _WithoutGradient(torch.autograd.Function):
    """A tensor that depends on others, by which it has no gradients."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, *needed: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [tensor.shape for tensor in needed]
        return found.clone()  # a view made here could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *[_no_gradient_of_cache(gradient, shape) for shape in ctx.shapes]


def _refuse(gradient: torch.Tensor, shape: Sequence[int]) -> NoReturn:
    raise NoDerivativeError(_NO_GRADIENT)


def _fake(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return gradient.new_empty(shape)


LIBRARY.define("no_gradient_of_cache(Tensor gradient, SymInt[] shape) -> Tensor")
register_for_all_others("no_gradient_of_cache", _refuse)
torch.library.register_fake("flashgen::no_gradient_of_cache", _fake, lib=LIBRARY)
_no_gradient_of_cache = torch.ops.flashgen.no_gradient_of_cache.default
