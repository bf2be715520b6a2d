"""What modifiers cost: the time of a call with each of them over that of the plain call, by turns.

    python tools/modifier_cost.py
    python tools/modifier_cost.py --kinds sinks,alibi --head-dim 64 --pass backward

Needs a GPU. bf16, causal, batch * length = 16384, heads * head_dim = 2048, inputs from N(0, 1). In each round every call runs in turn, back
to back for some milliseconds; a ratio is that of one round, and the table has their median. Gradients are those of q, k and v, and of what
else has some. In brackets after a window's ratio: the same for each key tile, of 128 keys for 128 queries, that is seen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import flashgen

TOKENS, MODEL_DIM, TILE = 16384, 2048, 128
ROUNDS, MILLISECONDS = 9, 8.0


def alibi_slopes(heads: int) -> torch.Tensor:
    """Those of Press et al. 2022, from 2^-(8 / heads) to 2^-8."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device="cuda", dtype=torch.float32) / heads)


def sinks(heads: int) -> torch.Tensor:
    """Of N(0, 1)."""
    return torch.randn(heads, device="cuda").requires_grad_()


def bias(heads: int, len_q: int, len_kv: int) -> torch.Tensor:
    """Of N(0, 1), the same for the whole batch."""
    return torch.randn(1, heads, len_q, len_kv, dtype=torch.bfloat16, device="cuda").requires_grad_()


KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {  # by heads and length
    "window": lambda heads, length: {"window": (1024, None)},
    "chunk": lambda heads, length: {"chunk": 1024},
    "prefix": lambda heads, length: {"prefix_len": torch.full((max(1, TOKENS // length),), length // 4, dtype=torch.int32, device="cuda")},
    "softcap": lambda heads, length: {"softcap": 50.0},
    "alibi": lambda heads, length: {"alibi_slopes": alibi_slopes(heads)},
    "sinks": lambda heads, length: {"sinks": sinks(heads)},
    "sinks-window": lambda heads, length: {"sinks": sinks(heads), "window": (1024, None)},
    "key-padding": lambda heads, length: {
        "key_padding_mask": torch.ones(max(1, TOKENS // length), length, dtype=torch.bool, device="cuda")
    },
    "mask": lambda heads, length: {"mask": torch.rand(length, length, device="cuda") < 0.9},
    "bias": lambda heads, length: {"bias": bias(heads, length, length)},
    "key-bias": lambda heads, length: {"bias": bias(heads, 1, length)},
    "dropout": lambda heads, length: {"dropout_p": 0.1},
    "constant-bias": lambda heads, length: {"bias": bias(heads, length, length).detach()},
}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*KINDS][:6])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--pass", dest="operation", choices=("forward", "backward"), nargs="+", default=["forward", "backward"])
    options = parser.parse_args(argv)
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"kinds must be of {', '.join(KINDS)}; got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, causal; ms plain, and times that of the others")
    for operation in options.operation:
        for head_dim in options.head_dim:
            for seqlen in options.seqlen:
                plain, others = measured(operation, head_dim, seqlen, options.kinds)
                told = "  ".join(f"{kind} {ratio:.3f}{per_tile(kind, ratio, seqlen)}" for kind, ratio in others.items())
                print(f"{operation:8} head_dim {head_dim:3} length {seqlen:5}  {plain:7.3f}  {told}", flush=True)


def per_tile(kind: str, ratio: float, length: int) -> str:
    """The ratio for each key tile, in brackets, of kinds with a window."""
    if "window" not in kind:
        return ""
    left = KINDS["window"](1, length)["window"][0] // TILE
    tiles = range(length // TILE)
    return f" ({ratio * sum(tile + 1 for tile in tiles) / sum(min(tile, left) + 1 for tile in tiles):.3f})"


def measured(operation: str, head_dim: int, seqlen: int, kinds: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Milliseconds of the plain call, and the median ratio of each kind."""
    heads = MODEL_DIM // head_dim
    shape = (max(1, TOKENS // seqlen), seqlen, heads, head_dim)
    given = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    calls = {kind: call(operation, given, KINDS[kind](heads, seqlen) if kind else {}) for kind in ("", *kinds)}
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    counts = {kind: max(3, round(MILLISECONDS / milliseconds(one, 3))) for kind, one in calls.items()}
    for _ in range(ROUNDS):
        for kind, one in calls.items():
            times[kind].append(milliseconds(one, counts[kind]))
    ratios = {kind: statistics.median(a / b for a, b in zip(times[kind], times[""], strict=True)) for kind in kinds}
    return statistics.median(times[""]), ratios


def call(operation: str, given: Sequence[torch.Tensor], options: dict[str, Any]) -> Callable[[], object]:
    """What is timed, after it has run twice."""
    q, k, v, d_out = given
    if operation == "forward":
        fixed: dict[str, Any] = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in options.items()}

        def run() -> object:
            return flashgen.attention(q, k, v, causal=True, **fixed)

    else:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        learnable = [value for value in options.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        out = flashgen.attention(leaves[0], leaves[1], leaves[2], causal=True, **options)

        def run() -> object:
            return torch.autograd.grad(out, [*leaves, *learnable], d_out, retain_graph=True)

    run(), run()
    return run


def milliseconds(run: Callable[[], object], count: int) -> float:
    """Of one of so many calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / count


if __name__ == "__main__":
    main()
