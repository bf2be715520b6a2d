"""What of a call's functions becomes its softcap, ALiBi, bias and mask, which kernels have built in and compute faster.

It is taken out of the functions only where numbers, lengths, masks and tensors make it the same thing; else it stays in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from flashgen.codegen.expressions.built_in import AlibiForm, ElementForm, SoftcapForm, added_forms, mask_form, replaced, softcap_form
from flashgen.codegen.expressions.linear import LinearForm
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, SCORE, Expression, constant
from flashgen.codegen.score_tensors import MOST
from flashgen.codegen.seen import TOP_LEFT, Causal, Ends

from .head_slopes import slopes_of_heads

_ZERO, _TRUE = constant(0.0, FLOAT32), constant(True, BOOL)
_USUAL = 2.0**60  # numbers up to this, and from its reciprocal on, are ones that all kernels can multiply and divide by
_FARTHEST = 2**31  # elements from one entry of the batch to the next, of slopes
_AXES = 4  # of a tensor of which each score has an element: batch, head, query, key

Sizes = tuple[int, int, int, int]  # batch, heads_q, len_q, len_kv
CallOf = tuple[Sizes, torch.Tensor, float | None]
"""What of a call functions are asked for: its sizes, q and the scale, which nobody has checked yet."""
SeenKeys = tuple[Causal, Ends | None, bool, int | None]
"""Which keys queries see: causal, window, whether a prefix shows some that these two hide, and `top_left` of `modified_of_call`."""
Own = tuple[float | None, bool, bool, bool]
"""What keywords the call has of its own: its softcap, whether there are alibi_slopes, a bias, a mask."""


class BuiltIn(NamedTuple):
    """What is taken out, as keywords of a call have it, and the functions without it: None where nothing is left.

    sources: which of the tensors that functions capture alibi_slopes, bias and boolean_mask are, or are parts of
    """

    score: Expression | None
    mask: Expression | None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    boolean_mask: torch.Tensor | None = None
    sources: tuple[int | None, int | None, int | None] = (None, None, None)


@lru_cache(maxsize=2**10)
def may_be_built_in(score: Expression | None, mask: Expression | None) -> bool:
    """Whether functions have any of these forms."""
    of_score = score is not None and (softcap_form(score) is not None or added_forms(score) != (None, None))
    return of_score or (mask is not None and mask_form(mask) is not None)


def built_in(
    score: Expression | None,
    mask: Expression | None,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int | float, ...],
    call: CallOf,
    seen: SeenKeys,
    own: Own,
) -> BuiltIn:
    """See the module's docstring. `tensors` are t0, t1, ... of the functions, and `numbers` n0, n1, ..."""
    sizes, q, scale = call
    facts = _Facts(sizes, q.dtype, q.device, scale, *own, _hides_later_keys(seen), seen[3] is not None)
    softcap, slopes, bias, of_mask = None, None, None, None
    sources: list[int | None] = [None, None, None]
    rest, rest_of_mask = score, mask
    if rest is not None and all(number is None or _is_usual(number) for number in (facts.scale, facts.softcap)):
        capped = softcap_form(rest)
        if capped is not None and facts.softcap is None and not facts.has_alibi and not facts.has_bias:
            softcap = _cap(capped, numbers)
            rest = rest if softcap is None else replaced(rest, capped.node, SCORE)
        alibi, element = added_forms(rest)
        if alibi is not None and not facts.has_alibi and facts.knows_lengths:
            slopes = _alibi_slopes(alibi, tensors, numbers, facts)
            sources[0] = _index(alibi.slope) if alibi.slope.operation == "load" else None
            rest = rest if slopes is None else replaced(rest, alibi.node, _ZERO)
        if element is not None and not facts.has_bias:
            bias = _elements(element, tensors, facts, (facts.dtype, torch.float32))
            sources[1] = _index(element.node)
            rest = rest if bias is None else replaced(rest, element.node, _ZERO)
    shown = None if mask is None or facts.has_mask else mask_form(mask)
    if mask is not None and shown is not None:
        of_mask = _elements(shown, tensors, facts, (torch.bool,))
        sources[2] = _index(shown.node)
        rest_of_mask = mask if of_mask is None else replaced(mask, shown.node, _TRUE)
    score, mask = None if rest is SCORE else rest, None if rest_of_mask is _TRUE else rest_of_mask
    return BuiltIn(score, mask, softcap, slopes, bias, of_mask, (sources[0], sources[1], sources[2]))


