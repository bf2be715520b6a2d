"""The rule of `torch.vmap`: a mapped call is one call with a larger batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flashgen.codegen.modifier import modifier_operands
from flashgen.codegen.modifiers import kind_of, listed_names
from flashgen.codegen.operands import Axis, Operand

from ..launch.arguments import TracedArgumentError, check_traced
from ..launch.asked import asked
from ..launch.untraced import untraced
from .gradients import flat


def refuse_mapped_gradients(*_: Any) -> NoReturn:
    """Raises TracedArgumentError: gradients of modifiers' tensors are sums over the whole batch."""
    raise TracedArgumentError(
        "gradients of modifiers' tensors must not be mapped by torch.vmap, as they are sums over the batch: use a loop"
    )


def _refuse_what_counts_entries(names: str) -> None:
    """Raises TracedArgumentError for modifiers that know the entry of the batch: the mapped dimension joins it, and would change them."""
    for name in listed_names(names):
        if name == "dropout" or (kind_of(name) == "traced" and "batch" in name):
            what = "dropout" if name == "dropout" else "a score_mod or mask_mod that looks at the batch"
            raise TracedArgumentError(f"{what} must not be mapped by torch.vmap, which joins the mapped dimension to the batch: use a loop")


def _like(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _repeated(tensor: torch.Tensor, operand: Operand, times: int) -> torch.Tensor:
    """A modifier's tensor for so many calls in one, whose batches are joined: copied if it has an entry for each of a batch."""
    if operand.axes[:1] != (Axis.BATCH,) or tensor.ndim < len(operand.axes) or tensor.shape[0] == 1:
        return tensor
    if tensor.stride(0) == 0:  # one for all, as expanded
        return tensor[:1]
    return tensor.unsqueeze(0).expand(times, *tensor.shape).flatten(0, 1)


def batched(operator: Any, tensors: int, options: int, in_list: bool = False) -> Callable[..., Any]:
    """The rule of `vmap` for an operator whose first arguments are so many tensors: the mapped dimension joins the batch.

    options: all arguments but the modifiers' tensors, which come last and cannot be mapped; in_list: they are a list, or left out
    """

    @untraced
    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        if in_list:
            in_dims, arguments = flat(in_dims, options), flat(arguments, options)
        if any(dim is not None for dim in in_dims[options:]):
            raise TracedArgumentError("tensors of modifiers must not be mapped by torch.vmap, which maps q, k and v alone: use a loop")
        names, sizes, numbers, *of_modifiers = arguments[options - 3 :]
        _refuse_what_counts_entries(names)
        mapped = [
            None if t is None else t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(arguments[:tensors], in_dims, strict=False)
        ]
        # One of them, in whose terms errors speak, without elements: there may be none.
        one = (_like(t.shape[1:], t.stride()[1:], t.dtype) for t in mapped[:3] if t is not None)
        like_theirs = [_like(t.shape, t.stride(), t.dtype) for t in of_modifiers]
        problem = check_traced(*one, *arguments[tensors : tensors + 3], *asked(names, sizes, numbers, like_theirs))
        operands = modifier_operands(problem)
        repeated = [_repeated(t, operand, info.batch_size) for t, operand in zip(of_modifiers, operands, strict=True)]
        own = [None if t is None else t.flatten(0, 1) for t in mapped]
        found = operator(*own, *arguments[tensors:options], *([repeated or None] if in_list else repeated))
        assert mapped[0] is not None  # q, which every operator takes
        both = info.batch_size, mapped[0].shape[1]
        if isinstance(found, torch.Tensor):
            return found.unflatten(0, both), 0
        return tuple(t.unflatten(0, both) for t in found), (0,) * len(found)

    return rule
