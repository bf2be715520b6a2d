"""What the adapters to FlexAttention, xformers, diffusers and transformers cost the CPU over the calls of flashgen that they make.

    python -m tools.adapter_overhead --gpu
    python -m tools.adapter_overhead --rounds 31

With --gpu on the machine's GPU; without, on a made-up driver, as in rounds.py. Libraries that are not here are left out. The
thread knows the signature of every call: 2 sequences of 128 tokens, 8 heads, head_dim 64, bf16; caches have one query. In each round every
kind of call runs in turn: microseconds, the median of rounds of flashgen's call, and of what the adapter's has more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from flashgen import attention, attention_varlen, attention_with_kvcache
from flashgen.integrations import flex_attention as flex

from .rounds import Pairs, device_for_calls, parser, print_pairs

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 128, 8, 64


def drawn(device: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v: a call that has one tensor twice is not known as fast as one of three."""
    q, k, v = (torch.zeros(*shape, device=device, dtype=torch.bfloat16) for _ in "qkv")
    return q, k, v


def of_flex(device: str) -> Pairs:
    """The adapter's call and flashgen's, by what they are."""
    q, k, v = drawn(device, BATCH, HEADS, LENGTH, HEAD_DIM)
    rows = drawn(device, BATCH, LENGTH, HEADS, HEAD_DIM)
    by_query: Any = [tensor.transpose(1, 2) for tensor in rows]
    aux = flex.AuxRequest(lse=True)

    def score_mod(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        return score * 1.5

    return {
        "flex": (lambda: flex.flex_attention(q, k, v), lambda: attention(q, k, v, layout="bhsd")),
        "flex, score_mod, lse": (
            lambda: flex.flex_attention(q, k, v, score_mod, return_aux=aux),
            lambda: attention(q, k, v, layout="bhsd", score_mod=score_mod, return_lse=True),
        ),
        "flex, transposed": (lambda: flex.flex_attention(*by_query), lambda: attention(*rows)),
    }


def of_xformers(device: str) -> Pairs:
    """The same of xformers."""
    from xformers.ops.fmha import attn_bias as biases

    from flashgen.integrations.xformers import memory_efficient_attention

    q, k, v = drawn(device, BATCH, LENGTH, HEADS, HEAD_DIM)
    flat: Any = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    packed: Any = [tensor[None] for tensor in flat]
    one = q[None, :, 0]
    causal = biases.LowerTriangularMask()
    blocks = biases.BlockDiagonalMask.from_seqlens([LENGTH] * BATCH, device=torch.device(device)).make_causal()
    padded = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1] * BATCH, LENGTH, [LENGTH] * BATCH, device=torch.device(device)
    )
    ends, used = blocks.q_seqinfo.seqstart, padded.k_seqinfo.seqlen
    where = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": LENGTH, "max_seqlen_kv": LENGTH}
    each = q[:, :1]
    return {
        "xformers": (lambda: memory_efficient_attention(q, k, v), lambda: attention(q, k, v)),
        "xformers, causal": (lambda: memory_efficient_attention(q, k, v, causal), lambda: attention(q, k, v, causal=True)),
        "xformers, blocks": (
            lambda: memory_efficient_attention(packed[0], packed[1], packed[2], blocks),
            lambda: attention_varlen(*flat, causal=True, **where),
        ),
        "xformers, padded keys": (
            lambda: memory_efficient_attention(one, packed[1], packed[2], padded),
            lambda: attention_with_kvcache(each, k, v, cache_seqlens=used, causal=True),
        ),
    }


def of_diffusers(device: str) -> Pairs:
    """The same of diffusers."""
    from flashgen.integrations.diffusers import attention_of_backend

    q, k, v = drawn(device, BATCH, LENGTH, HEADS, HEAD_DIM)
    seen = torch.ones(BATCH, LENGTH, device=device, dtype=torch.bool)
    return {
        "diffusers": (lambda: attention_of_backend(q, k, v), lambda: attention(q, k, v)),
        "diffusers, keys": (lambda: attention_of_backend(q, k, v, seen), lambda: attention(q, k, v, mask=seen[:, None, None])),
    }


def of_transformers(device: str) -> Pairs:
    """The same of transformers' layers, whose tensors are views of [batch, len, heads, head_dim]."""
    from flashgen.integrations.transformers.calls import flashgen_attention
    from flashgen.integrations.transformers.prepared import PreparedMask

    rows = drawn(device, BATCH, LENGTH, HEADS, HEAD_DIM)
    q, k, v = (tensor.transpose(1, 2) for tensor in rows)
    module, mask = torch.nn.Module(), PreparedMask((BATCH, 1, LENGTH, LENGTH), causal=True)

    def layer() -> object:
        return flashgen_attention(module, q, k, v, mask, dropout=0.0, scaling=HEAD_DIM**-0.5, position_ids=None)

    return {"transformers": (layer, lambda: attention(*rows, causal=True, scale=HEAD_DIM**-0.5))}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = parser(__doc__).parse_args(argv)
    for library in ("diffusers", "transformers", "xformers.ops"):  # first, as they and what they load look at PyTorch's own tensors
        with suppress(ImportError):
            import_module(library)
    with device_for_calls(options.gpu) as device:
        pairs: Pairs = {}
        for made in (of_flex, of_xformers, of_diffusers, of_transformers):
            try:
                pairs |= made(device)
            except ImportError as error:
                print(f"left out: {error}")
        print_pairs(pairs, options)


if __name__ == "__main__":
    main()