class _Facts(NamedTuple):
    """What of a call decides.

    hides_later_keys: whether query i sees no keys beyond i + len_kv - len_q; knows_lengths: whether these lengths are known here
    """

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    scale: float | None
    softcap: float | None
    has_alibi: bool
    has_bias: bool
    has_mask: bool
    hides_later_keys: bool
    knows_lengths: bool


def _hides_later_keys(seen: SeenKeys) -> bool:
    causal, window, opens, top_left = seen
    right = window[1] if isinstance(window, tuple) and len(window) == 2 and isinstance(window[1], int) else None
    ends = [end for end in (right, top_left if causal == TOP_LEFT else 0 if causal else None) if end is not None]
    return not opens and bool(ends) and min(ends) <= 0


def _index(element: Expression) -> int:
    """Of the tensor that an element is loaded from."""
    return int(element.value.tensor[1:])


def _is_usual(number: object) -> bool:
    return isinstance(number, int | float) and 1 / _USUAL <= number <= _USUAL


def _value(node: Expression, numbers: Sequence[int | float]) -> float:
    return float(node.value if node.operation == "constant" else numbers[int(node.value[1:])])


def _cap(form: SoftcapForm, numbers: Sequence[int | float]) -> float | None:
    """The cap, if scores are divided by what tanh is multiplied by."""
    cap = _value(form.cap, numbers)
    if not _is_usual(cap):
        return None
    if form.factor is not None:
        return cap if abs(cap * _value(form.factor, numbers) - 1) <= 2**-23 else None  # two roundings to fp32
    return cap if form.divisor is form.cap or (form.divisor is not None and _value(form.divisor, numbers) == cap) else None


def _alibi_slopes(form: AlibiForm, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float], facts: _Facts) -> torch.Tensor | None:
    """The slopes, if distances are those of the built-in ALiBi, |query + len_kv - len_q - key|, of all keys that queries see."""
    batch, heads, len_q, len_kv = facts.sizes
    if _offset(form.offset, numbers) != len_kv - len_q or not (form.is_absolute or facts.hides_later_keys):
        return None
    if form.slope.operation != "load":
        return slopes_of_heads(form.slope, numbers, heads, facts.device)
    slopes = tensors[_index(form.slope)]
    if not _is_plain(slopes, facts) or (slopes.requires_grad and torch.is_grad_enabled()):
        return None
    found = _of_sizes(slopes, (batch, heads)[-slopes.ndim :])
    if found is None or found.shape[-1] != heads or (heads > 1 and found.stride(-1) != 1) or found.stride(0) >= _FARTHEST:
        return None
    return found


def _offset(tree: Expression, numbers: Sequence[int | float]) -> int | None:
    form = LinearForm.of((tree, 1))
    if any(term.operation != "number" for term, _ in form.terms):
        return None
    return form.offset + sum(by * int(numbers[int(term.value[1:])]) for term, by in form.terms)


def _elements(form: ElementForm, tensors: Sequence[torch.Tensor], facts: _Facts, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor | None:
    """The tensor, of a shape that broadcasts to facts.sizes, if kernels can take it."""
    tensor = tensors[_index(form.node)]
    if tensor.dtype not in dtypes or not _is_plain(tensor, facts):
        return None
    found = _of_sizes(tensor, tuple(facts.sizes[axis] for axis in form.axes))
    if found is None:
        return None
    dims = sorted(range(len(form.axes)), key=lambda dim: form.axes[dim])
    found = found if dims == list(range(len(dims))) else found.permute(dims)
    for axis in range(min(form.axes), _AXES):
        if axis not in form.axes:
            found = found.unsqueeze(axis - min(form.axes))
    return found if max(found.stride()[-2:]) < MOST else None


def _is_plain(tensor: torch.Tensor, facts: _Facts) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device == facts.device and tensor.numel() > 0


def _of_sizes(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """The part of a tensor that indices below sizes reach; None where they go beyond, of more than one element along an axis."""
    for dim, size in enumerate(sizes):
        own = tensor.shape[dim]
        if own != size and own != 1:
            if own < size:
                return None
            tensor = tensor.narrow(dim, 0, size)
    return tensor
