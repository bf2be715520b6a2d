"""What `flashgen.integrations.sdpa` adds to the CPU's cost of a call of `flashgen.attention`, and what PyTorch's own function costs.

    python -m tools.sdpa_overhead --gpu
    python -m tools.sdpa_overhead --rounds 31

With --gpu on the machine's GPU, which is waited for between turns. Without, on a made-up driver, as in rounds.py, where
PyTorch's operators do not run. In each round every kind of call runs in turn: microseconds, the median of rounds, the least, and the
median of what a kind takes beyond the call of flashgen that it becomes. Gradients are off. "views" are [batch, len, heads, head_dim] in
memory, as models make them. "by operators" is activated, but by a name for PyTorch's function that was bound before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from flashgen.api import attention
from flashgen.integrations import sdpa

from .rounds import device_for_calls, line, measured, median_difference, parser

SHAPE = 2, 8, 128, 64  # batch, heads, len, head_dim


def kinds(device: str, on_gpu: bool) -> dict[str, tuple[str, Callable[[], object]]]:
    """The calls by what they are, and the calls that they become."""
    q, k, v = (torch.randn(*SHAPE, device=device).bfloat16() for _ in "qkv")
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    views: Any = [tensor.transpose(1, 2) for tensor in rows]
    one = views[0][:, :, :1]
    keys = torch.rand(SHAPE[0], 1, 1, SHAPE[2], device=device) > 0.1
    bias = torch.randn(1, SHAPE[1], SHAPE[2], SHAPE[2], device=device).bfloat16()
    pytorch: Any = torch._C._nn.scaled_dot_product_attention
    face: Any = functional.scaled_dot_product_attention  # activated

    found: dict[str, tuple[str, Callable[[], object]]] = {
        "attention": ("attention", lambda: attention(q, k, v, layout="bhsd")),
        "direct": ("attention", lambda: sdpa.scaled_dot_product_attention(q, k, v)),
        "activated": ("attention", lambda: face(q, k, v)),
        "attention, causal": ("attention, causal", lambda: attention(*rows, causal=True)),
        "activated, causal, views": ("attention, causal", lambda: face(*views, is_causal=True)),
        "attention, 1 query": ("attention, 1 query", lambda: attention(one, k, v, layout="bhsd")),
        "activated, 1 query, views": ("attention, 1 query", lambda: face(one, k, v)),
        "attention, key mask": ("attention, key mask", lambda: attention(q, k, v, layout="bhsd", mask=keys)),
        "activated, key mask": ("attention, key mask", lambda: face(q, k, v, keys)),
        "attention, bias": ("attention, bias", lambda: attention(q, k, v, layout="bhsd", bias=bias)),
        "activated, bias": ("attention, bias", lambda: face(q, k, v, bias)),
    }
    if on_gpu:
        found["by operators"] = ("attention", lambda: pytorch(q, k, v))
        found["by operators, key mask"] = ("attention, key mask", lambda: pytorch(q, k, v, keys))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = parser(__doc__).parse_args(argv)
    with device_for_calls(options.gpu) as device:
        with sdpa.enabled():
            calls = kinds(device, options.gpu)
            found = measured({name: call for name, (_, call) in calls.items()}, options)
        if options.gpu:
            q, k, v = (torch.randn(*SHAPE, device=device).bfloat16() for _ in "qkv")
            found |= measured({"PyTorch's": lambda: functional.scaled_dot_product_attention(q, k, v)}, options)
    for name, times in found.items():
        becomes = calls[name][0] if name in calls else "attention"
        print(f"{line(name, times)}  beyond flashgen's {median_difference(times, found[becomes]):6.2f}")
    print(sdpa.report())


if __name__ == "__main__":
    main()
