"""The rule of `torch.vmap`: a mapped call is one call with a larger batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flashgen.codegen.modifiers import kind_of, listed_names

from ..launch.arguments import TracedArgumentError, check_traced
from ..launch.asked import asked
from ..launch.untraced import untraced


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


def batched(operator: Any, tensors: int, options: int) -> Callable[..., Any]:
    """The rule of `vmap` for an operator whose first arguments are so many tensors: the mapped dimension joins the batch.

    options: all arguments but the modifiers' tensors, which come last and cannot be mapped
    """

    @untraced
    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        if any(dim is not None for dim in in_dims[options:]):
            raise TracedArgumentError("tensors of modifiers must not be mapped by torch.vmap, which maps q, k and v alone: use a loop")
        for names in arguments[:options]:
            if isinstance(names, str):
                _refuse_what_counts_entries(names)
        mapped = [
            None if t is None else t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(arguments[:tensors], in_dims, strict=False)
        ]
        # One of them, in whose terms errors speak, without elements: there may be none.
        one = (_like(t.shape[1:], t.stride()[1:], t.dtype) for t in mapped[:3] if t is not None)
        of_modifiers = [_like(t.shape, t.stride(), t.dtype) for t in arguments[options:]] if options else []
        names, sizes, numbers = arguments[options - 3 : options] if options else ("", (), ())
        given = asked(names, sizes, numbers, of_modifiers) if of_modifiers else ()
        check_traced(*one, *arguments[tensors : tensors + 3], *given)
        found = operator(*(None if t is None else t.flatten(0, 1) for t in mapped), *arguments[tensors:])
        assert mapped[0] is not None  # q, which every operator takes
        both = info.batch_size, mapped[0].shape[1]
        if isinstance(found, torch.Tensor):
            return found.unflatten(0, both), 0
        return tuple(t.unflatten(0, both) for t in found), (0,) * len(found)

    return rule
