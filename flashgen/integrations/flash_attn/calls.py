"""The calls behind both of FlashAttention's interfaces, version 2's and 3's: dense and packed sequences, and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from flashgen.codegen.errors import require_int
from flashgen.codegen.seen import Ends

from ...api import attention
from ...kvcache import attention_with_kvcache
from ...varlen import attention_varlen
from ..probability import probability
from ..signed_probabilities import signed_probabilities, signed_probabilities_of_sequences
from .arguments import fits, fitted, length_of, raise_as_theirs, require_head_dim, require_packed, softcap_of
from .inference import inference


def uncached_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: Ends | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    with_lse: bool,
    *,
    with_probabilities: bool = False,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    tokens: dict[str, Any] | None = None,
) -> Any:
    """Out, with_lse (out, lse), with_probabilities and dropout (out, lse, S_dmask): see `signed_probabilities`.

    q, k, v: [batch, length, heads, head_dim]. tokens: where packed sequences lie, by keywords of `flashgen.attention_varlen`: q, k, v are
    [tokens, heads, head_dim] then, and lse [heads, tokens]. Raises ArgumentError.
    """
    cap = softcap_of(softcap) if softcap else None
    options: dict[str, Any] = {}
    try:
        if drops := bool(with_probabilities and dropout_p):
            options["return_dropout_mask"] = True
        if tokens is not None:
            options |= tokens
            for name in ("max_seqlen_q", "max_seqlen_kv"):
                options[name] = length_of(options[name], needed=drops)
        width = 0  # of v, if it is to grow
        if not fits(q, k, v):
            require_head_dim("k", k, "q", q)
            width = v.shape[-1]
            softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            q, k, v = fitted(q), fitted(k), fitted(v)
        function: Callable[..., Any] = attention if tokens is None else attention_varlen
        found = function(
            q,
            k,
            v,
            causal=causal,
            scale=softmax_scale,
            return_lse=with_lse,
            deterministic=deterministic or None,
            window=window,
            chunk=chunk,
            softcap=cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_p=probability(dropout_p),
            **options,
        )
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, q=q, k=k, v=v)
        raise
    if width and width != v.shape[-1]:
        found = (found[0][..., :width], *found[1:]) if with_lse else found[..., :width]
    if not drops:
        return found
    out, lse, kept = found
    modified = (kept, causal, softmax_scale, window, cap, alibi_slopes)
    if tokens is None:
        return out, lse, signed_probabilities(q, k, *modified)
    ends = tokens["cu_seqlens_q"].tolist(), tokens["cu_seqlens_kv"].tolist()
    return out, lse, signed_probabilities_of_sequences(q, k, ends, *modified)


def cached_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    softmax_scale: float | None,
    with_lse: bool,
    names: Mapping[str, str],
    options: dict[str, Any],
) -> Any:
    """Out, or (out, lse), of keys in a cache: `flashgen.attention_with_kvcache`, which has these options.

    Raises ArgumentError, by the function's own `names` of arguments: see `raise_as_theirs`.
    Of tensors that require grad a gradient may not be asked: autograd then raises NoDerivativeError.
    """
    try:
        if fits(q, k_cache, v_cache) and (k is None or k.stride(-1) == 1) and (v is None or v.stride(-1) == 1):
            if not torch.is_grad_enabled():
                return attention_with_kvcache(q, k_cache, v_cache, k, v, scale=softmax_scale, return_lse=with_lse, **options)
            return inference(
                lambda: attention_with_kvcache(q, k_cache, v_cache, k, v, scale=softmax_scale, return_lse=with_lse, **options),
                (q, k_cache, v_cache, k, v),
            )
        require_head_dim("k_cache", k_cache, "q", q)
        require_head_dim("k", k, "k_cache", k_cache)
        require_head_dim("v", v, "v_cache", v_cache)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        caches, width = (fitted(k_cache), fitted(v_cache)), v_cache.shape[-1]

        def call() -> Any:
            found = attention_with_kvcache(fitted(q), *caches, fitted(k), fitted(v), scale=scale, return_lse=with_lse, **options)
            if k is not None:  # FlashAttention writes a cache of another head dim back as well
                for cache, padded in zip((k_cache, v_cache), caches, strict=True):
                    if padded is not cache:
                        cache.copy_(padded[..., : cache.shape[-1]])
            return (found[0][..., :width], found[1]) if with_lse else found[..., :width]

        return inference(call, (q, k_cache, v_cache, k, v))
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, names=names, q=q, k_cache=k_cache, v_cache=v_cache)
        raise


def packed_cached_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int | None,
    softmax_scale: float | None,
    with_lse: bool,
    names: Mapping[str, str],
    **options: Any,
) -> Any:
    """The same of packed queries, [tokens, heads, head_dim]; lse is [heads, tokens]. An option cu_seqlens_k takes cache_seqlens' place.

    Kernels of caches take as many queries of each sequence: those that are fewer come behind rows that nobody reads, as the last one is
    aligned to the last key. So memory grows with max_seqlen_q * batch, and nobody waits for the device.
    """
    try:
        most = length_of(max_seqlen_q, needed=True)
        require_packed(q, {"cu_seqlens_q": cu_seqlens_q, **{name: options[name] for name in ("cu_seqlens_k",) if name in options}})
        begins, ends = cu_seqlens_q[:-1], cu_seqlens_q[1:]
        if "cu_seqlens_k" in options:
            of_keys = options.pop("cu_seqlens_k")
            options["cache_seqlens"] = of_keys[1:] - of_keys[:-1]
        if q.shape[0]:
            require_int("max_seqlen_q", most, 1)
        else:
            empty = q.new_zeros((*q.shape[:2], v_cache.shape[-1]))
            return (empty, q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)) if with_lse else empty
        position = torch.arange(most, device=q.device) - (most - (ends - begins))[:, None]  # below 0: of no query
        padded = q[(begins[:, None] + position.clamp_min(0)).clamp_max(q.shape[0] - 1)]
        found = cached_call(padded, k_cache, v_cache, None, None, softmax_scale, with_lse, names, options)
        tokens = torch.arange(q.shape[0], device=q.device, dtype=ends.dtype)
        sequence = torch.bucketize(tokens, ends, right=True).clamp_max(len(ends) - 1)
        row = (tokens - ends[sequence] + most).clamp(0, most - 1)
        return (found[0][sequence, row], found[1][sequence, :, row].T) if with_lse else found[sequence, row]
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, names=names, q=q, k_cache=k_cache, v_cache=v_cache)
        raise
