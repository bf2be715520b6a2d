"""What a call of `flashgen.attention_varlen` costs the CPU: of a known signature, and of sizes that it has not seen before.

    python -m tools.packed_overhead --gpu
    python -m tools.packed_overhead --rounds 31

With --gpu on the machine's GPU, which is waited for between turns. Without, on a made-up driver, as in rounds.py. 16 sequences,
8 heads, head_dim 128, bf16, causal, gradients off, and dense calls of the same beside them. In each round every kind of call runs in turn:
microseconds, the median of rounds and the least. "again" has as many numbers of tokens as a round has calls, which were all seen before;
"new" has ones that nobody has seen. With --gpu steps of a training, too: forward and backward, in which autograd has most of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from flashgen.api import attention
from flashgen.varlen import attention_varlen

from .rounds import Calls, device_for_calls, line, measured, parser

BATCH, HEADS, HEAD_DIM, TOKENS = 16, 8, 128, 2048


def kinds(device: str, calls: int) -> Calls:
    """The calls by what they are."""
    shape = (2 * TOKENS + 2**16, HEADS, HEAD_DIM)
    memory = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in "qkv"]  # PyTorch's check knows no tensor that is there twice
    ends = torch.arange(BATCH + 1, device=device, dtype=torch.int32) * (TOKENS // BATCH)
    used, fixed = ends.diff(), [tensor[:TOKENS] for tensor in memory]
    dense = [tensor.view(BATCH, -1, HEADS, HEAD_DIM) for tensor in fixed]
    again, new = itertools.cycle(range(TOKENS + 1, TOKENS + 1 + calls)), itertools.count(TOKENS + calls + 1)
    batches, boundaries = itertools.count(1), torch.arange(2**16, device=device, dtype=torch.int32)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> object:
        return attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, causal=True, **more)

    def of(tokens: int) -> list[torch.Tensor]:
        return [tensor[:tokens] for tensor in memory]

    def grown(length: int) -> list[torch.Tensor]:
        return [tensor[: 4 * length].view(4, length, HEADS, HEAD_DIM) for tensor in memory]

    def of_batch(batch: int) -> object:
        ends = boundaries[: 600 + batch % 400]
        return attention_varlen(*fixed, cu_seqlens_q=ends, cu_seqlens_kv=ends, causal=True)

    def step(tokens: int) -> object:
        """With gradients, of a training."""
        with torch.enable_grad():
            qkv = [tensor[:tokens].detach().requires_grad_() for tensor in memory]
            return torch.autograd.grad(varlen(*qkv), qkv, d_out[:tokens])  # type: ignore[call-overload]

    lengths, d_out = itertools.count(TOKENS // 8), torch.zeros_like(memory[0])
    of_training: Calls = {
        "step": lambda: step(TOKENS),
        "step, new": lambda: step(next(new)),
    }
    return {
        "dense": lambda: attention(dense[0], dense[1], dense[2], causal=True),
        "packed": lambda: varlen(*fixed),
        "packed with hints": lambda: varlen(*fixed, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS),
        "packed with seqused": lambda: varlen(*fixed, seqused_q=used, seqused_kv=used),
        "packed, again": lambda: varlen(*of(next(again))),
        "packed, new": lambda: varlen(*of(next(new))),
        "packed, new with hints": lambda: varlen(*of(tokens := next(new)), max_seqlen_q=tokens // 7, max_seqlen_kv=tokens // 7),
        "packed, new batch": lambda: of_batch(next(batches)),
        "dense, new lengths": lambda: attention(*grown(next(lengths)), causal=True),
        "slices, in the new ones": lambda: of(TOKENS),
        "views, in the dense one": lambda: grown(TOKENS // 8),
        **(of_training if device == "cuda" else {}),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = parser(__doc__).parse_args(argv)
    with device_for_calls(options.gpu) as device:
        for name, times in measured(kinds(device, options.calls), options).items():
            print(line(name, times))


if __name__ == "__main__":
    main()
