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

from ..traced.modifier import CompiledModifier, functions_in_call
from .built_in import CallOf, Own, built_in, may_be_built_in

ModFunction = Callable[..., Any]


class TracedCall(NamedTuple):
    """What becomes keywords of the call, if anything, and the modifier of what else the functions do; without a name there is none."""

    window: Ends | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    name: str
    numbers: list[float]
    tensors: list[torch.Tensor]


def traced_call(
    score_mod: ModFunction | CompiledModifier | None,
    mask_mod: ModFunction | None,
    call: CallOf | None,
    causal: Causal,
    window: Ends | None,
    opens: bool,
    top_left: int,
    own: Own,
) -> TracedCall:
    """Raises ArgumentError for what cannot be traced.

    call: without it nothing but a window is taken out of the functions
    opens: whether a prefix shows keys that a window hides: then none is taken out
    top_left: len_q - len_kv, as functions count positions from the first query and the first key
    """
    functions, tensors, numbers = functions_in_call(score_mod, mask_mod)
    left, right, score, mask, is_known, rest = _parts(functions.score, functions.mask, window is None and not opens)
    if left is not None or right is not None:
        window = (
            None if left is None else _value(left, numbers) - top_left,
            None if right is None else _value(right, numbers) + top_left,
        )
    softcap, slopes, bias, of_mask = None, None, None, None
    if is_known and call is not None:
        found = built_in(score, mask, tensors, numbers, call, (causal, window, opens, top_left), own)
        softcap, slopes, bias, of_mask = found.softcap, found.alibi_slopes, found.bias, found.boolean_mask
        rest = _rest(found.score, found.mask)
    name, of_tensors, of_numbers = rest
    values, captured = [], []
    if name:
        values = [float(numbers[i]) for i in of_numbers]
        captured = [tensors[i] for i in of_tensors]
        for tensor in captured:  # as `shape_scalars` has them
            values += tensor.shape
            values += tensor.stride()
    return TracedCall(window, softcap, slopes, bias, of_mask, name, values, captured)


class _Rest(NamedTuple):
    """The modifier of what is left of functions: its name, and which tensors and numbers of the functions it has."""

    name: str
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


class _Parts(NamedTuple):
    """Ends of the window of a mask_mod, the functions without it, and their modifier where nothing else is taken out of them."""

    left: Expression | None
    right: Expression | None
    score: Expression | None
    mask: Expression | None
    may_be_built_in: bool
    rest: _Rest


@lru_cache(maxsize=2**10)
def _parts(score: Expression | None, mask: Expression | None, takes_window: bool) -> _Parts:
    window = VisibleWindow(None, None, mask)
    if takes_window and mask is not None:
        found = visible_window(mask)
        if all(end is None or end.operation in ("constant", "number") for end in (found.left, found.right)):
            window = found
    return _Parts(window.left, window.right, score, window.rest, may_be_built_in(score, window.rest), _rest(score, window.rest))


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
