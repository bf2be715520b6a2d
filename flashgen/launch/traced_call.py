"""A call's score_mod and mask_mod as operators are told of them: the modifier's name, numbers and tensors.

What a mask_mod says of positions alone, as a causal mask or a window does, is a window of the call: so tiles of keys are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.functions import TracedFunctions
from flashgen.codegen.expressions.numbering import numbered
from flashgen.codegen.expressions.recognition import VisibleWindow, visible_window
from flashgen.codegen.expressions.tree import Expression
from flashgen.codegen.modifier import modifier_named
from flashgen.codegen.modifiers.traced import CAPTURED_TENSOR, TracedModifier, name_of_functions, shape_scalars
from flashgen.codegen.seen import Ends

from ..traced.modifier import CompiledModifier, modifier_in_call

ModFunction = Callable[..., Any]


class TracedCall(NamedTuple):
    """The window that a mask_mod says, if any, and the modifier of what else the functions do; without a name there is none."""

    window: Ends | None
    name: str
    numbers: list[float]
    tensors: list[torch.Tensor]


def traced_call(
    score_mod: ModFunction | CompiledModifier | None, mask_mod: ModFunction | None, top_left: int, takes_window: bool
) -> TracedCall:
    """Raises ArgumentError for what cannot be traced.

    top_left: len_q - len_kv, as functions count positions from the first query and the first key
    takes_window: whether a window may be taken out of the mask_mod: not beside a prefix, which opens windows
    """
    functions, tensors, numbers = modifier_in_call(score_mod, mask_mod)
    parts = _parts(functions, takes_window)
    window = None
    if parts.left is not None or parts.right is not None:
        left, right = (None if end is None else _value(end, numbers) for end in (parts.left, parts.right))
        window = (None if left is None else left - top_left, None if right is None else right + top_left)
    captured, values = [tensors[i] for i in parts.tensors], [float(numbers[i]) for i in parts.numbers]
    for i, tensor in enumerate(captured):
        values.extend(shape_scalars(f"t{i}", tuple(tensor.shape), tensor.stride()).values())
    return TracedCall(window, parts.name, values, captured)


class _Parts(NamedTuple):
    """Ends of the window of a mask_mod, the name of what else there is, and which tensors and numbers of all functions it has."""

    left: Expression | None
    right: Expression | None
    name: str
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


@lru_cache(maxsize=2**10)
def _parts(functions: TracedFunctions, takes_window: bool) -> _Parts:
    mask = functions.mask
    window = VisibleWindow(None, None, mask)
    if takes_window and mask is not None:
        found = visible_window(mask)
        if all(end is None or end.operation in ("constant", "number") for end in (found.left, found.right)):
            window = found
    trees = [tree for tree in (functions.score, window.rest) if tree is not None]
    if not trees:
        return _Parts(window.left, window.right, "", (), ())
    done = numbered(trees)
    left = iter(done.trees)
    score, rest = (None if tree is None else next(left) for tree in (functions.score, window.rest))
    indices = (tuple(int(name[1:]) for name in names) for names in (done.tensors, done.numbers))
    return _Parts(window.left, window.right, name_of_functions(TracedFunctions(score, rest)), *indices)


def _value(end: Expression, numbers: Sequence[int | float]) -> int:
    return int(end.value if end.operation == "constant" else numbers[int(end.value[1:])])


def with_gradients(name: str, tensors: Collection[str]) -> str:
    """What the backward pass calls a modifier that is to give gradients of these tensors: of traced functions the name says so."""
    modifier = modifier_named(name)
    return modifier.learning(tensors).name if isinstance(modifier, TracedModifier) else name


def is_indifferent(name: str, tensor: str) -> bool:
    """Whether the derivative by a modifier's tensor is 0 everywhere: by one that traced functions capture for indices or masks."""
    modifier = modifier_named(name)
    return isinstance(modifier, TracedModifier) and tensor.removeprefix(CAPTURED_TENSOR) not in modifier.learnable


def refuse_compiling() -> None:
    """Raises ArgumentError: torch.compile cannot look into a trace."""
    raise ArgumentError("score_mod and mask_mod must be None within torch.compile, which cannot trace them: call attention outside of it")
