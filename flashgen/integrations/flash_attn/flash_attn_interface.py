"""FlashAttention-2's functions (flash_attn 2.8), by flashgen: the same arguments, shapes and meanings. docs/integrations.md has the table.

Causal masks and windows are aligned bottom-right; an end of a window below 0 is open. A query that sees no key gives 0, and an lse of -inf,
where FlashAttention-2 has inf. s_aux, of forks of FlashAttention-3 by whose presence transformers passes on a model's sinks, is `sinks` of
`flashgen.attention`. What is refused raises ArgumentError, which names the argument.
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import NO_WINDOW, refuse, softcap_of, unpacked, window_of
from .calls import cached_call, packed_cached_call, uncached_call
from .primitives import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_gpu,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_NOT_ON_PAGES = {"dropout_p": "it is for training, and keys in pages (block_table) are for inference"}
Window = tuple[int, int]
# Our names of arguments to those of functions that differ from others.
_OF_PAGES = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "cu_seqlens_k"}
_OF_CACHE = {"return_lse": "return_softmax_lse"}

_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Attention of q [batch, len_q, heads, head_dim] and k, v [batch, len_k, heads_k, head_dim]: out, in q's shape.

    alibi_slopes: fp32, [heads] or [batch, heads]; softcap: 0 or below for none
    return_attn_probs: also lse, fp32 [batch, heads, len_q], and S_dmask: with dropout [batch, heads, len_q, len_k], negative where an
       element is dropped, for tests alone (see `signed_probabilities`); without, an empty tensor
    """
    window = window_of(window_size, causal)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, return_attn_probs)
    found = uncached_call(q, k, v, *options, with_probabilities=return_attn_probs, sinks=s_aux)
    return _three(found) if return_attn_probs else found


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of kv [batch, len_k, 2, heads_k, head_dim]."""
    k, v = unpacked("kv", kv, 2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [batch, length, 3, heads, head_dim]."""
    q, k, v = unpacked("qkv", qkv, 3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """The same of packed sequences: q [tokens, heads, head_dim], k and v [tokens_k, heads_k, head_dim], lse [heads, tokens].

    cu_seqlens_q, cu_seqlens_k: int32, [batch + 1], on the device: sequence b has the tokens from entry b to entry b + 1
    block_table: int32, [batch, pages of a sequence]: k and v are [pages, page_size, heads_k, head_dim] then, of any page size, and have no
       gradients; cu_seqlens_k says how many keys a sequence has. No dropout.
    """
    window = window_of(window_size, causal)
    if block_table is None:
        tokens = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
        options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, return_attn_probs)
        found = uncached_call(q, k, v, *options, with_probabilities=return_attn_probs, sinks=s_aux, tokens=tokens)
        return _three(found) if return_attn_probs else found
    refuse("flash_attn_varlen_func", _NOT_ON_PAGES, dropout_p=dropout_p or None)
    found = packed_cached_call(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        return_attn_probs,
        _OF_PAGES,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        causal=causal,
        window=window,
        softcap=softcap_of(softcap),
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
    )
    return _three(found) if return_attn_probs else found


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of kv [tokens_k, 2, heads_k, head_dim]."""
    k, v = unpacked("kv", kv, 2)
    of_tokens: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *of_tokens, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv [tokens, 3, heads, head_dim]."""
    q, k, v = unpacked("qkv", qkv, 3)
    of_tokens: tuple[Any, ...] = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *of_tokens, *options)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Attention of q [batch, len_q, heads, head_dim] with keys in a cache, to which k and v are added.

    See `flashgen.attention_with_kvcache`. Out, and with return_softmax_lse lse, fp32 [batch, heads, len_q].
    num_splits is there for those who give it:
    flashgen divides keys by sizes and the number of SMs. A cache whose head dim is no multiple of 8 is copied, as in FlashAttention.
    """
    options = {
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "causal": causal,
        "window": window_of(window_size, causal),
        "softcap": softcap_of(softcap),
        "rotary_interleaved": rotary_interleaved,
        "alibi_slopes": alibi_slopes,
        "sinks": s_aux,
    }
    return cached_call(q, k_cache, v_cache, k, v, softmax_scale, return_softmax_lse, _OF_CACHE, options)


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """How many keys what `return_attn_probs` gives has in common a maximum for: all of them."""
    return 2**31 - 1


def _three(found: Any) -> Any:
    """Out, lse and S_dmask: an empty tensor without dropout, as FlashAttention gives it."""
    return found if len(found) == 3 else (*found, found[0].new_empty(0))
