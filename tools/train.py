"""Trains a small Llama with each of three attentions, from the same weights and on the same text, and compares their losses.

    python tools/train.py
    python tools/train.py --seeds 1 --steps 50
    python tools/train.py --memory
    python tools/train.py --small

Needs transformers, and a GPU but for --small: 2 layers, 64 tokens, 3 steps, on a CPU with SDPA's math in place of what needs a GPU, and of
flashgen unless FLASHGEN_CPU=1. The model has 12 layers, hidden size 768, 12 heads of 64, random fp32 weights, and runs under bf16 autocast.
Attention comes in through transformers' AttentionInterface: flashgen, and SDPA's flash and efficient backends.

For each seed and attention: the first loss, the mean of the last 10, the fall, the median time of a step. Then the medians over the steps
of |flashgen - flash| and |flash - efficient|, which is what rounding alone does to a loss, and their ratio, which must be at most 2. Beside
it, what a second run of flash differs by from the first, whose atomic additions come in another order: less than that means nothing.
--memory: what one forward and backward pass of attention alone allocates at its peak, beside its inputs and d_out, in MiB; flashgen's
over flash's must be at most 1.1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen

VOCABULARY, SUCCESSORS = 256, 4
LAST = 10  # steps whose mean loss is told
WARM_UP = 20  # steps
# Low, so that steps do not multiply what rounding does: at 6e-4 two runs of flash differ as much as two backends, and ratios of seeds by 2.
LEARNING_RATE = 1e-4
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
NAMES = ("flashgen", *BACKENDS)
EMULATED = os.environ.get("FLASHGEN_CPU") == "1"
RATIO_ALLOWED, MEMORY_ALLOWED = 2.0, 1.1
# (batch, query heads, key/value heads, length, head dim): 16384 tokens
SHAPES = [
    (16384 // s, *heads, s, d) for d, heads in ((64, (32, 32)), (128, (16, 16)), (256, (8, 8)), (128, (32, 4))) for s in (2048, 8192, 16384)
]


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = arguments(argv)
    if not options.small and not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none: --small runs without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.memory:
        sys.exit(compare_memory(device))
    register()
    sys.exit(compare_losses(options, device))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. What --small makes small may be given all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    for name, usual, small in (("steps", 200, 3), ("batch", 8, 2), ("seqlen", 1024, 64), ("layers", 12, 2)):
        parser.add_argument(f"--{name}", type=int, help=f"default: {usual}; {small} with --small")
        parser.set_defaults(**{f"usual_{name}": (usual, small)})
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "seqlen", "layers"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(options, f"usual_{name}")[options.small])
    for name in ("seeds", "steps", "batch", "seqlen", "layers"):
        if getattr(options, name) < (2 if name == "seqlen" else 1):
            parser.error(f"--{name} must be at least {2 if name == 'seqlen' else 1}; got {getattr(options, name)}")
    if options.memory and options.small:
        parser.error("--memory must stand without --small: it needs a GPU")
    return options


def register() -> None:
    """Makes the three attentions known to transformers, each as `known_as` says."""
    from transformers import AttentionInterface

    for name in NAMES:
        AttentionInterface.register(known_as(name), hook(name))


def known_as(name: str) -> str:
    """The name for transformers, which takes any that has "flash" in it for a package to be loaded."""
    return f"compared_{NAMES.index(name)}"


def hook(name: str) -> Callable[..., tuple[Tensor, None]]:
    """What transformers calls: q, k and v are [batch, heads, length, head_dim]; it wants [batch, length, heads, head_dim] back."""

    def attention(
        module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        assert mask is None, "the text is dense, so that causal is all there is to a mask"
        if torch.is_autocast_enabled(q.device.type):  # rotary embeddings leave q and k in fp32
            q, k, v = (tensor.to(torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
        return compute(name, q, k, v, scaling).transpose(1, 2), None

    return attention


def compute(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of q, k and v in layout bhsd, out lying in memory as bshd. SDPA's backend is chosen by `selected`."""
    if name == "flashgen" and (q.is_cuda or EMULATED):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return flashgen.attention(q, k, v, causal=True, scale=scale, layout="bshd").transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def selected(name: str, device: torch.device) -> AbstractContextManager[None]:
    """The backend of SDPA that a name stands for: where there is none of it, math."""
    if device.type != "cuda":
        return sdpa_kernel(SDPBackend.MATH)
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext()


