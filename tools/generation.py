"""Generates tokens with a decoder of the shape of Llama 3 8B, with each of several attentions, and tells tokens per second.

    python -m tools.generation
    python -m tools.generation --batch 1 --context 65536 --rounds 9
    python -m tools.generation --small

Needs a GPU but for --small: one layer on a CPU, by the emulator if FLASHGEN_CPU=1 (else without flashgen), all of it in seconds.

Random weights, bf16: hidden size 4096, 32 query heads on 8 key/value heads of 128, MLP 14336, vocabulary 128256, 32 layers. A step takes
one token of each sequence through all layers to logits, captured in a CUDA graph; each attention in turn replays its own, in rounds of
mixed order (flashgen/timing/protocol.py). What differs is what a layer does with q, k and v of the new tokens:

    flashgen        flashgen.attention_with_kvcache: rotates, appends and attends, lengths on the device
    flash, cudnn    rotary embedding and append as one function under torch.compile, then scaled_dot_product_attention with enable_gqa on
                    views of the caches of exactly so many keys, which a graph fixes

All start from the same keys, and the logits of the first step are compared: the largest difference to flash's, over their norm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen
from flashgen.timing.protocol import CudaStopwatch, interleaved

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
STEPS = 4  # of a round
SPARE = 64  # keys that a cache has room for beyond the context


@dataclass(frozen=True)
class Shape:
    """Of the decoder."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    mlp: int = 14336
    vocabulary: int = 128256


SMALL = Shape(layers=1, hidden=64, heads=4, heads_kv=2, head_dim=16, mlp=128, vocabulary=50)


