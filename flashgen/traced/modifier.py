"""What a score_mod and a mask_mod are together: `functions_read`, which every call asks, and `compile_modifier`.

alibi = flashgen.compile_modifier(lambda score, b, h, q, k: score - slopes[h] * (q - k).abs())
print(alibi.source)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.functions import TracedFunctions
from flashgen.codegen.expressions.numbering import numbered
from flashgen.codegen.expressions.tree import Expression

from .reuse import KeptTrace, TraceCache

T = TypeVar("T")
ModFunction = Callable[..., Any]


class ModifierInCall(NamedTuple):
    """A modifier, and what its functions capture as it is now. Numbers are rounded to fp32 where they are of that type."""

    modifier: TracedFunctions
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]


_SCORES, _MASKS = TraceCache("score_mod"), TraceCache("mask_mod")


class Joined(NamedTuple):
    """A modifier, and where its tensors and numbers are among those of its functions, one after the other; None: as they are."""

    modifier: TracedFunctions
    tensors: tuple[int, ...] | None
    numbers: tuple[int, ...] | None


@lru_cache(maxsize=2**10)
def joined(score: Expression | None, mask: Expression | None, tensor_names: tuple[str, ...], number_names: tuple[str, ...]) -> Joined:
    """The modifier of two trees, whose tensors and numbers have these names."""
    done = numbered([tree for tree in (score, mask) if tree is not None])
    trees = iter(done.trees)
    modifier = TracedFunctions(None if score is None else next(trees), None if mask is None else next(trees))
    return Joined(_kept(modifier), _indices(tensor_names, done.tensors), _indices(number_names, done.numbers))


def picked(values: tuple[T, ...], indices: tuple[int, ...] | None) -> tuple[T, ...]:
    """What `Joined` says of the tensors or numbers of its functions."""
    return values if indices is None else tuple([values[i] for i in indices])


def _indices(names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[int, ...] | None:
    return None if names == wanted else tuple(names.index(name) for name in wanted)


@lru_cache(maxsize=2**10)
def _kept(modifier: TracedFunctions) -> TracedFunctions:
    """The one of those that are equal that has already made its text."""
    return modifier


def functions_given(
    score_mod: ModFunction | CompiledModifier | None, mask_mod: ModFunction | None
) -> tuple[ModFunction | None, ModFunction | None]:
    """A call's score_mod and mask_mod, or those of its compiled modifier. Raises ArgumentError. torch.compile traces this."""
    if not isinstance(score_mod, CompiledModifier):
        return score_mod, mask_mod
    if mask_mod is not None:
        raise ArgumentError("mask_mod must be None where score_mod is a compiled modifier, which has its own; got another one")
    return score_mod.score_mod, score_mod.mask_mod


def functions_read(
    score_mod: ModFunction | CompiledModifier | None = None, mask_mod: ModFunction | None = None
) -> tuple[KeptTrace | None, KeptTrace | None, tuple[Tensor, ...], tuple[int | float, ...]]:
    """Functions in one call: their traces, and what they capture, the score_mod's before the mask_mod's. Raises as `modifier_in_call`."""
    if isinstance(score_mod, CompiledModifier):
        score_mod, mask_mod = functions_given(score_mod, mask_mod)
    if score_mod is not None:
        score, tensors, numbers = _SCORES.read(score_mod)
        if mask_mod is None:
            return score, None, tensors, numbers
        mask, of_mask, more = _MASKS.read(mask_mod)
        return score, mask, tensors + of_mask, numbers + more
    if mask_mod is None:
        raise ArgumentError("score_mod must be a function where mask_mod is None; got None")
    mask, tensors, numbers = _MASKS.read(mask_mod)
    return None, mask, tensors, numbers


def joined_traces(score: KeptTrace | None, mask: KeptTrace | None) -> Joined:
    """The modifier of traces, of which there is at least one."""
    each = [trace for trace in (score, mask) if trace is not None]
    tensors = tuple([name for trace in each for name in trace.tensor_names])
    numbers = tuple([name for trace in each for name in trace.number_names])
    return joined(None if score is None else score.tree, None if mask is None else mask.tree, tensors, numbers)


def modifier_in_call(score_mod: ModFunction | CompiledModifier | None = None, mask_mod: ModFunction | None = None) -> ModifierInCall:
    """What the functions are in this call: captured values are read anew, and a trace is made only where none holds.

    Raises ArgumentError where one of them cannot be traced, and where none is given.
    """
    score, mask, tensors, numbers = functions_read(score_mod, mask_mod)
    modifier, of_tensors, of_numbers = joined_traces(score, mask)
    return ModifierInCall(modifier, picked(tensors, of_tensors), picked(numbers, of_numbers))


class CompiledModifier:
    """What `compile_modifier` made of functions. It can be given as score_mod; what they capture is read on each use, as theirs is.

    score_mod, mask_mod: the functions
    """

    def __init__(self, score_mod: ModFunction | None, mask_mod: ModFunction | None) -> None:
        self.score_mod, self.mask_mod = score_mod, mask_mod
        if not is_dynamo_compiling():  # torch.compile cannot look into a trace: the call that uses it refuses what is wrong
            modifier_in_call(score_mod, mask_mod)

    @property
    def modifier(self) -> TracedFunctions:
        """Its expressions."""
        return modifier_in_call(self).modifier

    @property
    def text(self) -> str:
        """See TracedFunctions."""
        return self.modifier.text

    @property
    def source(self) -> str:
        """See TracedFunctions."""
        return self.modifier.source

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors t0, t1, ..., as they are now."""
        return modifier_in_call(self).tensors

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The captured numbers n0, n1, ..., as they are now."""
        return modifier_in_call(self).numbers

    def __repr__(self) -> str:
        return f"CompiledModifier({self.text!r})"


def compile_modifier(score_mod: ModFunction | None = None, mask_mod: ModFunction | None = None) -> CompiledModifier:
    """Traces functions with FlexAttention's signatures, without a call of attention: to see what comes of them, and errors early.

    score_mod: score_mod(score, batch, head, query, key), the score that takes the place of `score`; float32
    mask_mod:  mask_mod(batch, head, query, key), whether the query sees the key

    Raises ArgumentError where one of them cannot be traced, with the line that is to blame, and where none is given.
    """
    return CompiledModifier(score_mod, mask_mod)
