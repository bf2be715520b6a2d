"""From the keywords of a call of `flashgen.attention` to what operators are told of modifiers: see asked.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import Given, given_modifiers
from flashgen.codegen.modifiers import TRACED
from flashgen.codegen.modifiers.dropout import checked_dropout
from flashgen.codegen.modifiers.softcap import checked_softcap
from flashgen.codegen.problem import Mask
from flashgen.codegen.seen import Causal, Ends, Seen
from flashgen.codegen.typed import require_type

from .arguments import require_initialized
from .asked import DROPOUT, MASK_NAME, OF_KEYS, UNDRAWN, Modified, asked, require_no_gradient, with_made_axes, with_seed
from .block_masks import with_block_mask
from .built_in import CallOf
from .known_functions import Answer, KnownFunctions, known_functions
from .padding_mask import both_masks, require_padding_mask
from .seeds import drawn_seed
from .traced_call import TracedCall
from .views import may_wait, with_axes

_CAUSAL, _ENDS, _NUMBERS = {bool, str}, {int, NoneType}, {int, float, NoneType}  # types of causal, a window's ends, a softcap
_FLOAT_OR_NONE = {float, NoneType}
_NOTHING = None, False, False, False  # of a call's own keywords
_IDS = (torch.int32, torch.int64)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def modified_of_call(
    causal: Causal,
    window: Ends | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    chunk: int | None = None,
    prefix_len: torch.Tensor | None = None,
    document_ids: Any = None,
    dropout_p: float = 0.0,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    *,
    top_left: int | None,
    q: Any = None,
    call: CallOf | None = None,
    seed_waits: bool = False,
    tree_mask: torch.Tensor | None = None,
) -> tuple[bool, Modified | tuple[()], Given | None]:
    """Whether the mask is causal, and what operators are told of modifiers: also as `asked` gives it, where that is known.

    Where OF_KEYS or UNDRAWN is among the names of that, operators are told what `complete` makes of it.
    top_left: see `Seen.of`, None where only the device knows lengths: then functions have no window and no ALiBi; q: on whose device
    a seed is drawn, by PyTorch's generator; call: what functions are for, and a key_padding_mask, if it is to be checked by its name;
    seed_waits: whether the seed may be drawn later, where nobody keeps it. Raises ArgumentError.
    """
    traced, known, is_alone = None, None, False
    if block_mask is not None:
        score_mod, mask_mod = with_block_mask(score_mod, mask_mod, block_mask, call)
    if score_mod is not None or mask_mod is not None:
        if is_dynamo_compiling():
            from .recorded_call import recorded_call  # which imports what traces, a second's work that other calls need not wait for

            traced = recorded_call(score_mod, mask_mod, top_left, window is None and prefix_len is None, getattr(q, "device", None))
        else:
            own = softcap, alibi_slopes is not None, bias is not None, mask is not None or key_padding_mask is not None
            known, captured = known_functions(score_mod, mask_mod, call, causal, window, prefix_len is not None, top_left, own)
            is_alone = (  # of types of which equal values are the same
                type(causal) is bool
                and window is None
                and chunk is None
                and own == _NOTHING
                and sinks is None
                and prefix_len is None
                and document_ids is None
                and tree_mask is None
                and type(dropout_p) is float
                and dropout_p == 0
            )
            if is_alone and None in known.answers:
                is_causal, text, sizes, numbers, given = known.answers[None]
                return is_causal, (text, sizes, numbers, known.tensors_alone(captured)) if text else (), given
            traced = known.with_tensors(captured)
        window = window if traced.window is None else traced.window
        softcap = softcap if traced.softcap is None else traced.softcap
        alibi_slopes = alibi_slopes if traced.alibi_slopes is None else traced.alibi_slopes
        bias = bias if traced.bias is None else traced.bias
        mask = mask if traced.mask is None else traced.mask
    dropped = dropout_p if type(dropout_p) is float and 0.0 <= dropout_p <= 1.0 else checked_dropout(dropout_p)
    names, tensors = [], []  # those of several modifiers come in the order of their names, sorted, as `given_modifiers` takes them
    if alibi_slopes is not None:
        names.append("alibi")
        tensors.append(_tensor("alibi_slopes", alibi_slopes))
        if alibi_slopes.requires_grad:
            require_no_gradient("alibi_slopes", alibi_slopes)
    if bias is not None:
        names.append("bias_fp32" if _tensor("bias", bias).dtype == torch.float32 else "bias")
        tensors.append(bias)
    if key_padding_mask is not None:
        require_padding_mask(_tensor("key_padding_mask", key_padding_mask), call)
        if mask is None and traced is None and may_wait(key_padding_mask):
            names.append(OF_KEYS)
            tensors.append(key_padding_mask)
        else:
            of_keys = with_axes(key_padding_mask)
            mask = of_keys if mask is None else both_masks(_tensor("mask", mask), key_padding_mask, of_keys)
    if mask is not None:
        names.append(MASK_NAME)
        tensors.append(_tensor("mask", mask))
    if document_ids is not None:
        ids = _documents(document_ids, top_left)
        names.append("document_ids_int64" if ids[0].dtype == torch.int64 else "document_ids")
        tensors.extend(ids)
    if dropped:
        if seed_waits and traced is None and not is_dynamo_compiling() and not torch.is_grad_enabled():
            names.append(UNDRAWN)
        else:
            tensors.append(drawn_seed(getattr(q, "device", None)))
    if prefix_len is not None:
        names.append("prefix_len")
        tensors.append(_tensor("prefix_len", prefix_len))
    if sinks is not None:
        names.append("sinks")
        of_heads = _tensor("sinks", sinks)
        tensors.append(of_heads.float() if of_heads.dtype in _SIXTEEN_BITS else of_heads)
    if traced is not None and traced.name:
        names.append(traced.name)
        tensors.extend(traced.tensors)
    if tree_mask is not None:
        names.append("tree_mask")
        tensors.append(_tensor("tree_mask", tree_mask))
    told: Answer
    if window is None and chunk is None and not is_dynamo_compiling() and type(causal) is bool and type(softcap) in _FLOAT_OR_NONE:
        told = _remembered_alone(causal, softcap, dropped, tuple(names))  # as most calls are, in short
    else:
        told = _told_of(causal, window, chunk, top_left or 0, softcap, dropped, tuple(names))
    if traced is not None:
        told = _with_functions(told, traced, known, is_alone, tensors)
    is_causal, text, sizes, numbers, given = told
    return is_causal, (text, sizes, numbers, tensors) if text else (), given


def _with_functions(
    told: Answer, traced: TracedCall, known: KnownFunctions | None, is_alone: bool, tensors: Sequence[torch.Tensor]
) -> Answer:
    """What is told of a call's modifiers, with numbers that functions capture. is_alone: whether there is nothing beside the functions."""
    kept = None if known is None or known.fits is None else known  # where numbers may be a tracer's symbols nothing is kept
    beside = None if is_alone else told
    if kept is not None and beside in kept.answers:
        return kept.answers[beside]
    is_causal, text, sizes, numbers, given = told
    if traced.name:
        sizes, numbers = (*sizes, *traced.whole), (*numbers, *traced.numbers)
        given = None if kept is None else asked(text, sizes, numbers, tensors)[0]
    found = is_causal, text, sizes, numbers, given
    if kept is not None:
        kept.keep(beside, found)
    return found


