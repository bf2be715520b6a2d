"""flashgen's calls in plain PyTorch, of any dtype: for tests of who calls them, exact to rounding and in no time.

They say by index arithmetic what docstrings of the calls say. That flashgen computes the same is tested elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bshd",
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    document_ids: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    mask_mod: Callable[..., Tensor] | None = None,
) -> Tensor:
    """`flashgen.attention` with the keywords that are needed."""
    assert layout in ("bshd", "bhsd")
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    assert dropout_p == 0
    (batch, len_q, heads, head_dim), (len_kv, heads_kv) = q.shape, k.shape[1:3]
    query = torch.arange(len_q, device=q.device)[:, None] + len_kv - len_q
    key = torch.arange(len_kv, device=q.device)
    seen = torch.ones(batch, 1, len_q, len_kv, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen & (key <= query)
    if window is not None:
        left, right = window
        seen = seen if left is None else seen & (key >= query - left)
        seen = seen if right is None else seen & (key <= query + right)
    if chunk is not None:
        seen = seen & (key // chunk == query // chunk) & (query >= 0)
    if document_ids is not None:
        of_q, of_k = document_ids if isinstance(document_ids, tuple) else (document_ids, document_ids)
        assert of_q.shape[-1] == len_q
        assert of_k.shape[-1] == len_kv
        seen = seen & (of_q[:, None, :, None] == of_k[:, None, None])
    if key_padding_mask is not None:
        assert key_padding_mask.shape == (batch, len_kv)
        seen = seen & key_padding_mask[:, None, None]
    if mask is not None:
        seen = seen & mask
    if mask_mod is not None:
        indices = [torch.arange(size, device=q.device) for size in (batch, heads, len_q, len_kv)]
        seen = seen & mask_mod(*(each.view([-1 if i == j else 1 for j in range(4)]) for i, each in enumerate(indices)))
    k, v = (each.transpose(1, 2).repeat_interleave(heads // heads_kv, 1) for each in (k, v))
    score = q.transpose(1, 2) @ k.transpose(2, 3) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None, None].to(score).expand(*score.shape[:3], 1)], -1)
    top = score.amax(-1, keepdim=True).clamp(min=torch.finfo(score.dtype).min)
    p = (score - top).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    out = p[..., :len_kv] @ v
    return out if layout == "bhsd" else out.transpose(1, 2)


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """`flashgen.attention_with_kvcache` without new keys and pages, sequence by sequence."""
    assert not torch.is_grad_enabled()
    found = []
    for b in range(q.shape[0]):
        end = k_cache.shape[1] if cache_seqlens is None else int(cache_seqlens[b])
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        keys = slice(min(first, end), end)
        own = {name: each[b : b + 1] if each.shape[0] > 1 else each for name, each in (("mask", mask), ("bias", bias)) if each is not None}
        cut: dict[str, Any] = {name: each[..., : end - keys.start] for name, each in own.items()}
        found.append(attention(q[b : b + 1], k_cache[b : b + 1, keys], v_cache[b : b + 1, keys], **cut, **others))
    return torch.cat(found)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    **others: Any,
) -> Tensor:
    """`flashgen.attention_varlen` of boundaries, sequence by sequence, and perhaps with a batch of 1 in front."""
    where: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    if q.ndim == 4:
        return attention_varlen(q[0], k[0], v[0], **where, **others)[None]
    assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
    found = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
    for b in range(len(cu_seqlens_q) - 1):
        of_q, of_k = slice(*cu_seqlens_q[b : b + 2].tolist()), slice(*cu_seqlens_kv[b : b + 2].tolist())
        found[of_q] = attention(q[None, of_q], k[None, of_k], v[None, of_k], **others)[0]
    return found
