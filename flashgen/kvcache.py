"""The Python face of a call on a KV cache: `attention_with_kvcache`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from flashgen.codegen.modifier import NO_MODIFIERS
from flashgen.codegen.seen import Ends

from .launch import packed_arguments
from .launch.arguments import require_together
from .launch.asked import asked
from .launch.autocast import cast_by_autocast
from .launch.cached_arguments import (
    CachedKeys,
    check_added_types,
    check_cached_call,
    check_cached_types,
    require_bottom_right,
)
from .launch.cached_values import require_right_lengths
from .launch.descales import broadcast_descales
from .launch.keywords import modified_of_call
from .launch.refused_keywords import refuse_keywords
from .operators.append import append_to_cache
from .operators.cached import attention_cached_forward, attention_cached_output
from .operators.cached_call import call_on_cache, lengths_in_memory, require_inference
from .operators.cached_plans import APPENDED, BATCH_IDX, K_DESCALE, LEFTPAD, ROTARY, TABLE, V_DESCALE, cached_run_at_hand
from .operators.plans import nobody_listens

__all__ = ["attention_with_kvcache"]

# alibi_slopes are refused before
_MAY_REQUIRE_GRAD = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "sinks", "bias", "k_descale", "v_descale")
# Keywords of `attention` and of flash_attn_with_kvcache that this one refuses, and why.
_REFUSED = {
    "layout": "q lies as (batch, len_q, heads, head_dim), and a cache as its strides say",
    "deterministic": "there are no gradients, and results are the same to the bit in every run",
    "dropout_p": "it is for training, a cache for inference",
    "document_ids": "each sequence has its own keys",
    "key_padding_mask": "cache_leftpad and cache_seqlens say which keys are used",
    "block_mask": "it is for lengths that are known, which here only the device knows: use mask_mod",
    "return_dropout_mask": "there is no dropout",
}


@overload
def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    *,
    cache_seqlens: torch.Tensor | int | None = ...,
    block_table: torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ...,
    rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ...,
    rotary_interleaved: bool = ...,
    causal: bool = ...,
    scale: float | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    prefix_len: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    tree_mask: torch.Tensor | None = ...,
    score_mod: Any = ...,
    mask_mod: Any = ...,
    k_descale: torch.Tensor | None = ...,
    v_descale: torch.Tensor | None = ...,
    num_splits: int | None = ...,
    batch_invariant: bool = ...,
    return_lse: Literal[False] = ...,
    **others: Any,
) -> torch.Tensor: ...
@overload
def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    *,
    cache_seqlens: torch.Tensor | int | None = ...,
    block_table: torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ...,
    rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ...,
    rotary_interleaved: bool = ...,
    causal: bool = ...,
    scale: float | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    prefix_len: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    tree_mask: torch.Tensor | None = ...,
    score_mod: Any = ...,
    mask_mod: Any = ...,
    k_descale: torch.Tensor | None = ...,
    v_descale: torch.Tensor | None = ...,
    num_splits: int | None = ...,
    batch_invariant: bool = ...,
    return_lse: bool,
    **others: Any,
) -> Any: ...
def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    causal: bool = False,
    scale: float | None = None,
    window: Ends | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    prefix_len: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """softmax(scale * q k^T) v of each sequence of a batch with its keys in a cache, to which new keys may be added first.

    q: [batch, len_q, heads_q, head_dim], bf16 or fp16: one query of each sequence in a step of a generation, several that are guessed,
       a part of a prompt or a whole one
    k_cache: [batch_cache, keys, heads_kv, head_dim], batch_cache >= batch, or with block_table [pages, page_size, heads_kv, head_dim], of
       pages of any size from 1; v_cache: as k_cache, with head_dim_v. Of q's dtype, or torch.float8_e4m3fn. Any
       strides whose last is 1, rows aligned to 16 bytes: both may be parts of one tensor; a compiled call that adds keys should then be
       given that tensor, and take its parts itself, as PyTorch copies tensors that share memory where one of them changes. Heads and head
       dims as `flashgen.attention` has them; of float8_e4m3fn head dims are multiples of 16.
    k, v: [batch, len_new, heads_kv, head_dim], and with head_dim_v: new keys and values, which are written to the cache before attention is
       computed. New key i of sequence b comes behind the keys that are there, as number cache_seqlens[b] + i. One that has no room is not
       written, and queries are aligned to the last key that has; where a table names no page, nothing is written, but a page is read.
    cache_seqlens: int32, [batch], on the device: how many keys each sequence has in the cache, without new ones. It is not changed. An int
       for all sequences alike; None for all keys that the cache has room for, where nothing is added. A tensor costs a call the least.
    block_table: int32, [batch, pages of a sequence], on the device: keys of sequence b from i * page_size are in page block_table[b, i].
       Sequences may share pages. Entries behind those that a sequence needs are not looked at.
    cache_batch_idx: int32, [batch], on the device: which entry of the cache each sequence has, where there is no block_table; b without.
    cache_leftpad: int32, [batch], on the device: the first key of each sequence that counts, 0 without. Those before it are not looked at.
    rotary_cos, rotary_sin: [positions, rotary_dim / 2], q's dtype or fp32, rotary_dim up to head_dim: the first rotary_dim elements of q
       and of new keys are rotated by the angles of their positions. New key i has position cache_seqlens[b] + i, and so has query i where
       attention is causal or has a window or chunks; else all queries have position cache_seqlens[b]. There is a row for each key that a
       sequence has room for, used or not, and for each query more than new keys; of a wide block_table pass block_table[:, :pages] alone.
    rotary_interleaved: whether an element is rotated with the next one (GPT-J), or with that half of rotary_dim behind (GPT-NeoX, Llama)
    causal: query i of a sequence sees its keys j <= i + len_kv - len_q, of all that it has then, new ones included (aligned bottom-right)
    scale, window, chunk, softcap, alibi_slopes, sinks, prefix_len: as `flashgen.attention` has them. What modifiers call key 0 is the first
       key of a sequence that counts, behind cache_leftpad.
    mask: bool, of a shape that broadcasts to [batch, heads_q, len_q, keys], of as many keys as a sequence has room for: query i of a
       sequence sees its key j where element (i, j) is True, of those that all other masks let it see. Any strides.
    tree_mask: bool, of a shape that broadcasts to [batch, heads_q, len_q, len_q]: a mask of the last len_q keys alone, as of guessed tokens
       in a tree: query i sees key len_kv - len_q + j of its sequence where element (i, j) is True, and all keys before those. It is
       aligned to the end of each sequence, as a mask is to its beginning. Tokens of a tree have positions of their own: rotate them before.
    bias: q's dtype or fp32, of a mask's shapes: added to scaled scores, as `flashgen.attention` has it
    score_mod, mask_mod: functions (score, batch, head, query, key) and (batch, head, query, key) as `flashgen.attention` has them: batch is
       the number of the sequence, and query and key are counted from 0 in it. A tensor of lengths that they capture says where queries are.
       A window or ALiBi is not found in them, as those go by lengths: they are faster by keywords of their own.
    k_descale, v_descale: fp32, [batch, heads_kv] or broadcast to it: what elements of a float8_e4m3fn cache are multiplied by, 1 without.
       New keys and values are divided by them, rounded to nearest even, and at most the largest element, 448.
    num_splits: into how many parts keys are divided for more of the GPU at once. flashgen divides them by sizes and the number of SMs,
       whatever is given: this is there for those who come from flash_attn_with_kvcache.
    batch_invariant: whether what a sequence gets must be the same to the bit whatever else is in the batch, on every GPU of an
       architecture, and whether its keys are in pages or not. It takes longer, and memory by how many keys there is room for.
    others: further keywords of `flashgen.attention`, which are refused by name: what they say has no form for caches, or not yet.
    Returns out [batch, len_q, heads_q, head_dim_v], dense; with return_lse also the natural log-sum-exp of the scaled scores, fp32
    [batch, heads_q, len_q]. A query that sees no key has out 0 and an lse of -inf.

    For inference: tensors that require grad are refused while gradients are enabled. Nobody waits for the device, and a CUDA graph may be
    replayed with other lengths, tables and keys. Lengths in tensors that are below 0 or beyond the cache count as the nearest that is not,
    entries of a table likewise, and ints that a compiled graph first learns in a run, as by .item(): nothing outside of the tensors is read
    or written. With FLASHGEN_CHECK_SEQUENCES=1 in the environment when flashgen is imported, each call waits for the device and raises
    ArgumentError for the first that is wrong. Raises as `flashgen.attention` does.
    """
    if others:
        refuse_keywords("attention_with_kvcache", _REFUSED, others)
    has_lengths = cache_seqlens is not None
    if num_splits is not None or not type(rotary_interleaved) is type(batch_invariant) is bool or not has_lengths:
        check_added_types(k, v, rotary_cos, rotary_sin, rotary_interleaved, num_splits, batch_invariant, has_lengths)
    lengths: Any = cache_seqlens
    if not isinstance(lengths, torch.Tensor):
        lengths = lengths_in_memory(q, k_cache, block_table, lengths, k)
    modified: Any = ()  # what operators are told of modifiers
    given = NO_MODIFIERS
    is_local = False
    of_modifiers: tuple[torch.Tensor, ...] = ()
    if (  # written out: each call asks
        window is not None
        or chunk is not None
        or softcap is not None
        or alibi_slopes is not None
        or sinks is not None
        or prefix_len is not None
        or bias is not None
        or mask is not None
        or tree_mask is not None
        or score_mod is not None
        or mask_mod is not None
    ):
        require_bottom_right(causal)
        modifiers = (window, softcap, alibi_slopes, sinks, bias, mask, None, chunk, prefix_len, None, 0.0, score_mod, mask_mod)
        call = None if score_mod is None and mask_mod is None else call_on_cache(q, k_cache, block_table, scale)
        causal, modified, known = modified_of_call(causal, *modifiers, top_left=None, q=q, call=call, tree_mask=tree_mask)
        # len: torch.compile of PyTorch 2.11 does not trace bool of a tuple
        is_local = len(modified) > 0 and ("window" in modified[0] or "chunk" in modified[0])
        if not is_dynamo_compiling():
            given, of_modifiers = (known, tuple(modified[3])) if modified and known is not None else asked(*modified)
    if k_descale is not None or v_descale is not None:
        k_descale, v_descale = broadcast_descales(q, k_cache, k_descale, v_descale)
    by_query = is_local or causal is True
    if not is_dynamo_compiling() and (k is None) is (v is None) and (rotary_cos is None) is (rotary_sin is None):
        tensors: list[Any] = [q, k_cache, v_cache, lengths]
        there = 0
        if block_table is not None:
            tensors.append(block_table)
            there = TABLE
        if cache_batch_idx is not None:
            tensors.append(cache_batch_idx)
            there |= BATCH_IDX
        if cache_leftpad is not None:
            tensors.append(cache_leftpad)
            there |= LEFTPAD
        if k_descale is not None:
            tensors.append(k_descale)
            there |= K_DESCALE
        if v_descale is not None:
            tensors.append(v_descale)
            there |= V_DESCALE
        if of_modifiers:
            tensors += of_modifiers
        options: tuple[Any, ...]
        if k is None and rotary_cos is None:
            options = (there, causal, scale, given, batch_invariant, False, False, ())
        else:
            if k is not None:
                tensors += (k, v)
                there |= APPENDED
            if rotary_cos is not None:
                tensors += (rotary_cos, rotary_sin)
                there |= ROTARY
                options = (there, causal, scale, given, batch_invariant, rotary_interleaved, by_query, ())
            else:
                options = (there, causal, scale, given, batch_invariant, False, False, ())
        run = cached_run_at_hand(tensors, options)
        if run is not None:
            both = run(return_lse, *tensors)
            return both if return_lse else both[0]
    where = CachedKeys(lengths, block_table, cache_batch_idx, cache_leftpad, k_descale, v_descale)
    try:
        q, k, v = cast_by_autocast(q, k, v)
        check_added_types(k, v, rotary_cos, rotary_sin, rotary_interleaved, num_splits, batch_invariant, has_lengths)
        check_cached_types(q, k_cache, v_cache, where, causal, scale, return_lse)
        of_call = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, sinks, bias, k_descale, v_descale)
        require_inference(dict(zip(_MAY_REQUIRE_GRAD, of_call, strict=True)), modified[3] if modified else ())
        if k is not None or rotary_cos is not None:
            if not is_compiling():  # no cache may change where attention cannot be computed
                check_cached_call(q, k_cache, v_cache, where, causal, scale, batch_invariant, *asked(*modified))
                if packed_arguments.values_are_checked:  # what appends knows no padding
                    require_right_lengths(k_cache, where, k.shape[1] if k is not None and k.ndim == 4 else 0)
            table = block_table if cache_batch_idx is None else cache_batch_idx[:, None]
            behind = rotary_cos, rotary_sin, k_descale, v_descale, rotary_interleaved, by_query
            in_all, rotated = append_to_cache(k_cache, v_cache, k, v, lengths, table, q, *behind)
            q = q if rotary_cos is None else rotated
            where = where._replace(cache_seqlens=in_all)
        operator = attention_cached_forward if return_lse else attention_cached_output
        return operator(q, k_cache, v_cache, *where, causal, scale, batch_invariant, *modified)
    except Exception as error:
        if not is_compiling():
            require_together(q, k_cache, v_cache, error, in_mode=not nobody_listens())
        raise
