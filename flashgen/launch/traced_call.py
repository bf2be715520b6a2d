"""A call's score_mod and mask_mod as operators are told of them: the modifier's name, numbers and tensors.

What a mask_mod says of positions alone, as a causal mask or a window does, is a window of the call: so tiles of keys are skipped. What
kernels have built in is taken out of functions, too: built_in.py.
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

from ..traced.modifier import joined_traces, picked
from ..traced.reuse import KeptTrace
from .built_in import BuiltIn, CallOf, Own, SeenKeys, built_in, may_be_built_in

ModFunction = Callable[..., Any]


class TracedCall(NamedTuple):
    """What becomes keywords of the call, if anything, and the modifier of what else the functions do; without a name there is none.

    whole, numbers: the whole numbers that they capture, and the others. tensors: that they capture
    """

    window: Ends | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    name: str
    whole: Sequence[int]
    numbers: Sequence[float]
    tensors: Sequence[torch.Tensor]


def call_of_functions(
    score: KeptTrace | None,
    mask: KeptTrace | None,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int | float, ...],
    call: CallOf | None,
    seen: SeenKeys,
    own: Own,
) -> tuple[TracedCall, tuple[int | None, ...], tuple[int, ...]]:
    """What becomes of functions, and which captured tensors are slopes, bias and mask, or what these are parts of, and those of the call.

    call: without it nothing but a window is taken out of the functions
    seen: causal and window of the call; whether a prefix shows keys that a window hides: then none is taken out; and len_q - len_kv, as
          functions count positions from the first query and the first key; None where only the device knows that
    """
    functions, tensor_indices, of_numbers = joined_traces(score, mask)
    tensors, numbers = picked(tensors, tensor_indices), picked(numbers, of_numbers)
    causal, window, opens, top_left = seen
    takes_window = window is None and not opens and top_left is not None
    left, right, score_tree, mask_tree, is_known, rest = function_parts(functions.score, functions.mask, takes_window)
    own_window = None
    if top_left is not None and (left is not None or right is not None):
        window = own_window = (
            None if left is None else _value(left, numbers) - top_left,
            None if right is None else _value(right, numbers) + top_left,
        )
    found = BuiltIn(score_tree, mask_tree)
    if is_known and call is not None:
        found = built_in(score_tree, mask_tree, tensors, numbers, call, (causal, window, opens, top_left), own)
        rest = _rest(found.score, found.mask)
    name, of_tensors, of_whole, of_others = rest
    whole, others = [int(numbers[i]) for i in of_whole], [numbers[i] for i in of_others]
    taken = found.softcap, found.alibi_slopes, found.bias, found.boolean_mask
    made = TracedCall(own_window, *taken, name, whole, others, [tensors[i] for i in of_tensors])
    if tensor_indices is None:
        return made, found.sources, of_tensors
    return made, tuple([i if i is None else tensor_indices[i] for i in found.sources]), tuple([tensor_indices[i] for i in of_tensors])


class FunctionRest(NamedTuple):
    """The modifier of what is left of functions: its name, and which tensors and numbers of the functions it has.

    whole, numbers: the whole ones, and the others
    """

    name: str
    tensors: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


class FunctionParts(NamedTuple):
    """Ends of the window of a mask_mod, the functions without it, and their modifier where nothing else is taken out of them."""

    left: Expression | None
    right: Expression | None
    score: Expression | None
    mask: Expression | None
    may_be_built_in: bool
    rest: FunctionRest


@lru_cache(maxsize=2**10)
def function_parts(score: Expression | None, mask: Expression | None, takes_window: bool) -> FunctionParts:
    """What is taken out of functions, and what is left. takes_window: whether a window may be."""
    window = VisibleWindow(None, None, mask)
    if takes_window and mask is not None:
        found = visible_window(mask)
        if all(end is None or end.operation in ("constant", "number") for end in (found.left, found.right)):
            window = found
    return FunctionParts(window.left, window.right, score, window.rest, may_be_built_in(score, window.rest), _rest(score, window.rest))


@lru_cache(maxsize=2**10)
def _rest(score: Expression | None, mask: Expression | None) -> FunctionRest:
    trees = [tree for tree in (score, mask) if tree is not None]
    if not trees:
        return FunctionRest("")
    done = numbered(trees)
    left = iter(done.trees)
    functions = TracedFunctions(*(None if tree is None else next(left) for tree in (score, mask)))
    types = [*functions.number_types.values()]
    whole = [name for name, kind in zip(done.numbers, types, strict=True) if kind == "int32"]
    others = [name for name, kind in zip(done.numbers, types, strict=True) if kind != "int32"]
    return FunctionRest(name_of_functions(functions), *(tuple(int(name[1:]) for name in names) for names in (done.tensors, whole, others)))


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