def complete(modified: Modified, given: Given, q: torch.Tensor, seed: torch.Tensor | None = None) -> Modified:
    """What operators are told where `modified_of_call` gives both: with the axes that a mask lacks, and a seed.

    seed: int64, of no dimensions; None for one that is drawn now
    """
    names, sizes, numbers, tensors = modified
    if OF_KEYS in given.names:
        given, tensors = with_made_axes(given, tensors)
    if UNDRAWN in given.names:
        _, tensors = with_seed(given, tensors, drawn_seed(q.device) if seed is None else seed)
    return names, sizes, numbers, tensors


def seed_of(names: str = "", sizes: Any = (), numbers: Any = (), tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
    """Of the dropout that operators are told of: the only number in memory. None without. torch.compile traces this."""
    return next((tensor for tensor in tensors if tensor.dtype == torch.int64 and tensor.ndim == 0), None)


class _Told(NamedTuple):
    """Whether the mask is causal; names, sizes and numbers of all modifiers, but for numbers that functions capture; what `asked` gives."""

    is_causal: bool
    names: str
    sizes: tuple[int, ...]
    numbers: tuple[float, ...]
    given: Given | None


def _told_of(
    causal: Causal, window: Ends | None, chunk: int | None, top_left: int, softcap: float | None, dropped: float, names: tuple[str, ...]
) -> _Told:
    """names: of the modifiers that have tensors. In the usual types it is remembered. torch.compile looks into no memory."""
    if is_dynamo_compiling():
        return _told(Seen.of(causal, window, chunk, top_left), softcap, dropped, names)
    if type(causal) in _CAUSAL and type(chunk) in _ENDS and type(softcap) in _NUMBERS:
        top_left = top_left if type(causal) is str else 0  # it says nothing else
        if window is None:
            return _remembered(causal, None, None, chunk, top_left, softcap, dropped, names)
        if type(window) is tuple and len(window) == 2 and type(window[0]) in _ENDS and type(window[1]) in _ENDS:
            return _remembered(causal, window[0], window[1], chunk, top_left, softcap, dropped, names)
    return _with_given(Seen.of(causal, window, chunk, top_left), softcap, dropped, names)


def _told(seen: Seen, softcap: float | None, dropped: float, names: tuple[str, ...]) -> _Told:
    text, numbers = [*seen.modifiers], []
    if dropped:
        text.append(DROPOUT)
        numbers.append(dropped)
    if softcap is not None:
        text.append("softcap")
        numbers.append(checked_softcap(softcap))
    return _Told(seen.mask is Mask.CAUSAL, ",".join((*text, *names)), seen.sizes_of_modifiers, tuple(numbers), None)


@lru_cache(maxsize=2**10)
def _remembered_alone(causal: bool, softcap: float | None, dropped: float, names: tuple[str, ...]) -> _Told:
    """Without a window and chunks. Of types of which equal values are the same."""
    return _with_given(Seen.of(causal), softcap, dropped, names)


@lru_cache(maxsize=2**10, typed=True)
def _remembered(
    causal: Causal,
    left: int | None,
    right: int | None,
    chunk: int | None,
    top_left: int,
    softcap: float | None,
    dropped: float,
    names: tuple[str, ...],
) -> _Told:
    return _with_given(Seen.of(causal, (left, right), chunk, top_left), softcap, dropped, names)


def _with_given(seen: Seen, softcap: float | None, dropped: float, names: tuple[str, ...]) -> _Told:
    """As `_told`, with what `asked` gives, too, where functions capture no numbers. OF_KEYS and UNDRAWN may be among the names."""
    told = tuple([MASK_NAME if name == OF_KEYS else name for name in names if name != UNDRAWN])
    found = _told(seen, softcap, dropped, told)
    if TRACED in found.names:
        return found
    given = given_modifiers(found.names, found.sizes, found.numbers)
    waiting = {real: name for real, name in ((MASK_NAME, OF_KEYS), (DROPOUT, UNDRAWN)) if name in names}
    if waiting:
        given = given._replace(names=tuple([waiting.get(name, name) for name in given.names]))
    return found._replace(given=given)


def _documents(document_ids: Any, top_left: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of queries, and of keys. Raises ArgumentError."""
    if isinstance(document_ids, torch.Tensor):
        if top_left != 0:
            rule = "must be a pair of tensors, of queries and of keys, where len_q is not len_kv"
            raise ArgumentError(f"document_ids {rule}; got one, and len_q - len_kv is {top_left}")
        of_queries, of_keys = document_ids, document_ids
    elif not isinstance(document_ids, tuple) or len(document_ids) != 2:
        raise ArgumentError(f"document_ids must be a tensor or a pair of tensors, of queries and of keys; got {shown(document_ids)}")
    else:
        of_queries, of_keys = _tensor("document_ids[0]", document_ids[0]), _tensor("document_ids[1]", document_ids[1])
    if of_queries.dtype != of_keys.dtype or of_queries.dtype not in _IDS:
        given = f"{of_queries.dtype}" + (f" and {of_keys.dtype}" if of_keys.dtype != of_queries.dtype else "")
        raise ArgumentError(f"document_ids must be int32 or int64, those of queries and keys alike; got {given}")
    return of_queries, of_keys


def _tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
        require_initialized(name, tensor)
    return tensor
