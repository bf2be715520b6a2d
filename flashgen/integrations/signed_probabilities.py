"""Which elements of P a dropout keeps, as FlashAttention's tests and PyTorch's read it: see `signed_probabilities`.

For tests alone: PyTorch computes it, in time and memory that grow with len_q * len_kv, by the links that oracles have of modifiers.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flashgen.codegen.seen import Ends

from ..numerics.forward import product_in_fp32
from ..numerics.link import Link, Rows, changed_scores, hidden_keys
from ..numerics.modifiers.alibi import AlibiLink
from ..numerics.modifiers.softcap import SoftcapLink
from ..numerics.modifiers.window import WindowLink


def signed_probabilities(
    q: Tensor,
    k: Tensor,
    kept: Tensor,
    causal: bool,
    scale: float | None,
    window: Ends | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """exp(S - row_max) in q's dtype, [batch, heads_q, len_q, len_kv]: 0 where a mask hides a key, negative where an element is dropped.

    P is that, divided by exp(lse - row_max). FlashAttention gives S less the maximum of the key tiles so far, which `_get_block_size_n`
    tells apart: here all keys are one tile.
    """
    with torch.no_grad():
        given = q.new_empty(kept.shape)
        slopes = None if alibi_slopes is None else alibi_slopes.expand(q.shape[0], q.shape[2])
        for b, of_batch in enumerate(given):
            of_batch.copy_(_of_sequence(b, q[b], k[b], causal, scale, window, softcap, slopes))
        return torch.where(kept, given, -given)


def signed_probabilities_of_sequences(
    q: Tensor,
    k: Tensor,
    ends: tuple[list[int], list[int]],
    kept: Tensor,
    causal: bool,
    scale: float | None,
    window: Ends | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The same of packed sequences: [batch, heads_q, max_seqlen_q, max_seqlen_k], 0 beyond a sequence. ends: cu_seqlens of both."""
    with torch.no_grad():
        given = q.new_zeros(kept.shape)
        slopes = None if alibi_slopes is None else alibi_slopes.expand(len(kept), q.shape[1])
        for b, (of_q, of_k) in enumerate(zip(pairwise(ends[0]), pairwise(ends[1]), strict=True)):
            queries, keys = q[slice(*of_q)], k[slice(*of_k)]
            given[b, :, : len(queries), : len(keys)] = _of_sequence(b, queries, keys, causal, scale, window, softcap, slopes)
        return torch.where(kept, given, -given)


def _of_sequence(
    number: int,
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float | None,
    window: Ends | None,
    softcap: float | None,
    slopes: Tensor | None,
) -> Tensor:
    """exp(S - row_max), fp32 [heads_q, len_q, len_kv]. q: [len_q, heads_q, head_dim]; slopes: [batch, heads_q]."""
    (len_q, heads, width), (len_kv, heads_kv, _) = q.shape, k.shape
    links: list[Link] = [] if softcap is None else [SoftcapLink(softcap)]
    if slopes is not None:
        links.append(AlibiLink(slopes))
    if window is not None:
        links.append(WindowLink(*(len_q + len_kv if end is None else end for end in window)))
    queries, of_heads = torch.arange(len_q, device=q.device), torch.arange(heads, device=q.device)
    rows = Rows(queries, len_q, len_kv, number, of_heads[:, None].expand(heads, len_q), heads)
    keys = k.transpose(0, 1).repeat_interleave(heads // heads_kv, 0)
    s = product_in_fp32(q.transpose(0, 1), keys.mT).mul_(width**-0.5 if scale is None else scale)
    s = changed_scores(s, rows, links).masked_fill_(hidden_keys(rows, causal, links), -torch.inf)
    if not len_kv:
        return s
    row_max = s.amax(-1, keepdim=True)
    return s.sub_(row_max.masked_fill(row_max == -torch.inf, 0.0)).exp_()
