"""What a score_mod and a mask_mod are together: `functions_in_call`, which every call asks, and `compile_modifier`.

alibi = flashgen.compile_modifier(lambda score, b, h, q, k: score - slopes[h] * (q - k).abs())
print(alibi.source)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.functions import TracedFunctions
from flashgen.codegen.expressions.numbering import numbered
from flashgen.codegen.expressions.tree import Expression

from .reuse import TraceCache

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


def functions_in_call(
    score_mod: ModFunction | CompiledModifier | None = None, mask_mod: ModFunction | None = None
) -> tuple[TracedFunctions, tuple[Tensor, ...], tuple[int | float, ...]]:
    """`modifier_in_call` without names: each call makes one."""
    score_mod, mask_mod = functions_given(score_mod, mask_mod)
    if score_mod is not None and mask_mod is not None:
        score, tensor_names, number_names, tensors, numbers = _SCORES.read(score_mod)
        mask, *names, more_tensors, more_numbers = _MASKS.read(mask_mod)
        tensors, numbers = tensors + more_tensors, numbers + more_numbers
        modifier, of_tensors, of_numbers = joined(score, mask, tensor_names + names[0], number_names + names[1])
    elif score_mod is not None:
        score, tensor_names, number_names, tensors, numbers = _SCORES.read(score_mod)
        modifier, of_tensors, of_numbers = joined(score, None, tensor_names, number_names)
    elif mask_mod is not None:
        mask, tensor_names, number_names, tensors, numbers = _MASKS.read(mask_mod)
        modifier, of_tensors, of_numbers = joined(None, mask, tensor_names, number_names)
    else:
        raise ArgumentError("score_mod must be a function where mask_mod is None; got None")
    if of_tensors is not None:
        tensors = tuple([tensors[i] for i in of_tensors])
    if of_numbers is not None:
        numbers = tuple([numbers[i] for i in of_numbers])
    return modifier, tensors, numbers


def modifier_in_call(score_mod: ModFunction | CompiledModifier | None = None, mask_mod: ModFunction | None = None) -> ModifierInCall:
    """What the functions are in this call: captured values are read anew, and a trace is made only where none holds.

    Raises ArgumentError where one of them cannot be traced, and where none is given.
    """
    return ModifierInCall(*functions_in_call(score_mod, mask_mod))


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
