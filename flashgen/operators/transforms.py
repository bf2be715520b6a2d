"""What autograd and the transforms of torch.func are told: `vmap` is one call with a larger batch, and there are no gradients yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from flashgen.codegen.errors import FlashgenError

from ..launch.arguments import check_traced
from ..launch.gpu import untraced
from .registration import LIBRARY, attention_forward, attention_output

_NO_BACKWARD = "flashgen.attention has no backward yet: call it under torch.no_grad(), or detach its inputs"
_NO_TANGENTS = "flashgen.attention has no forward-mode derivative: call it with the primals of its inputs"

attention_with_autograd = torch.ops.flashgen.attention.default


class NoDerivativeError(FlashgenError, NotImplementedError):
    """A derivative is asked for. As a NotImplementedError it makes torch.compile leave the call to Python, which says the same."""


# torch.compile knows what this one gives, and takes `peek_interpreter_stack` for an object even where it gives None.
_is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def is_differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether derivatives of a call may be asked for: then it is one of `attention_with_autograd`, which sees what transforms hide."""
    level = getattr(forward_ad, "_current_level", None)  # a private name: without it every call is looked at
    if level is None or level >= 0:
        if level is not None and torch.compiler.is_compiling():
            raise NoDerivativeError(_NO_TANGENTS)  # tangents cannot be seen here, and the compiled call would drop them
        return True
    return _is_transformed() or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


class _Gradients(torch.autograd.Function):
    """Forward as ever; backward is an operator, so that a model can be compiled for training: gradients are traced along with it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.shapes = [tensor.shape for tensor in arguments[:3]]
        return attention_forward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*torch.ops.flashgen.no_backward(gradients[0], *ctx.shapes), None, None, None)


@untraced
def _autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = arguments[:3]
    if getattr(forward_ad, "_current_level", 0) >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NoDerivativeError(_NO_TANGENTS)  # PyTorch would drop them without a word
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return attention_forward(*arguments)  # type: ignore[no-any-return]
    if _is_transformed():  # of which torch.autograd.Function would ask for more
        raise NoDerivativeError(_NO_BACKWARD)
    return _Gradients.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def _no_backward(d_out: torch.Tensor, *shapes: Sequence[int]) -> NoReturn:
    raise NoDerivativeError(_NO_BACKWARD)


def _no_backward_fake(d_out: torch.Tensor, *shapes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(d_out.new_empty(shape) for shape in shapes)


LIBRARY.define("no_backward(Tensor d_out, SymInt[] q, SymInt[] k, SymInt[] v) -> (Tensor d_q, Tensor d_k, Tensor d_v)")
LIBRARY.impl("no_backward", _no_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashgen::no_backward", _no_backward_fake, lib=LIBRARY)
LIBRARY.impl("attention", _autograd, "Autograd")


def _batched(operator: Any) -> Callable[..., Any]:
    """The rule of `vmap` for an operator: the mapped dimension joins the batch."""

    @untraced
    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        mapped = [
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(arguments[:3], in_dims, strict=False)
        ]
        # One of them, in whose terms errors speak, without elements: there may be none.
        check_traced(*(torch.empty_strided(t.shape[1:], t.stride()[1:], dtype=t.dtype, device="meta") for t in mapped), *arguments[3:])
        given = operator(*(t.flatten(0, 1) for t in mapped), *arguments[3:])
        sizes = info.batch_size, mapped[0].shape[1]
        if isinstance(given, torch.Tensor):
            return given.unflatten(0, sizes), 0
        return tuple(t.unflatten(0, sizes) for t in given), (0,) * len(given)

    return rule


for _operator in (attention_output, attention_forward, attention_with_autograd):
    torch.library.register_vmap(_operator, _batched(_operator), lib=LIBRARY)