class Layer(NamedTuple):
    """Weights; qkv and gate_up are of several projections at once."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Caches(NamedTuple):
    """Of all layers, each [layers, batch, length, heads_kv, head_dim]."""

    k: Tensor
    v: Tensor


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer; q, k, v of the new tokens, [batch, 1, heads, head_dim]; gives out


class Decoder:
    """Random weights, and the tables of the rotary embedding."""

    def __init__(self, shape: Shape, batch: int, context: int, device: torch.device) -> None:
        self.shape, self.batch, self.context, self.device = shape, batch, context, device
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16, generator=generator).mul_(sizes[-1] ** -0.5)

        s, width = shape, shape.heads * shape.head_dim
        of_qkv = width + 2 * s.heads_kv * s.head_dim
        self.layers = [
            Layer(drawn(of_qkv, s.hidden), drawn(s.hidden, width), drawn(2 * s.mlp, s.hidden), drawn(s.hidden, s.mlp))
            for _ in range(s.layers)
        ]
        self.embedding, self.head = drawn(s.vocabulary, s.hidden).mul_(s.hidden**0.5), drawn(s.vocabulary, s.hidden)
        self.tokens = torch.randint(s.vocabulary, (batch, 1), device=device, generator=generator)
        inverse = 500000.0 ** -(torch.arange(0, s.head_dim, 2, device=device) / s.head_dim)
        angles = torch.arange(context + SPARE, device=device)[:, None] * inverse
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def caches(self) -> Caches:
        """The same keys and values on each call."""
        s, generator = self.shape, torch.Generator(self.device).manual_seed(1)
        sizes = s.layers, self.batch, self.context + SPARE, s.heads_kv, s.head_dim
        return Caches(*(torch.randn(sizes, device=self.device, dtype=torch.bfloat16, generator=generator) for _ in "kv"))

    def step(self, attend: Attend) -> Tensor:
        """Logits of the next tokens, [batch, vocabulary]."""
        s = self.shape
        x = F.embedding(self.tokens, self.embedding)
        for number, layer in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(x, (s.hidden,)), layer.qkv).unflatten(-1, (-1, s.head_dim))
            q, k, v = qkv.split([s.heads, s.heads_kv, s.heads_kv], dim=2)
            x = x + F.linear(attend(number, q, k, v).flatten(2), layer.out)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,)), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(F.rms_norm(x[:, 0], (s.hidden,)), self.head)


def by_flashgen(decoder: Decoder) -> Attend:
    """One call a layer."""
    caches = decoder.caches()
    lengths = torch.full((decoder.batch,), decoder.context, dtype=torch.int32, device=decoder.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flashgen.attention_with_kvcache(
            q,
            caches.k[layer],
            caches.v[layer],
            k,
            v,
            cache_seqlens=lengths,
            rotary_cos=decoder.cos,
            rotary_sin=decoder.sin,
            rotary_interleaved=False,
            causal=True,
        )
        return out

    return attend


def by_sdpa(decoder: Decoder, compiled: bool) -> Attend:
    """The backend is for the caller to choose. Caches lie as SDPA has them: heads before keys."""
    caches = Caches(*(cache.transpose(2, 3).contiguous() for cache in decoder.caches()))
    context, cos, sin = decoder.context, decoder.cos[decoder.context].float(), decoder.sin[decoder.context].float()

    def rotated(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def rotate_and_append(q: Tensor, k: Tensor, v: Tensor, k_at: Tensor, v_at: Tensor) -> Tensor:
        k_at.copy_(rotated(k)[:, 0])
        v_at.copy_(v[:, 0])
        return rotated(q).transpose(1, 2)

    prepare = torch.compile(rotate_and_append) if compiled else rotate_and_append

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = caches.k[layer], caches.v[layer]
        q = prepare(q, k, v, k_cache[:, :, context], v_cache[:, :, context])
        keys, values = (cache[:, :, : context + 1] for cache in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2)

    return attend


class Steps:
    """A captured step that can be timed."""

    def __init__(self, stopwatch: CudaStopwatch, step: Callable[[], object]) -> None:
        self._stopwatch, self._replay = stopwatch, stopwatch.graph(step)

    def seconds(self) -> float:
        """Of a step."""
        return self._stopwatch.seconds(lambda: [self._replay() for _ in range(STEPS)]) / STEPS


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192, help="keys of each sequence before the step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="rotary embedding and append of the others without torch.compile")
    parser.add_argument("--small", action="store_true", help="a small decoder on the CPU, not timed")
    options = parser.parse_args(argv)
    if not options.small and not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none: --small runs without one")
    with torch.no_grad():
        (compare if options.small else measure)(options)


def compare(options: argparse.Namespace) -> None:
    """The logits of a small decoder."""
    decoder = Decoder(SMALL, 2, 40, torch.device("cpu"))
    wanted = decoder.step(by_sdpa(decoder, compiled=False)).float()
    if os.environ.get("FLASHGEN_CPU") == "1":
        print(f"flashgen: {difference(decoder.step(by_flashgen(decoder)), wanted):.1e} from SDPA")


def measure(options: argparse.Namespace) -> None:
    """Tokens per second of each attention, and flashgen's over the best other one's."""
    decoder, stopwatch = Decoder(Shape(), options.batch, options.context, torch.device("cuda")), CudaStopwatch()
    timed: dict[str, Steps] = {}
    logits: dict[str, Tensor] = {}
    attend = by_flashgen(decoder)
    logits["flashgen"], timed["flashgen"] = decoder.step(attend).float(), Steps(stopwatch, lambda: decoder.step(attend))
    other = by_sdpa(decoder, compiled=not options.eager)
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            logits[name], timed[name] = decoder.step(other).float(), Steps(stopwatch, lambda: decoder.step(other))
    seconds = interleaved(timed, options.rounds, seed=0)
    for name, rounds in seconds.items():
        median = statistics.median(rounds)
        apart = difference(logits[name], logits["flash"])
        print(f"{name:10} {median * 1e3:8.3f} ms a step {options.batch / median:9.1f} tokens/s  logits {apart:.1e} from flash's")
    others = {name: statistics.median(rounds) for name, rounds in seconds.items() if name != "flashgen"}
    best = min(others, key=others.__getitem__)
    ratios = sorted(other / own for other, own in zip(seconds[best], seconds["flashgen"], strict=True))
    print(f"flashgen / {best}: {statistics.median(ratios):.3f} x [{ratios[0]:.3f}..{ratios[-1]:.3f}]")


def difference(logits: Tensor, wanted: Tensor) -> float:
    """The largest, over the root mean square of what is wanted."""
    return float((logits.float() - wanted).abs().max() / wanted.square().mean().sqrt())


if __name__ == "__main__":
    main()
