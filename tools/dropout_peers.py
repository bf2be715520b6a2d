"""Attention with dropout, side by side: flashgen and SDPA's backends that have it, by turns.

    python -m tools.dropout_peers
    python -m tools.dropout_peers --head-dim 64 --pass forward

Needs a GPU. bf16, batch * length = 16384, length 4096, heads * head_dim = 2048, dropout_p 0.1, inputs from N(0, 1); gradients are those of
q, k and v. A peer gets no time unless it drops as it should: where all P are the same and v is 1, out has a mean of 1 and a variance of
p / (1 - p) / length, to 20 %, as some meet p to 2^-8. Milliseconds, medians of 9 rounds; the last columns are the best peer's time over
flashgen's, and flashgen's over its own without dropout.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen

from .bias_peers import asked
from .modifier_cost import milliseconds

TOKENS, MODEL_DIM, LENGTH, P = 16384, 2048, 4096, 0.1
ROUNDS, CALLS = 9, 5
SPARED = "without"  # flashgen's call without dropout
Attention = Callable[..., torch.Tensor]


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's, by that backend."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=causal)


def ours(p: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Of this project."""
    return flashgen.attention(q, k, v, causal=causal, layout="bhsd", dropout_p=p)


PEERS: dict[str, Attention] = {
    "flashgen": partial(ours, P),
    "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = asked(__doc__, argv)
    for operation in options.operation:
        for head_dim in options.head_dim:
            for causal in (False, True):
                times, failed = measured(operation, head_dim, causal)
                told = "  ".join(f"{name} {time:.3f}" for name, time in times.items())
                best = min((time for name, time in times.items() if name not in ("flashgen", SPARED)), default=float("nan"))
                mask, own = "causal" if causal else "full", times["flashgen"]
                print(f"{operation:8} head_dim {head_dim:3} {mask:6}  {told}  {best / own:.3f}  {own / times[SPARED]:.3f}", flush=True)
                for name, why in failed.items():
                    print(f"  {name}: {why}")


def measured(operation: str, head_dim: int, causal: bool) -> tuple[dict[str, float], dict[str, str]]:
    """Times of those that can do it, and why the others cannot."""
    shape = (TOKENS // LENGTH, MODEL_DIM // head_dim, LENGTH, head_dim)
    given = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    runs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    all_of_them: dict[str, Attention] = {**PEERS, SPARED: partial(ours, 0.0)}
    for name, attention in all_of_them.items():
        try:
            if name != SPARED and (fault := fault_of(attention, given[0])):
                failed[name] = fault
                continue
            runs[name] = run = call(operation, attention, given, causal)
            run(), run()
        except Exception as error:  # each fails in its own ways
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            runs.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(milliseconds(run, CALLS))
    return {name: statistics.median(each) for name, each in times.items()}, failed


def fault_of(attention: Attention, like: torch.Tensor) -> str:
    """What is wrong with how it drops; empty if nothing."""
    zeros, ones = (torch.full_like(like, value, dtype=torch.float16) for value in (0.0, 1.0))  # bf16 is too coarse beside 1
    out = attention(zeros, zeros, ones, causal=False)[..., 0].float()
    mean, variance = float(out.mean()), float((out - 1).square().mean())
    wanted = P / (1 - P) / LENGTH
    right = abs(mean - 1) < 0.005 and abs(variance / wanted - 1) < 0.2
    return "" if right else f"out has a mean of {mean:.4f} and a variance of {variance:.3g}, not {wanted:.3g}"


def call(operation: str, attention: Attention, given: Sequence[torch.Tensor], causal: bool) -> Callable[[], Any]:
    """What is timed: for gradients after a forward pass."""
    q, k, v, d_out = given
    if operation == "forward":
        return lambda: attention(q, k, v, causal=causal)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2], causal=causal)
    return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


if __name__ == "__main__":
    main()
