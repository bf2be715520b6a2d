"""What `flashgen.integrations.flash_attn` costs the CPU over the calls of flashgen that it makes.

    python -m tools.flash_attn_overhead --gpu
    python -m tools.flash_attn_overhead --rounds 31

With --gpu on the machine's GPU, which is waited for between turns; without, on a made-up driver, as in rounds.py. The thread
knows the signature of every call: 2 sequences of 128 tokens, 8 heads on 2, head_dim 64, bf16; caches have one query. In each round every
kind of call runs in turn: microseconds, the median of rounds of flashgen's call, and of what FlashAttention's has more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen import attention, attention_varlen, attention_with_kvcache
from flashgen.integrations import flash_attn
from flashgen.integrations.flash_attn import flash_attn_3_interface

from .rounds import Pairs, device_for_calls, parser, print_pairs

BATCH, LENGTH, HEADS, HEADS_KV, HEAD_DIM = 2, 128, 8, 2, 64


def kinds(device: str) -> Pairs:
    """FlashAttention's call and flashgen's, by what they are."""
    q = torch.zeros(BATCH, LENGTH, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    k, v = (torch.zeros(BATCH, LENGTH, HEADS_KV, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in "kv")
    one, packed_q, packed_k, packed_v = q[:, :1], q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    ends = torch.arange(0, BATCH * LENGTH + 1, LENGTH, device=device, dtype=torch.int32)
    used = torch.full((BATCH,), LENGTH, device=device, dtype=torch.int32)
    of_q: dict[str, Any] = {"cu_seqlens_q": ends, "max_seqlen_q": LENGTH, "causal": True}

    def varlen() -> object:
        return attention_varlen(packed_q, packed_k, packed_v, cu_seqlens_kv=ends, max_seqlen_kv=LENGTH, **of_q)

    def their_varlen() -> object:
        return flash_attn.flash_attn_varlen_func(packed_q, packed_k, packed_v, cu_seqlens_k=ends, max_seqlen_k=LENGTH, **of_q)

    return {
        "dense": (lambda: flash_attn.flash_attn_func(q, k, v, causal=True), lambda: attention(q, k, v, causal=True)),
        "dense, version 3": (
            lambda: flash_attn_3_interface.flash_attn_func(q, k, v, causal=True),
            lambda: attention(q, k, v, causal=True),
        ),
        "dense, a window": (
            lambda: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(63, 63)),
            lambda: attention(q, k, v, causal=True, window=(63, None)),
        ),
        "packed": (their_varlen, varlen),
        "cache": (
            lambda: flash_attn.flash_attn_with_kvcache(one, k, v, cache_seqlens=used, causal=True),
            lambda: attention_with_kvcache(one, k, v, cache_seqlens=used, causal=True),
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = parser(__doc__).parse_args(argv)
    with device_for_calls(options.gpu) as device:
        print_pairs(kinds(device), options)


if __name__ == "__main__":
    main()
