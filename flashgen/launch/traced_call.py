"""A call's score_mod and mask_mod as operators are told of them: the modifier's name, numbers and tensors.

What a mask_mod says of positions alone, as a causal mask or a window does, is a window of the call: so tiles of keys are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.expressions.functions import TracedFunctions
from flashgen.codegen.expressions.numbering import numbered
from flashgen.codegen.expressions.recognition import VisibleWindow, visible_window
from flashgen.codegen.expressions.tree import Expression
from flashgen.codegen.modifier import modifier_named
from flashgen.codegen.modifiers import is_modifier, listed_names
from flashgen.codegen.modifiers.traced import CAPTURED_TENSOR, Captured, TracedModifier, name_of_functions
from flashgen.codegen.seen import Ends

from ..traced.modifier import CompiledModifier, modifier_in_call
from .untraced import untraced

ModFunction = Callable[..., Any]


class TracedCall(NamedTuple):
    """The window that a mask_mod says, if any, and the modifier of what else the functions do; without a name there is none.

    whole, numbers: the whole numbers that they capture, and the others. tensors: that they capture
    """

    window: Ends | None
    name: str
    whole: list[int]
    numbers: list[float]
    tensors: list[torch.Tensor]


@untraced
def traced_call(
    score_mod: ModFunction | CompiledModifier | None, mask_mod: ModFunction | None, top_left: int, takes_window: bool
) -> TracedCall:
    """Raises ArgumentError for what cannot be traced.

    top_left: len_q - len_kv, as functions count positions from the first query and the first key
    takes_window: whether a window may be taken out of the mask_mod: not beside a prefix, which opens windows
    """
    functions, tensors, numbers = modifier_in_call(score_mod, mask_mod)
    parts = function_parts(functions, takes_window)
    window = None
    if parts.left is not None or parts.right is not None:
        left, right = (None if end is None else _value(end, numbers) for end in (parts.left, parts.right))
        window = (None if left is None else left - top_left, None if right is None else right + top_left)
    whole, others = ([numbers[i] for i in which] for which in (parts.whole, parts.numbers))
    return TracedCall(window, parts.name, whole, others, [tensors[i] for i in parts.tensors])  # type: ignore[arg-type]


class FunctionParts(NamedTuple):
    """Ends of the window of a mask_mod, the name of what else there is, and which tensors and numbers of all functions it has.

    whole, numbers: the whole ones, and the others
    """

    left: Expression | None
    right: Expression | None
    name: str
    tensors: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


@lru_cache(maxsize=2**10)
def function_parts(functions: TracedFunctions, takes_window: bool) -> FunctionParts:
    """What operators are told of functions. takes_window: see `traced_call`."""
    mask = functions.mask
    window = VisibleWindow(None, None, mask)
    if takes_window and mask is not None:
        found = visible_window(mask)
        if all(end is None or end.operation in ("constant", "number") for end in (found.left, found.right)):
            window = found
    trees = [tree for tree in (functions.score, window.rest) if tree is not None]
    if not trees:
        return FunctionParts(window.left, window.right, "")
    done = numbered(trees)
    left = iter(done.trees)
    score, rest = (None if tree is None else next(left) for tree in (functions.score, window.rest))
    left_over = TracedFunctions(score, rest)
    types = [*left_over.number_types.values()]
    whole = [name for name, kind in zip(done.numbers, types, strict=True) if kind == "int32"]
    others = [name for name, kind in zip(done.numbers, types, strict=True) if kind != "int32"]
    indices = (tuple(int(name[1:]) for name in names) for names in (done.tensors, whole, others))
    return FunctionParts(window.left, window.right, name_of_functions(left_over), *indices)


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


class _Told(NamedTuple):
    """What operators are told of modifiers that have traced functions among them.

    sizes, numbers: names, those of captured whole numbers behind all other sizes; whole: how many of these there are
    sources: of all numbers of the modifiers, in their order, where each comes from: _NUMBER or _WHOLE, or the captured tensor whose sizes
             and strides come there
    ranks:   of captured tensors, by their indices among all tensors: how many dimensions they have
    """

    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    whole: int
    sources: tuple[int, ...]
    ranks: dict[int, int]


_NUMBER, _WHOLE = -1, -2


@lru_cache(maxsize=2**10)
def _told(names: str) -> _Told:
    sizes: list[str] = []
    numbers: list[str] = []
    whole: list[str] = []
    sources: list[int] = []
    ranks: dict[int, int] = {}
    tensors = 0
    for modifier in (modifier_named(name) for name in sorted(listed_names(names)) if is_modifier(name)):
        own = modifier.captured if isinstance(modifier, TracedModifier) else Captured(modifier.numbers)
        sizes += modifier.sizes
        for name in own.numbers:
            (whole if name in own.whole else numbers).append(name)
            sources.append(_WHOLE if name in own.whole else _NUMBER)
        of_tensors = dict(enumerate(own.ranks, tensors))
        sources.extend(of_tensors)
        ranks |= of_tensors
        tensors += len(modifier.tensors)
    return _Told((*sizes, *whole), tuple(numbers), len(whole), tuple(sources), ranks)


def with_captured(
    names: str, sizes: Sequence[int], numbers: Sequence[float], tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[int], tuple[float, ...]]:
    """All sizes and numbers of modifiers that have traced functions among them, from what operators are told.

    Whole numbers that functions capture are told behind the sizes, where a tracer's symbols may stand for them. Sizes and strides of
    captured tensors are not told, but read: they cannot be wrong.
    """
    of_sizes, of_numbers, whole, sources, ranks = _told(names)
    if len(sizes) != len(of_sizes) or len(numbers) != len(of_numbers):
        wanted = f"sizes {', '.join(of_sizes) or 'none'}, numbers {', '.join(of_numbers) or 'none'}"
        raise ArgumentError(f"values of {names} must be {wanted}; got {shown(list(sizes))}, {shown(list(numbers))}")
    first = len(sizes) - whole
    told, told_whole, found = iter(numbers), iter(sizes[first:]), []
    for source in sources:
        if source < 0:
            found.append(next(told if source == _NUMBER else told_whole))
        else:
            if source >= len(tensors):
                raise ArgumentError(f"tensors must be those of {names}, more than {source}; got {len(tensors)}")
            tensor = tensors[source]
            if tensor.dim() != ranks[source]:
                raise ArgumentError(f"captured tensors of {names} must have {[*ranks.values()]} dimensions; got one of {tensor.dim()}")
            found.extend((*tensor.shape, *tensor.stride()))
    return sizes[:first], tuple(found)
