"""What became of functions in earlier calls: `known_functions`, by which a call whose functions are known asks nobody again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.codegen.modifier import Given
from flashgen.codegen.seen import Causal, Ends

from ..traced.modifier import CompiledModifier, functions_read
from .built_in import CallOf, Own
from .private_names import knows_tensors, tensor_guard
from .traced_call import ModFunction, TracedCall, call_of_functions
from .tracers import may_be_kept, nobody_traces
from .untraced import untraced

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class KnownFunctions:
    """What becomes of functions in calls that look the same, without what they capture.

    fits:    whether q and captured tensors look as they did: see `tensor_guard`; None: it is of one call alone, with its tensors
    sources: which of the captured tensors are slopes, bias and mask; tensors: which ones the modifier of the rest has
    slopes:  those that are computed, which is so only where nobody traces
    answers: what `modified_of_call` says but for tensors, by what a call has beside the functions: None where that is nothing
    """

    __slots__ = ("answers", "call", "fits", "in_order", "slopes", "sources", "tensors")

    def __init__(
        self, call: TracedCall, fits: Callable[..., bool] | None = None, sources: Sequence[int | None] = (), tensors: Sequence[int] = ()
    ) -> None:
        self.call, self.fits, self.sources, self.tensors = call, fits, sources, tensors
        self.slopes = call.alibi_slopes
        self.in_order = tuple([i for i in (*sources, *tensors) if i is not None])
        self.answers: dict[Any, Answer] = {}

    def with_tensors(self, captured: Sequence[torch.Tensor]) -> TracedCall:
        """The call with these captured tensors."""
        if self.fits is None or not captured:
            return self.call
        slopes, bias, mask = [None if i is None else captured[i] for i in self.sources]
        return self.call._replace(
            alibi_slopes=self.slopes if slopes is None else slopes, bias=bias, mask=mask, tensors=[captured[i] for i in self.tensors]
        )

    def tensors_alone(self, captured: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All that operators are given in a call with nothing beside the functions: in the order of the names of their modifiers."""
        found = [captured[i] for i in self.in_order]
        return found if self.slopes is None else [self.slopes, *found]

    def keep(self, beside: Any, found: Answer) -> None:
        """Keeps an answer for other calls."""
        if len(self.answers) >= _MOST_ANSWERS:
            self.answers.clear()
        self.answers[beside] = found


Answer = tuple[bool, str, Sequence[int], Sequence[float], Given | None]
"""Whether the mask is causal; names, sizes and numbers of modifiers; what `asked` gives."""
_MOST_KNOWN, _MOST_ALIKE, _MOST_ANSWERS = 2**10, 4, 2**5  # in all; of calls that differ in nothing but tensors; of the same functions
_known: dict[tuple[Any, ...], tuple[KnownFunctions, ...]] = {}


@untraced
def known_functions(
    score_mod: ModFunction | CompiledModifier | None,
    mask_mod: ModFunction | None,
    call: CallOf | None,
    causal: Causal,
    window: Ends | None,
    opens: bool,
    top_left: int | None,
    own: Own,
) -> tuple[KnownFunctions, tuple[torch.Tensor, ...]]:
    """What becomes of functions, and what they capture now.

    That is known by all that decides it: traces, captured numbers, options, and what tensors look like. The arguments are those of
    `call_of_functions`. Raises ArgumentError for what cannot be traced.
    """
    score, mask, tensors, numbers = functions_read(score_mod, mask_mod)
    if call is None:
        return KnownFunctions(call_of_functions(score, mask, tensors, numbers, None, (causal, window, opens, top_left), own)[0]), tensors
    sizes, q, scale = call
    key = (score, mask, numbers, sizes, scale, causal, window, opens, top_left, own, torch.is_grad_enabled())
    known: tuple[KnownFunctions, ...] | None
    try:
        known = _known.get(key, ())
    except TypeError:  # a size that a tracer's symbol stands for; an argument that others will speak of
        known = None
    for each in known or ():
        if each.fits(q, *tensors) and (each.slopes is None or nobody_traces()):  # type: ignore[misc]  # those that are kept have it
            return each, tensors
    found, sources, of_tensors = call_of_functions(score, mask, tensors, numbers, call, (causal, window, opens, top_left), own)
    is_open = any(trace is not None and trace.is_open for trace in (score, mask))
    if known is None or is_open or not _may_be_known(q, tensors, found, sources):
        return KnownFunctions(found), tensors
    of_slopes, of_bias, of_mask = sources
    taken = (found.alibi_slopes, of_slopes), (found.bias, of_bias), (found.mask, of_mask)
    sources = tuple([None if tensor is None else i for tensor, i in taken])
    computed = found.alibi_slopes if of_slopes is None else None
    kept = found._replace(alibi_slopes=computed, bias=None, mask=None, tensors=())
    made = KnownFunctions(kept, tensor_guard((q, *tensors)), sources, of_tensors)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = (made, *known[: _MOST_ALIKE - 1])
    return made, tensors


def _may_be_known(q: torch.Tensor, captured: Sequence[torch.Tensor], found: TracedCall, sources: Sequence[int | None]) -> bool:
    """Whether it is so in all calls that look the same, whose tensors nobody has to make."""
    taken = found.alibi_slopes, found.bias, found.mask
    are_whole = all(i is None or tensor is None or tensor is captured[i] for i, tensor in zip(sources, taken, strict=True))
    return are_whole and knows_tensors and {type(q), *map(type, captured)} <= _PLAIN and may_be_kept(q.device)
