"""When the kernels of a training step of attention run, captured as one CUDA graph: whether anything waits between them.

    python tools/graph_gaps.py
    python tools/graph_gaps.py --head-dim 256 --seqlen 8192

Needs a GPU. Forward and backward pass of `flashgen.attention` (bf16, causal, 2048 / head_dim heads) are captured as one graph and
replayed under PyTorch's profiler. A line for each kernel: how long it ran, and when it began after the kernel before had ended;
less than 0 where they overlap, as programmatic dependent launch allows. Medians over the replays, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch
from torch._C._autograd import DeviceType

import flashgen

REPLAYS = 20


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, causal, batch {options.batch}, length {options.seqlen}")
    for head_dim in options.head_dim:
        print(f"head_dim {head_dim}\n  {'us':>8} {'after us':>9}  kernel")
        for name, took, after in measured(step(options.batch, options.seqlen, head_dim)):
            print(f"  {took:8.1f} {'' if after is None else f'{after:.1f}':>9}  {name}")


def step(batch: int, seqlen: int, head_dim: int) -> torch.cuda.CUDAGraph:
    """A graph of one forward and backward pass."""
    shape = (batch, seqlen, max(1, 2048 // head_dim), head_dim)
    q, k, v, d_out = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_(i < 3) for i in range(4))

    def once() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flashgen.attention(q, k, v, causal=True, layout="bshd"), (q, k, v), d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first calls compile, load, and fill what is kept from call to call
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.gradients = once()  # type: ignore[attr-defined]  # they live as long as the graph that writes them
    return graph


def measured(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float | None]]:
    """Name, duration, and distance to the end of the kernel before, of each kernel of the graph in the order in which they begin."""
    graph.replay()
    torch.cuda.synchronize()
    replays = []
    for _ in range(REPLAYS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
        replays.append(sorted(events, key=lambda event: event.time_range.start))
    names = [event.name for event in replays[0]]
    same = [replay for replay in replays if [event.name for event in replay] == names]
    found: list[tuple[str, float, float | None]] = []
    for i, name in enumerate(names):
        took = statistics.median(replay[i].time_range.elapsed_us() for replay in same)
        after = statistics.median(replay[i].time_range.start - replay[i - 1].time_range.end for replay in same) if i else None
        found.append((name, took, after))
    return found


if __name__ == "__main__":
    main()
