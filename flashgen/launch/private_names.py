"""What PyTorch's own compiled graphs are made with, by its private names: a check of tensors, and views.

Each may go, or do something else one day, so it is tried first. That must be done before anybody traces, who would see it: operators, which
are registered once PyTorch is imported, import this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _tensor_guards() -> Any:
    """PyTorch's check; None where it is not there, or does not tell tensors apart as it did."""
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        one, other = torch.empty(2, 3, 4), torch.empty(2, 4, 3).mT
        check = guards(one, dynamic_dims_sizes=[[2, 3, 4]], dynamic_dims_strides=[[12, 4, 1]]).check
        gradient, negated = torch.empty(2, 3, 4, requires_grad=True), torch._neg_view(one)
        different = (other, one[:1], one.double(), one.to("meta"), gradient, negated, torch.nn.Parameter(one), None)
        some = guards(one, dynamic_dims_sizes=[[None, 3, 4]], dynamic_dims_strides=[[None, 4, 1]]).check
        alike = some(one) and some(one[:1]) and some(torch.empty(5, 3, 4))
        if check(one) and alike and not any(check(t) for t in different) and not any(some(t) for t in (other, *different[2:])):
            return guards
    except (AttributeError, TypeError, RuntimeError, SystemError):
        pass
    return None


def _view_maker() -> Callable[..., Any] | None:
    """What makes a view of a tensor, sizes, strides and how much farther it begins; None where it is not there, or does something else."""
    try:
        make: Callable[..., Any] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009  # stubs lack it
        memory = torch.arange(6, device="cpu")
        part, one = make(memory[1:], (1, 2), (5, 3), 1), make(memory[1:], (), (), 3)
        if part.tolist() == [[2, 5]] and part.stride() == (5, 3) and one.item() == 4 and one.ndim == 0:
            return make
    except (AttributeError, TypeError, RuntimeError):
        pass
    return None


_TensorGuards, make_view = _tensor_guards(), _view_maker()
knows_tensors = _TensorGuards is not None


def tensor_guard(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """Whether as many tensors have the types, dispatch keys, dtypes, devices, sizes and strides of these, and need gradients as these do.

    It keeps none of them alive. Only where PyTorch has what tells: `knows_tensors`.
    """
    return form_guard(tensors, [(set(), set())] * len(tensors))


def form_guard(tensors: Sequence[torch.Tensor], varying: Sequence[tuple[set[int], set[int]]]) -> Callable[..., bool]:
    """The same but for sizes, and strides, of these dimensions of each tensor."""
    sizes = [[None if d in of else n for d, n in enumerate(one.shape)] for one, (of, _) in zip(tensors, varying, strict=True)]
    strides = [[None if d in of else n for d, n in enumerate(one.stride())] for one, (_, of) in zip(tensors, varying, strict=True)]
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check
