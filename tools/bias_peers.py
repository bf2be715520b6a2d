"""Attention with a bias, side by side: flashgen, SDPA's cuDNN and memory-efficient backends, and FlexAttention, by turns.

    python -m tools.bias_peers
    python -m tools.bias_peers --head-dim 64 --pass forward

Needs a GPU. bf16, batch 4, 16 heads, length 4096, no mask, inputs and bias from N(0, 1). The bias is [1, heads, length, length], or
[batch, heads, 1, length]. Times of the backward pass are those of all four gradients. A peer whose results differ from flashgen's by more
than 2 % of their norm gets no time. Milliseconds, medians of 5 rounds; the last column is the best peer's time over flashgen's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

import flashgen

from .modifier_cost import milliseconds

BATCH, HEADS, LENGTH = 4, 16, 4096
SIZES = {"scores": (1, HEADS, LENGTH, LENGTH), "keys": (BATCH, HEADS, 1, LENGTH)}
ROUNDS, CALLS, TOLERANCE = 5, 5, 0.02
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(backend: SDPBackend) -> Attention:
    """PyTorch's, by that backend."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(BATCH, HEADS, LENGTH, LENGTH))

    return call


def flex_attention(kind: str) -> Attention:
    """PyTorch's FlexAttention, compiled."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        def of_scores(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return s + bias[0, h, i, j]

        def of_keys(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return s + bias[b, h, 0, j]

        out: torch.Tensor = flex.flex_attention(q, k, v, of_scores if kind == "scores" else of_keys)
        return out

    compiled: Attention = torch.compile(call, dynamic=False)
    return compiled


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = asked(__doc__, argv)
    for head_dim in options.head_dim:
        for kind, sizes in SIZES.items():
            given = [torch.randn(BATCH, HEADS, LENGTH, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
            bias = torch.randn(sizes, dtype=torch.bfloat16, device="cuda")
            peers: dict[str, Attention] = {
                "flashgen": lambda q, k, v, bias: flashgen.attention(q, k, v, bias=bias, layout="bhsd"),
                "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
                "efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
                "flex": flex_attention(kind),
            }
            for operation in options.operation:
                times, failed = measured({name: call(operation, peer, given, bias) for name, peer in peers.items()})
                told = "  ".join(f"{name} {time:.3f}" for name, time in times.items())
                best = min((time for name, time in times.items() if name != "flashgen"), default=float("nan"))
                print(f"bias of {kind:6} head_dim {head_dim:3} {operation:8}  {told}  {best / times['flashgen']:.3f}", flush=True)
                for name, why in failed.items():
                    print(f"  {name}: {why}")


def asked(doc: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Head dims and passes. Says what is measured on; exits without a GPU."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--pass", dest="operation", choices=("forward", "backward"), nargs="+", default=["forward", "backward"])
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; ms")
    return options


def call(operation: str, attention: Attention, given: Sequence[torch.Tensor], bias: torch.Tensor) -> Callable[[], Any]:
    """What makes what is timed: for gradients after a forward pass."""

    def make() -> Callable[[], Any]:
        q, k, v, d_out = given
        if operation == "forward":
            return lambda: attention(q, k, v, bias)
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, bias)]
        out = attention(leaves[0], leaves[1], leaves[2], leaves[3])
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return make


def measured(peers: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Times of those that can do it, and why the others cannot."""
    runs: dict[str, Callable[[], Any]] = {}
    failed, wanted = dict[str, str](), list[torch.Tensor]()
    for name, make in peers.items():
        try:
            run = make()
            found = run()
        except Exception as error:  # each fails in its own ways
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        wanted = wanted or found
        far = max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in zip(found, wanted, strict=True))
        if far > TOLERANCE:
            failed[name] = f"differs by {far:.1%} of the norm"
            continue
        run()
        runs[name] = run
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(milliseconds(run, CALLS))
    return {name: statistics.median(each) for name, each in times.items()}, failed


if __name__ == "__main__":
    main()
