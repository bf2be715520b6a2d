"""A call's score_mod and mask_mod as operators are told of them: the modifier's name, numbers and tensors.

What a mask_mod says of positions alone, as a causal mask or a window does, is a window of the call: so tiles of keys are skipped. What
kernels have built in is taken out of functions, too: built_in.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.functions import TracedFunctions
from flashgen.codegen.expressions.numbering import numbered
from flashgen.codegen.expressions.recognition import VisibleWindow, visible_window
from flashgen.codegen.expressions.tree import Expression
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.seen import Causal, Ends

from ..traced.modifier import CompiledModifier, modifier_in_call
from .built_in import BuiltIn, CallOf, facts_of, may_be_built_in, taken_out

ModFunction = Callable[..., Any]


class TracedCall(NamedTuple):
    """What becomes keywords of the call, if anything, and the modifier of what else the functions do; without a name there is none."""

    window: Ends | None
    built_in: BuiltIn
    name: str
    numbers: list[float]
    tensors: list[torch.Tensor]


def traced_call(
    score_mod: ModFunction | CompiledModifier | None,
    mask_mod: ModFunction | None,
    call: CallOf | None,
    causal: Causal,
    window: Ends | None,
    prefix_len: torch.Tensor | None,
    top_left: int,
    **own: Any,
) -> TracedCall:
    """Raises ArgumentError for what cannot be traced.

    call: without it nothing but a window is taken out of the functions
    top_left: len_q - len_kv, as functions count positions from the first query and the first key
    own: of the call: see `facts_of`
    """
    functions, tensors, numbers = modifier_in_call(score_mod, mask_mod)
    parts = _parts(functions, window is None and prefix_len is None)  # a prefix opens windows
    if parts.left is not None or parts.right is not None:
        left, right = (None if end is None else _value(end, numbers) for end in (parts.left, parts.right))
        window = (None if left is None else left - top_left, None if right is None else right + top_left)
    built_in, rest = parts.built_in, parts.rest
    if parts.may_be_built_in and call is not None:
        facts = facts_of(call, causal, window, prefix_len is not None, top_left, **own)
        built_in = taken_out(built_in.score, built_in.mask, tensors, numbers, facts)
        rest = _rest(built_in.score, built_in.mask)
    values = [float(numbers[i]) for i in rest.numbers]
    captured = [tensors[i] for i in rest.tensors]
    for tensor in captured:  # as `shape_scalars` has them
        values += tensor.shape
        values += tensor.stride()
    return TracedCall(window, built_in, rest.name, values, captured)


class _Rest(NamedTuple):
    """The modifier of what is left of functions: its name, and which tensors and numbers of the functions it has."""

    name: str
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


class _Parts(NamedTuple):
    """Ends of the window of a mask_mod, the functions without it, and their modifier where nothing else is taken out of them."""

    left: Expression | None
    right: Expression | None
    built_in: BuiltIn
    may_be_built_in: bool
    rest: _Rest


@lru_cache(maxsize=2**10)
def _parts(functions: TracedFunctions, takes_window: bool) -> _Parts:
    score, mask = functions.score, functions.mask
    window = VisibleWindow(None, None, mask)
    if takes_window and mask is not None:
        found = visible_window(mask)
        if all(end is None or end.operation in ("constant", "number") for end in (found.left, found.right)):
            window = found
    is_known = may_be_built_in(score, window.rest)
    return _Parts(window.left, window.right, BuiltIn(score, window.rest), is_known, _rest(score, window.rest))


@lru_cache(maxsize=2**10)
def _rest(score: Expression | None, mask: Expression | None) -> _Rest:
    trees = [tree for tree in (score, mask) if tree is not None]
    if not trees:
        return _Rest("", (), ())
    done = numbered(trees)
    left = iter(done.trees)
    functions = TracedFunctions(*(None if tree is None else next(left) for tree in (score, mask)))
    return _Rest(name_of_functions(functions), *(tuple(int(name[1:]) for name in names) for names in (done.tensors, done.numbers)))


def _value(end: Expression, numbers: Sequence[int | float]) -> int:
    return int(end.value if end.operation == "constant" else numbers[int(end.value[1:])])


def refuse_compiling() -> None:
    """Raises ArgumentError: torch.compile cannot look into a trace."""
    raise ArgumentError("score_mod and mask_mod must be None within torch.compile, which cannot trace them: call attention outside of it")
