"""What became of functions in earlier calls: `traced_call`, by which a call whose functions are known asks nobody again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.codegen.seen import Causal, Ends

from ..traced.modifier import CompiledModifier, functions_read
from ..traced.reuse import KeptTrace
from .built_in import CallOf, Own
from .tensor_guards import knows_tensors, tensor_guard
from .traced_call import ModFunction, TracedCall, call_of_functions
from .tracers import may_be_kept, nobody_traces
from .untraced import untraced

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _Known(NamedTuple):
    """What became of functions in a call, without what they capture, and what tells that it is the same in another one.

    fits:    whether q and captured tensors are as they were: see `tensor_guard`
    sources: which of the captured tensors are slopes, bias and mask; tensors: which ones those of the call are
    is_computed: whether slopes are computed, which is so only where nobody traces
    """

    fits: Callable[..., bool]
    call: TracedCall
    sources: tuple[int | None, ...]
    tensors: tuple[int, ...]
    is_computed: bool

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> TracedCall:
        """The call with these captured tensors."""
        if not tensors:
            return self.call
        window, softcap, slopes, bias, mask, name, whole, numbers, _, given = self.call
        of_slopes, of_bias, of_mask = self.sources
        slopes = slopes if of_slopes is None else tensors[of_slopes]
        bias = None if of_bias is None else tensors[of_bias]
        mask = None if of_mask is None else tensors[of_mask]
        return TracedCall(window, softcap, slopes, bias, mask, name, whole, numbers, [tensors[i] for i in self.tensors], given)


_MOST_KNOWN, _MOST_ALIKE = 2**10, 4  # in all; of calls that differ in nothing but tensors
_known: dict[tuple[Any, ...], tuple[_Known, ...]] = {}


@untraced
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
    """What becomes of functions: remembered by all that decides it, which are their traces, captured numbers, and what tensors look like.

    The arguments are those of `call_of_functions`. Raises ArgumentError for what cannot be traced.
    """
    score, mask, tensors, numbers = functions_read(score_mod, mask_mod)
    if call is None:
        return call_of_functions(score, mask, tensors, numbers, None, (causal, window, opens, top_left), own)[0]
    sizes, q, scale = call
    key = (score, mask, numbers, sizes, scale, causal, window, opens, own, torch.is_grad_enabled())
    known: tuple[_Known, ...] | None
    try:
        known = _known.get(key, ())
    except TypeError:  # a size that a tracer's symbol stands for; an argument that others will speak of
        known = None
    for each in known or ():
        if each.fits(q, *tensors) and (not each.is_computed or nobody_traces()):
            return each.with_tensors(tensors)
    found, sources, of_tensors = call_of_functions(score, mask, tensors, numbers, call, (causal, window, opens, top_left), own)
    if known is not None:
        _remember(key, known, score, mask, (q, *tensors), found, sources, of_tensors)
    return found


def _remember(
    key: tuple[Any, ...],
    known: tuple[_Known, ...],
    score: KeptTrace | None,
    mask: KeptTrace | None,
    given: tuple[torch.Tensor, ...],
    found: TracedCall,
    sources: tuple[int | None, ...],
    of_tensors: tuple[int, ...],
) -> None:
    """For calls that look the same, if that is so in all of them. given: q and the captured tensors."""
    q, *tensors = given
    taken = found.alibi_slopes, found.bias, found.mask
    is_part = any(i is not None and tensor is not None and tensor is not tensors[i] for i, tensor in zip(sources, taken, strict=True))
    is_open = any(trace is not None and trace.is_open for trace in (score, mask))
    if is_part or is_open or not knows_tensors or not {*map(type, given)} <= _PLAIN or not may_be_kept(q.device):
        return
    own = tuple(None if tensor is None else i for i, tensor in zip(sources, taken, strict=True))
    is_computed = found.alibi_slopes is not None and own[0] is None
    kept = found._replace(alibi_slopes=found.alibi_slopes if is_computed else None, bias=None, mask=None, tensors=(), given={})
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = (_Known(tensor_guard(given), kept, own, of_tensors, is_computed), *known[: _MOST_ALIKE - 1])
