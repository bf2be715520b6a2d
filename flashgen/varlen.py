"""The Python face of a call of packed sequences: `attention_varlen`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS
from flashgen.codegen.seen import Ends
from flashgen.codegen.typed import require_type

from .launch.arguments import require_together
from .launch.asked import asked
from .launch.autocast import cast_by_autocast
from .launch.jagged import JaggedCall
from .launch.keywords import modified_of_call, seed_of
from .launch.packed_arguments import PackedTokens, check_packed_types, lengths_of_scores, narrowed, require_plain_causal, without_batch
from .launch.refused_keywords import refuse_keywords
from .numerics.modifiers.dropout import dropout_mask
from .operators.autograd import is_differentiated
from .operators.packed import attention_varlen_forward, attention_varlen_output, packed_run_at_hand
from .operators.packed_gradients import differentiable_varlen
from .operators.plans import nobody_listens

__all__ = ["attention_varlen"]

# Keywords of `attention` that this one refuses, and why.
_REFUSED = {
    "layout": "packed sequences lie as (tokens, heads, head_dim)",
    "document_ids": "each document can be a sequence of its own",
    "key_padding_mask": "seqused_kv says how many keys of a sequence are used",
    "block_mask": "its blocks are of dense sequences: give its mask_mod",
}


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_kv: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_kv: int | None = ...,
    seqused_q: torch.Tensor | None = ...,
    seqused_kv: torch.Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    prefix_len: torch.Tensor | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    dropout_p: float = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    score_mod: Any = ...,
    mask_mod: Any = ...,
    return_dropout_mask: Literal[False] = ...,
    **others: Any,
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_kv: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_kv: int | None = ...,
    seqused_q: torch.Tensor | None = ...,
    seqused_kv: torch.Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: bool,
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    prefix_len: torch.Tensor | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    dropout_p: float = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    score_mod: Any = ...,
    mask_mod: Any = ...,
    return_dropout_mask: bool = ...,
    **others: Any,
) -> Any: ...
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    window: Ends | None = None,
    chunk: int | None = None,
    prefix_len: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    return_dropout_mask: bool = False,
    **others: Any,
) -> Any:
    """softmax(scale * q k^T) v of each sequence of a batch by itself; sequences of any lengths lie one behind the other.

    q: [tokens, heads_q, head_dim], bf16 or fp16; k: [tokens_kv, heads_kv, head_dim]; v: as k, with head_dim_v. Strides, heads and head dims
       as `flashgen.attention` has them. Or all three with a batch of 1 in front, [1, tokens, heads, head_dim], as models have them: out and
       lse then have it, too. Or nested tensors of layout torch.jagged, [batch, lengths, heads, head_dim], as they are: these know where
       sequences begin, and out is such a tensor, too.
    cu_seqlens_q: int32, [batch + 1], on the device: sequence b has the tokens from cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q. Lengths
       of 0 are as good as others, and there may be tokens before the first sequence and behind the last one.
    cu_seqlens_kv: the same of k and v
    max_seqlen_q, max_seqlen_kv: how long the longest sequences are, for those who know: it helps to plan. A longer one is still right.
       Nobody asks the device, whether these are given or not: all tokens stand for them then.
    seqused_q, seqused_kv: int32, [batch], on the device: how many tokens of a sequence are used, the first ones. All of them without.
    causal: query i of a sequence sees its keys j <= i + len_kv - len_q (aligned bottom-right); lengths are those that are used
    scale, window, chunk, softcap, sinks: as `flashgen.attention` has them, with queries and keys counted from 0 in each sequence
    prefix_len: int32, [batch]; alibi_slopes: fp32, [heads_q] or [batch, heads_q]: of sequences, as `flashgen.attention` has them of entries
    dropout_p: as `flashgen.attention` has it
    bias: [batch, heads_q, max_q, max_kv], or 1 along some of these, of q's dtype or fp32, and mask: the same, bool: of sequence b the
       elements [b, head, query, key], as `flashgen.attention` has them. max_q and max_kv are what these tensors have, the same where both
       have more than one, and stand for max_seqlen_q and max_seqlen_kv. In a longer sequence scores without an element of the bias gain
       nothing, and keys without one of the mask are hidden; elements beyond a shorter one are not looked at. Along an axis of 1, or one
       that a tensor is expanded along, its element is that of all queries or keys, however many there are
    score_mod: score_mod(score, batch, head, query, key), as `flashgen.attention` has it: batch is the number of the sequence, query and key
       are counted from 0 in it. What is built in is not found in it: a softcap or ALiBi is faster by its own keyword
    mask_mod: mask_mod(batch, head, query, key), as `flashgen.attention` has it, with these numbers. Tiles that nobody sees cost no time. A
       causal mask or a window in it becomes the call's where keys have the queries' own boundaries (the same tensors)
    return_dropout_mask: also return which elements are kept: bool, [batch, heads_q, max_seqlen_q, max_seqlen_kv], both of which must be
       given: of sequence b the elements [b, head, query, key], as with bias. For tests, as `flashgen.attention` has it
    others: further keywords of `flashgen.attention`, which are refused by name: what they say has no form for packed sequences, or not yet.
    Returns out [tokens, heads_q, head_dim_v], dense; with return_lse also the natural log-sum-exp of the scaled scores, fp32
    [heads_q, tokens]; then the dropout mask, if asked for. Tokens of q that no sequence uses have out 0 and an lse of -inf, as a query
    without keys has.

    deterministic: as `flashgen.attention` has it
    Out and lse have gradients, by q, k, v, sinks, bias and what score_mod captures, which autograd gives, not torch.func; those of tokens
    that no sequence uses are 0. Asking for a second derivative, or a forward-mode one, raises FlashgenError. Boundaries that are wrong
    (below 0, beyond the tokens, falling) make out wrong, but nothing outside of the tensors is read or written; with
    FLASHGEN_CHECK_SEQUENCES=1 in the environment when flashgen is imported, each call waits for the device and raises ArgumentError for the
    first that is wrong, and for a sequence longer than bias or mask. Nothing else waits for the device, and a CUDA graph may be replayed
    with other boundaries. Raises as `flashgen.attention` does.
    """
    if others:
        refuse_keywords("attention_varlen", _REFUSED, others)
    where: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_seqlen_q, max_seqlen_kv)
    jagged = None
    if isinstance(q, torch.Tensor) and q.is_nested:
        jagged = JaggedCall.of(q, k, v, PackedTokens(*where))
        (q, k, v), where = jagged.values, jagged.tokens
    if return_dropout_mask is not False:
        require_type("return_dropout_mask", return_dropout_mask, bool)
        _require_lengths(*where[4:])
    modified: tuple[Any, ...] = ()  # what operators are told of modifiers
    given = NO_MODIFIERS
    of_modifiers: tuple[torch.Tensor, ...] = ()
    if (  # written out: each call asks
        window is not None
        or chunk is not None
        or prefix_len is not None
        or softcap is not None
        or alibi_slopes is not None
        or sinks is not None
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or bias is not None
        or mask is not None
        or score_mod is not None
        or mask_mod is not None
    ):
        require_plain_causal(causal)
        if bias is not None or mask is not None:
            bias, mask = narrowed("bias", bias), narrowed("mask", mask)
            where = (*where[:4], *lengths_of_scores(where[4], where[5], bias, mask))
        are_equal = where[1] is where[0] and where[3] is where[2]  # lengths of queries and keys, as far as anybody but the device knows
        modifiers = (window, softcap, alibi_slopes, sinks, bias, mask, None, chunk, prefix_len, None, dropout_p, score_mod, mask_mod)
        causal, modified, known = modified_of_call(causal, *modifiers, top_left=0 if are_equal else None, q=q)
        if not is_dynamo_compiling():
            given, of_modifiers = (known, tuple(modified[3])) if modified and known is not None else asked(*modified)
    if not is_dynamo_compiling() and where[0] is not None and where[1] is not None:
        tensors = (q, k, v, *where[:4], *of_modifiers)
        run = packed_run_at_hand(tensors, causal, scale, where[4], where[5], given)
        if run is not None:
            both = run(return_lse, *tensors)
            found: Any = both if return_lse else both[0]
            found = found if jagged is None else jagged.nested(found)
            return _beside_mask(found, q, where, dropout_p, modified) if return_dropout_mask else found
    try:
        q, k, v = cast_by_autocast(q, k, v)
        check_packed_types(q, k, v, PackedTokens(*where), causal, scale, return_lse, deterministic)
        (q, k, v), in_batch = without_batch(q, k, v)
        if is_differentiated(q, k, v, *(modified[3] if modified else ())):
            both = differentiable_varlen(q, k, v, *where, causal, scale, deterministic, *modified)
            found = both if return_lse else both[0]
        else:
            operator = attention_varlen_forward if return_lse else attention_varlen_output
            found = operator(q, k, v, *where, causal, scale, *modified)
    except Exception as error:
        if not is_compiling():
            require_together(q, k, v, error, in_mode=not nobody_listens())
        raise
    if in_batch:
        found = (found[0][None], found[1][None]) if return_lse else found[None]
    found = found if jagged is None else jagged.nested(found)
    return _beside_mask(found, q, where, dropout_p, modified) if return_dropout_mask else found


def _require_lengths(max_seqlen_q: int | None, max_seqlen_kv: int | None) -> None:
    """Raises ArgumentError unless both are there, for elements that are counted by them."""
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if length is None:
            raise ArgumentError(f"{name} must be given with return_dropout_mask=True, whose elements it counts; got None")


def _beside_mask(found: Any, q: torch.Tensor, where: tuple[Any, ...], dropout_p: float, modified: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call gives, and which elements of P it keeps."""
    mask = dropout_mask(seed_of(*modified), dropout_p, where[0].shape[0] - 1, q.shape[-2], where[4], where[5], q.device)
    return (*(found if isinstance(found, tuple) else (found,)), mask)
