"""What a call of `flashgen.attention_with_kvcache` costs the CPU: of a known signature, and of sizes that it has not seen before.

    python -m tools.cache_overhead --gpu
    python -m tools.cache_overhead --rounds 31

With --gpu on the machine's GPU, which is waited for between turns. Without, on a made-up driver, as in rounds.py. A step of a
generation: 8 sequences, 32 heads on 8, head_dim 128, bf16, pages of 64 keys. In each round every kind of call runs in turn: microseconds,
the median of rounds and the least. "again" has as many widths of the table as a round has calls, which were all seen before; "new" has ones
that nobody has seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from flashgen.kvcache import attention_with_kvcache

from .rounds import Calls, device_for_calls, line, measured, parser

BATCH, HEADS, HEADS_KV, HEAD_DIM, PAGE, PAGES, WIDTH = 8, 32, 8, 128, 64, 256, 32
MOST = 2**12  # sequences of calls that have new numbers of them


def kinds(device: str, calls: int) -> Calls:
    """The calls by what they are."""
    q = torch.zeros(BATCH, 1, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    k_cache, v_cache = (torch.zeros(PAGES, PAGE, HEADS_KV, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in "kv")
    dense_k, dense_v = (cache.view(BATCH, -1, HEADS_KV, HEAD_DIM) for cache in (k_cache, v_cache))
    k, v = (torch.zeros(BATCH, 1, HEADS_KV, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.full((BATCH,), 1000, device=device, dtype=torch.int32)
    wide = torch.zeros(BATCH, 2 * WIDTH + 2**14, device=device, dtype=torch.int32)  # of which a call has the first columns
    cos, sin = (torch.zeros(PAGE * wide.shape[1], HEAD_DIM // 2, device=device, dtype=torch.bfloat16) for _ in "cs")
    table = torch.zeros(BATCH, WIDTH, device=device, dtype=torch.int32)
    large = torch.zeros(MOST, WIDTH, device=device, dtype=torch.int32)
    long, queries = (torch.zeros(MOST, device=device, dtype=torch.int32), torch.zeros(MOST, *q.shape[1:], device=device, dtype=q.dtype))
    batches = itertools.count(0, 7)
    again, new = itertools.cycle(range(WIDTH + 1, WIDTH + 1 + calls)), itertools.count(WIDTH + calls + 1)

    mask, tree_mask = (torch.ones(BATCH, 1, 1, keys, device=device, dtype=torch.bool) for keys in (WIDTH * PAGE, 1))
    slopes = torch.zeros(HEADS, device=device)

    def paged(table: torch.Tensor, **options: Any) -> object:
        return attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, **options)

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + slopes[head] * (key - lengths[batch])

    def of_batch(batch: int) -> object:
        of_table, of_lengths, of_q = large[:batch], long[:batch], queries[:batch]
        return attention_with_kvcache(of_q, k_cache, v_cache, cache_seqlens=of_lengths, block_table=of_table, causal=True)

    def appended(table: torch.Tensor) -> object:
        rotary: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin}
        return attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, **rotary, causal=True)

    return {
        "dense cache": lambda: attention_with_kvcache(q, dense_k, dense_v, cache_seqlens=lengths, causal=True),
        "pages": lambda: paged(table),
        "pages, appended and rotated": lambda: appended(table),
        "pages, a mask": lambda: paged(table, mask=mask),
        "pages, a tree mask": lambda: paged(table, tree_mask=tree_mask),
        "pages, a score_mod": lambda: paged(table, score_mod=score_mod),
        "one length, dense cache": lambda: attention_with_kvcache(q, dense_k, dense_v, cache_seqlens=1000, causal=True),
        "pages, again": lambda: paged(wide[:, : next(again)]),
        "pages, new": lambda: paged(wide[:, : next(new)]),
        "appended, new": lambda: appended(wide[:, : next(new)]),
        "pages, new batch": lambda: of_batch(MOST // 2 + 1 + next(batches) % (MOST // 2)),
        "a slice, in the new ones": lambda: wide[:, :WIDTH],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = parser(__doc__, calls=100).parse_args(argv)
    with device_for_calls(options.gpu) as device:
        for name, times in measured(kinds(device, options.calls), options).items():
            print(line(name, times))


if __name__ == "__main__":
    main()
