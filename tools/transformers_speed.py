"""Times a Llama of transformers with flashgen's attention and with sdpa, as transformers calls it, by turns in one process.

    python tools/transformers_speed.py
    python tools/transformers_speed.py --only prefill --rounds 9
    python tools/transformers_speed.py --small

Needs transformers, and a GPU but for --small: 2 tiny layers, on a CPU by the emulator if FLASHGEN_CPU=1. Random bf16 weights, made on the
GPU: hidden size 4096, MLP 14336, 32 query heads on 8 key/value heads of 128, vocabulary 32000.

    prefill   32 layers, 1 sequence of 8192 tokens, without gradients, logits of the last token
    step      8 layers, 2 sequences of 4096 tokens: loss, gradients, and fused AdamW
    decode    32 layers, a token of each of --batch sequences behind 8192 others in a StaticCache of 8256, as a CUDA graph
    cost      what the adapter takes of the CPU for one attention call, over flashgen.attention

Of the first three: medians, sdpa over flashgen, and how much less time a call takes beside how much less its attention kernels take, as
PyTorch's profiler tells it, in ms.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import flashgen
from flashgen.integrations.transformers import calls, register
from flashgen.integrations.transformers.prepared import PreparedMask
from flashgen.timing.protocol import CudaStopwatch, interleaved

ATTENTION = re.compile("attention|flash|fmha|sdpa|cudnn", re.IGNORECASE)  # of names of kernels; cuDNN does nothing else here
PARTS = ("prefill", "step", "decode", "cost")
STEPS = 8  # of a round of decode
Work = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = arguments(argv)
    if not options.small and not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none: --small runs without one")
    names = {"sdpa": "sdpa", "flashgen": register()}
    for part in options.only or PARTS:
        {"prefill": prefill, "step": training_step, "decode": decode, "cost": cost}[part](options, names)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="one of the parts; may be given several times")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4, help="sequences of decode")
    parser.add_argument("--kernels", type=Path, help="a file for the time of each kernel, one a line")
    return parser.parse_args(argv)


def llama(options: argparse.Namespace, layers: int) -> Any:
    """The model, in the first GPU's memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if options.small:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, num_hidden_layers=2 if options.small else layers, vocab_size=100 if options.small else 32000, max_position_embeddings=16384
    )
    with torch.device("cpu" if options.small else "cuda"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def prefill(options: argparse.Namespace, names: dict[str, str]) -> None:
    """One forward pass."""
    model = llama(options, 32).eval()
    tokens = torch.randint(100, (1, 24 if options.small else 8192), device=model.device)

    def work() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False, logits_to_keep=1)

    compare("prefill", options, {name: Turn(work, with_attention(model, known)) for name, known in names.items()})


def training_step(options: argparse.Namespace, names: dict[str, str]) -> None:
    """Loss, gradients and optimizer."""
    model = llama(options, 8).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(100, (2, 16 if options.small else 4096), device=model.device)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    compare("step", options, {name: Turn(work, with_attention(model, known)) for name, known in names.items()})


def decode(options: argparse.Namespace, names: dict[str, str]) -> None:
    """One token of each sequence, captured in a graph with a cache of its own."""
    from transformers import StaticCache

    model = llama(options, 32).eval()
    context, room = (8, 16) if options.small else (8192, 8256)
    token = torch.randint(100, (options.batch, 1), device=model.device)
    timed: dict[str, Turn] = {}
    for name, known in names.items():
        cache = StaticCache(config=model.config, max_cache_len=room)

        def work(cache: Any = cache) -> None:
            with torch.no_grad():
                model(token, None, None, cache)

        def rewound(cache: Any = cache) -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)

        with_attention(model, known)()
        work()
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        rewound()
        replay = work if options.small else CudaStopwatch().graph(work)

        def steps(replay: Work = replay) -> None:
            for _ in range(STEPS):
                replay()

        timed[name] = Turn(steps, rewound)
    compare(f"decode, {STEPS} steps of {options.batch}", options, timed)


def cost(options: argparse.Namespace, names: dict[str, str]) -> None:
    """Microseconds of the CPU for a call that is enqueued."""
    device, count = ("cpu", 3) if options.small else ("cuda", 2000)
    q, k = (torch.randn(1, heads, 64, 128, dtype=torch.bfloat16, device=device) for heads in (8, 2))
    module, mask = torch.nn.Module(), PreparedMask((1, 1, 64, 64), causal=True)
    dense = [each.transpose(1, 2) for each in (q, k, k)]
    both: dict[str, Work] = {
        "flashgen.attention": lambda: flashgen.attention(*dense, causal=True),
        "flashgen.attention on transposed views": lambda: flashgen.attention(*(each.transpose(1, 2) for each in (q, k, k)), causal=True),
        "adapter": lambda: calls.flashgen_attention(module, q, k, k, mask, dropout=0.0, scaling=128**-0.5, position_ids=None),
    }
    found: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(options.rounds):
        for name, call in both.items():
            with torch.no_grad():
                call()
                synchronize()
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                found[name].append((time.perf_counter() - begin) / count * 1e6)
                synchronize()
    print("cost: " + ", ".join(f"{name} {statistics.median(each):.2f} us" for name, each in found.items()))


def with_attention(model: Any, known: str) -> Work:
    """What gives a model the attention of a name, which takes a while."""
    return lambda: model.set_attn_implementation(known)


class Turn:
    """One call that takes part in a comparison; `prepare` comes before it and is not timed."""

    def __init__(self, work: Work, prepare: Work) -> None:
        self.work = work
        self.prepare = prepare

    def seconds(self) -> float:
        """By the GPU's events, or the clock where there is none."""
        self.prepare()
        synchronize()
        if torch.cuda.is_available():
            return CudaStopwatch().seconds(self.work)
        begin = time.perf_counter()
        self.work()
        return time.perf_counter() - begin


def compare(part: str, options: argparse.Namespace, timed: dict[str, Turn]) -> None:
    """Times calls by turns, and prints what the module's docstring says."""
    for turn in timed.values():
        turn.seconds()
        turn.seconds()
    found = interleaved(timed, options.rounds, seed=0)
    ratios = sorted(a / b for a, b in zip(found["sdpa"], found["flashgen"], strict=True))
    medians = {name: statistics.median(each) * 1e3 for name, each in found.items()}
    kernels = {name: kernel_times(turn, options.kernels, f"{part}, {name}") for name, turn in timed.items()}
    saved, of_kernels = (each["sdpa"] - each["flashgen"] for each in (medians, kernels))
    told = ", ".join(f"{name} {ms:.2f} ms ({kernels[name]:.2f} of attention)" for name, ms in medians.items())
    spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    print(f"{part}: {told}; sdpa / flashgen {spread}; saved {saved:.2f} ms, of attention {of_kernels:.2f}")


def kernel_times(turn: Turn, file: Path | None, title: str) -> float:
    """Milliseconds of all attention kernels of one call."""
    if not torch.cuda.is_available():
        return 0.0
    turn.prepare()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        turn.work()
        synchronize()
    times = sorted(((each.self_device_time_total * 1e-3, each.count, each.key) for each in profiled.key_averages()), reverse=True)
    if file is not None:
        with file.open("a") as out:
            out.writelines(f"{title}: {ms:.3f} ms, {count} times {name[:160]}\n" for ms, count, name in times[:40])
    return float(sum(ms for ms, _, name in times if ATTENTION.search(name)))


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
