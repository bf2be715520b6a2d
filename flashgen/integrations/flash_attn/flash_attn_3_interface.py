"""FlashAttention-3's functions (flash_attn_interface, the module of flash-attn-3), by flashgen: the same arguments, shapes and meanings.

What tells FlashAttention-3's kernels how to divide their work (num_splits, pack_gqa) is taken and left to flashgen. What flashgen does not
have is refused by name: qv, 8-bit queries (q_descale), free SMs (sm_margin), metadata of its scheduler. lse comes with return_attn_probs or
return_softmax_lse, and is -inf for a query that sees no key. s_aux is `sinks` of `flashgen.attention`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.typed import require_type

from .arguments import NO_WINDOW, refuse, softcap_of, unpacked, window_of
from .calls import cached_call, packed_cached_call, uncached_call

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]
_OF_CACHE = {"return_lse": "return_softmax_lse", "block_table": "page_table"}  # our names of arguments to its own
Tensor = torch.Tensor | None

_EIGHT_BITS = "q, k and v have 16 bits; a cache alone may have 8, and flash_attn_with_kvcache takes its descales"
_REFUSED = {
    "qv": "flashgen has no second product of queries and values",
    "q_descale": "queries have 16 bits",
    "k_descale": _EIGHT_BITS,
    "v_descale": _EIGHT_BITS,
    "sm_margin": "its kernels use all SMs",
    "scheduler_metadata": "its kernels need none, and get_scheduler_metadata gives None",
    "cu_seqlens_k_new": "new keys come as [batch, length, heads, head_dim]",
    "rotary_seqlens": "positions are those that cache_seqlens gives",
    "rotary_cos": "queries that are packed (cu_seqlens_q) are rotated before the call",
    "k": "new keys are added by calls of queries that are not packed (cu_seqlens_q)",
}


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor = None,
    q_descale: Tensor = None,
    k_descale: Tensor = None,
    v_descale: Tensor = None,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor = None,
) -> Any:
    """Attention of q [batch, len_q, heads, head_dim] and k, v [batch, len_k, heads_k, head_dim or head_dim_v]: out, or (out, lse)."""
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None or sm_margin:
        given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "sm_margin": sm_margin}
        refuse("flash_attn_func", _REFUSED, **given)
    window = window_of(window_size, causal)
    options: tuple[Any, ...] = (softmax_scale, causal, window, softcap, None, deterministic, return_attn_probs)
    return uncached_call(q, k, v, 0.0, *options, chunk=attention_chunk or None, sinks=s_aux)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor = None,
    k_descale: Tensor = None,
    v_descale: Tensor = None,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [batch, length, 3, heads, head_dim], or with num_heads_q [batch, length, heads + 2 * heads_k, head_dim]."""
    if num_heads_q is None:
        q, k, v = unpacked("qkv", qkv, 3)
    else:
        if not isinstance(qkv, torch.Tensor):
            require_type("qkv", qkv, torch.Tensor)
        if qkv.ndim != 4:
            raise ArgumentError(f"qkv must have 4 dimensions (batch, length, heads + 2 * heads_k, head_dim); got {qkv.ndim}")
        require_int("num_heads_q", num_heads_q, 1)
        heads_k, left = divmod(qkv.shape[-2] - num_heads_q, 2)
        if left or heads_k < 1:
            raise ArgumentError(f"num_heads_q must leave heads of k and as many of v, of {qkv.shape[-2]} in all; got {num_heads_q}")
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], -2)
    descales = (q_descale, k_descale, v_descale)
    options: tuple[Any, ...] = (window_size, attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, *descales, *options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor = None,
    seqused_k: Tensor = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor = None,
    q_descale: Tensor = None,
    k_descale: Tensor = None,
    v_descale: Tensor = None,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor = None,
) -> Any:
    """The same of packed sequences: q [tokens, heads, head_dim], k and v [tokens_k, heads_k, head_dim], lse [heads, tokens].

    cu_seqlens_q, cu_seqlens_k: int32, [batch + 1]; seqused_q, seqused_k: int32, [batch], how many tokens of a sequence are used
    """
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None or sm_margin:
        given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "sm_margin": sm_margin}
        refuse("flash_attn_varlen_func", _REFUSED, **given)
    tokens = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
    tokens |= {"seqused_q": seqused_q, "seqused_kv": seqused_k}
    options: tuple[Any, ...] = (0.0, softmax_scale, causal, window_of(window_size, causal), softcap, None, deterministic, return_attn_probs)
    return uncached_call(q, k, v, *options, chunk=attention_chunk or None, sinks=s_aux, tokens=tokens)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Tensor = None,
    v: Tensor = None,
    qv: Tensor = None,
    rotary_cos: Tensor = None,
    rotary_sin: Tensor = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: Tensor = None,
    cache_leftpad: Tensor = None,
    page_table: Tensor = None,
    cu_seqlens_q: Tensor = None,
    cu_seqlens_k_new: Tensor = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor = None,
    q_descale: Tensor = None,
    k_descale: Tensor = None,
    v_descale: Tensor = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor = None,
) -> Any:
    """Attention with keys in a cache, to which k and v are added: see `flashgen.attention_with_kvcache`. Out, or (out, lse).

    q: [batch, len_q, heads, head_dim], or with cu_seqlens_q and max_seqlen_q packed, [tokens, heads, head_dim], and lse [heads, tokens]
    page_table: what flashgen calls block_table; k_descale, v_descale: fp32, [batch, heads_k], of caches of float8_e4m3fn
    """
    if (
        qv is not None
        or q_descale is not None
        or cu_seqlens_k_new is not None
        or rotary_seqlens is not None
        or scheduler_metadata is not None
        or sm_margin
    ):
        given: dict[str, Any] = {"qv": qv, "q_descale": q_descale, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens}
        refuse("flash_attn_with_kvcache", _REFUSED, **given, scheduler_metadata=scheduler_metadata, sm_margin=sm_margin)
    options: dict[str, Any] = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": page_table,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "causal": causal,
        "window": window_of(window_size, causal),
        "chunk": attention_chunk or None,
        "softcap": softcap_of(softcap),
        "sinks": s_aux,
    }
    if cu_seqlens_q is not None:
        refuse("flash_attn_with_kvcache", _REFUSED, k=k, rotary_cos=rotary_cos)
        return packed_cached_call(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, softmax_scale, return_softmax_lse, _OF_CACHE, **options)
    options |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
    return cached_call(q, k_cache, v_cache, k, v, softmax_scale, return_softmax_lse, _OF_CACHE, options)


def get_scheduler_metadata(*given: Any, **named: Any) -> None:
    """What `flash_attn_with_kvcache` takes as scheduler_metadata: nothing, since flashgen's kernels need none."""