def text(seed: int, count: int, length: int) -> Tensor:
    """Sequences [count, length] that can be learned: a Markov chain in which each token has four successors, the first half told twice."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randint(VOCABULARY, (VOCABULARY, SUCCESSORS), generator=generator)
    choices = torch.multinomial(torch.tensor([0.6, 0.2, 0.15, 0.05]), count * length, replacement=True, generator=generator)
    choices, tokens = choices.view(count, length), [torch.randint(VOCABULARY, (count,), generator=generator)]
    for i in range(-(-length // 2) - 1):
        tokens.append(successors[tokens[-1], choices[:, i]])
    half = torch.stack(tokens, dim=1)
    return torch.cat([half, half], dim=1)[:, :length]


@dataclass(frozen=True)
class Training:
    """One run: the loss of each step, and how long a step took in ms."""

    losses: list[float]
    step_ms: float

    def line(self, name: str) -> str:
        """For the table."""
        first, last = self.losses[0], statistics.mean(self.losses[-LAST:])
        return f"  {name:10} {first:10.4f} {last:10.4f} {100 * (1 - last / first):7.1f} {self.step_ms:9.2f}"


def train(name: str, seed: int, batches: Tensor, layers: int, device: torch.device) -> Training:
    """Trains on the batches [steps, batch, length], one after the other, from the weights of the seed."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=batches.shape[2], use_cache=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=known_as(name), dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    losses, ends = [], [moment(device)]
    with selected(name, device):
        for tokens in batches.to(device):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            losses.append(loss.detach())
            ends.append(moment(device))
    found = torch.stack(losses).tolist()  # waits for the GPU
    return Training(found, statistics.median(milliseconds(a, b) for a, b in itertools.pairwise(ends)))


def moment(device: torch.device) -> torch.cuda.Event | float:
    """Now: on a GPU an event in its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Between two moments."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return (end - begin) * 1e3
    return float(begin.elapsed_time(end))


def compare_losses(options: argparse.Namespace, device: torch.device) -> int:
    """Prints a table for each seed. 1 if a ratio is past what is allowed."""
    print(f"{where(device)}, {options.layers} layers, batch {options.batch}, length {options.seqlen}, {options.steps} steps")
    begun, failed = time.perf_counter(), False
    for seed in range(options.seeds):
        batches = text(seed, options.steps * options.batch, options.seqlen).view(options.steps, options.batch, options.seqlen)
        print(f"seed {seed}\n  {'attention':10} {'first loss':>10} {'last loss':>10} {'fall %':>7} {'ms a step':>9}")
        runs = {}
        for name in NAMES:
            runs[name] = train(name, seed, batches, options.layers, device)
            print(runs[name].line(name), flush=True)
        again = train("flash", seed, batches, options.layers, device)
        ours, theirs, itself = (apart(runs["flash"], other) for other in (runs["flashgen"], runs["efficient"], again))
        failed |= device.type == "cuda" and not ours <= RATIO_ALLOWED * theirs
        ratio = f"{ours / theirs:.2f}" if theirs else "none"  # on a CPU, flash and efficient are the same
        print(f"  median |flashgen - flash| {ours:.3e}, |flash - efficient| {theirs:.3e}, ratio {ratio}, allowed {RATIO_ALLOWED}")
        print(f"  median |flash - flash run again| {itself:.3e}")
    print(f"{'FAILED' if failed else 'ok'}, {time.perf_counter() - begun:.0f} s")
    return int(failed)


def apart(one: Training, other: Training) -> float:
    """The median over the steps of the difference of two runs' losses."""
    return statistics.median(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def compare_memory(device: torch.device) -> int:
    """Prints a line for each shape. 1 if a ratio is past what is allowed."""
    print(f"{where(device)}, bf16, causal\n{'B':>3} {'heads':>6} {'S':>6} {'d':>4} {'flashgen MiB':>13} {'flash MiB':>10} {'ratio':>6}")
    failed = False
    for shape in SHAPES:
        batch, heads, kv_heads, length, width = shape
        ours, theirs = (peak_bytes(name, shape, device) for name in ("flashgen", "flash"))
        failed |= not ours <= MEMORY_ALLOWED * theirs
        row = f"{batch:3} {f'{heads}/{kv_heads}':>6} {length:6} {width:4} {ours / 2**20:13.1f} {theirs / 2**20:10.1f} {ours / theirs:6.3f}"
        print(row, flush=True)
    print(f"{'FAILED' if failed else 'ok'}, allowed {MEMORY_ALLOWED}")
    return int(failed)


def peak_bytes(name: str, shape: tuple[int, int, int, int, int], device: torch.device) -> int:
    """What a forward and backward pass allocates at its peak. Tensors lie as in a model, with heads inside of lengths."""
    batch, heads, kv_heads, length, width = shape

    def normal(heads: int) -> Tensor:
        return torch.randn(batch, length, heads, width, dtype=torch.bfloat16, device=device).transpose(1, 2)

    q, k, v, d_out = (normal(h).requires_grad_(i < 3) for i, h in enumerate((heads, kv_heads, kv_heads, heads)))
    with selected(name, device):
        for _ in range(2):  # the first time compiles, and allocates what stays
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gradients = torch.autograd.grad(compute(name, q, k, v), (q, k, v), d_out)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del gradients
    return peak


def where(device: torch.device) -> str:
    """The device, for the heading."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    return f"CPU, with {'flashgen in the emulator' if EMULATED else 'math in place of flashgen'}, and math in place of flash and efficient"


if __name__ == "__main__":
    main()
