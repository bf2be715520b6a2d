"""What `flashgen.integrations.flash_attn` costs the CPU over the calls of flashgen that it makes.

    python -m tools.flash_attn_overhead --gpu
    python -m tools.flash_attn_overhead --rounds 31

With --gpu on the machine's GPU, which is waited for between turns; without, on a made-up driver, as in modifier_overhead.py. The thread
knows the signature of every call: 2 sequences of 128 tokens, 8 heads on 2, head_dim 64, bf16; caches have one query. In each round every
kind of call runs in turn: microseconds, the median of rounds of flashgen's call, and of what FlashAttention's has more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashgen import attention, attention_varlen, attention_with_kvcache
from flashgen.integrations import flash_attn
from flashgen.integrations.flash_attn import flash_attn_3_interface

from .modifier_overhead import WARM_UP, measured, pretend

BATCH, LENGTH, HEADS, HEADS_KV, HEAD_DIM = 2, 128, 8, 2, 64


def kinds(device: str) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200, help="calls in a row of each kind")
    parser.add_argument("--gpu", action="store_true", help="call on this machine's GPU")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if options.gpu:
            os.environ["FLASHGEN_CACHE_DIR"] = folder
        else:
            pretend(Path(folder))
        pairs = kinds("cuda" if options.gpu else "cpu")
        calls = {name + side: call for name, both in pairs.items() for side, call in zip((" theirs", " ours"), both, strict=True)}
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        times = measured(calls, options.rounds, options.calls)
        for name in pairs:
            more = [theirs - ours for theirs, ours in zip(times[f"{name} theirs"], times[f"{name} ours"], strict=True)]
            print(f"{name:20} flashgen {statistics.median(times[f'{name} ours']):7.2f}  more {statistics.median(more):6.2f}")


if __name__ == "__main__":
    main()
