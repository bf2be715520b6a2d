"""Packed sequences that kernels are judged on: of all lengths, some of them 0 or 1, with NaN in all memory that belongs to none."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.numerics.sequences import sequences_of
from flashgen.verification.expected import Expected

GUARD = 512  # elements before and behind each tensor
WILD = 0x7FFFFFF0  # what boundaries have beside them
MAX_PAIRS = 2**24  # of all heads
LONGEST = 3000
MIN_ROWS = 200  # that see keys: a root mean square over a handful of rows is a coin flip


def _problem(dtype: Dtype, head_dim: int, head_dim_v: int, mask: Mask, *modifiers: str) -> Problem:
    return Problem(dtype, head_dim, head_dim_v, mask, modifiers=modifiers, sequences=Sequences.PACKED)


BF16, FP16, FULL, CAUSAL = Dtype.BF16, Dtype.FP16, Mask.FULL, Mask.CAUSAL
# Few, as each is a kernel to compile: two kernels a problem, one of each family.
PROBLEMS = (
    *(_problem(dtype, d, d, mask) for dtype, d in ((BF16, 64), (BF16, 128), (FP16, 128)) for mask in Mask),
    *(_problem(BF16, d, d_v, CAUSAL) for d, d_v in ((192, 128), (256, 256), (80, 80), (8, 24))),
    _problem(FP16, 64, 64, FULL, "window"),
    _problem(BF16, 64, 64, CAUSAL, "alibi"),
    _problem(BF16, 128, 128, FULL, "chunk"),
    _problem(BF16, 128, 128, CAUSAL, "sinks"),
    _problem(BF16, 64, 64, CAUSAL, "prefix_len"),
    _problem(FP16, 128, 128, CAUSAL, "softcap", "window"),
)


@dataclass(frozen=True)
class PackedCase:
    """lengths: of queries and keys of each sequence; unused: of them, how many come behind those that are used, None without `seqused`.

    outside: tokens of q and of k before the first sequence, and behind the last one; expected: whether the longest lengths are told, or
    too short ones; apart: whether rows and heads have gaps between them
    """

    name: str
    problem: Problem
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    unused: tuple[tuple[int, int], ...] | None
    outside: tuple[tuple[int, int], tuple[int, int]]
    expected: str
    apart: bool
    scale: float
    magnitude: float
    seed: int

    @property
    def tokens(self) -> tuple[int, int]:
        """Of q and of k."""
        first, second = (sum(lengths[side] for lengths in self.lengths) + sum(some[side] for some in self.outside) for side in range(2))
        return first, second

    @property
    def workload(self) -> Workload:
        """With what a call is told of lengths."""
        longest = [max(lengths) for lengths in zip(*self.lengths, strict=True)]
        told = {"told": longest, "short": [-(-one // 3) for one in longest], "unknown": list(self.tokens)}[self.expected]
        tokens_q, tokens_kv = self.tokens
        sizes = len(self.lengths), *self.heads, min(told[0], tokens_q), min(told[1], tokens_kv)
        workload = Workload(*sizes, tokens_q=tokens_q, tokens_kv=tokens_kv)
        return with_sizes_to_verify(self.problem, workload, self.seed % 13)

    def boundaries(self, side: int) -> list[int]:
        """Of queries, 0, or keys, 1."""
        return list(accumulate((lengths[side] for lengths in self.lengths), initial=self.outside[0][side]))

    def make(self, device: str) -> Tensors:
        """The tensors; what no sequence uses is NaN, as what is written is. The same on each call with the same device type."""
        generator = torch.Generator(device).manual_seed(self.seed)
        drawn = Tensors.random(self.problem, self.workload, generator)
        given = {name: drawn[name] for name in drawn if name not in ("seqused_q", "seqused_kv")}
        for side, name in enumerate(("q", "kv")):
            given[f"cu_seqlens_{name}"] = guarded_ints(self.boundaries(side), device)
            if self.unused is not None:
                used = [lengths[side] - left[side] for lengths, left in zip(self.lengths, self.unused, strict=True)]
                given[f"seqused_{name}"] = guarded_ints(used, device)
        ones = sequences_of(given)
        for name in (name for name in ("q", "k", "v", "d_out") if name in drawn):
            values, given[name] = drawn[name], guarded(drawn[name].shape, drawn[name].dtype, device, 24 if self.apart else 0)
            for one in ones:
                tokens = one.keys if name in ("k", "v") else one.queries
                given[name][tokens] = values[tokens] * (self.magnitude if name == "q" else 1.0)
        for name, tensor in drawn.outputs.items():
            if tensor.ndim == 3 or name == "lse":
                given[name] = guarded(tensor.shape, tensor.dtype, device)
        made = Tensors(self.problem, self.workload, given)
        made.derive({"scale": self.scale})
        return made

    def judge(self, tensors: Tensors) -> Verdict:
        """What the rule says of all rows."""
        return Expected.of(tensors, {"scale": self.scale}).judge(tensors)

    def rejections(self, tensors: Tensors) -> list[str]:
        """Why what a kernel wrote is rejected: by the rule, or because memory beside it was written."""
        verdict = self.judge(tensors)
        outside = {name: written_outside(tensor) for name, tensor in tensors.outputs.items()}
        return [
            *([] if verdict.ok else [verdict.message]),
            *(f"{count} elements written outside {name}" for name, count in outside.items() if count),
        ]


def guarded(shape: Sequence[int], dtype: torch.dtype, device: str, gap: int = 0) -> Tensor:
    """A tensor of NaN in a buffer of NaN. gap: elements between its rows, and between its heads."""
    *outer, last = shape
    strides, step = [1], last + (gap if len(outer) > 1 else 0)
    for size in reversed(outer):
        strides.insert(0, step)
        step = step * size + gap
    buffer = torch.full((step + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
    return buffer.as_strided(tuple(shape), tuple(strides), GUARD)


def written_outside(tensor: Tensor) -> int:
    """How many elements of a guarded tensor's buffer beside it are no longer NaN."""
    buffer = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return int((~buffer.isnan()).sum()) - int((~tensor.isnan()).sum())


def guarded_ints(values: Sequence[int], device: str) -> Tensor:
    """An int32 tensor between numbers that are no boundaries."""
    beside = [WILD, -WILD]
    return torch.tensor([*beside, *values, *beside], dtype=torch.int32, device=device)[2 : 2 + len(values)]


def random_packed_cases(count: int, seed: int) -> list[PackedCase]:
    """`count` cases; the same for the same arguments. All problems come up, one after the other."""
    rng = random.Random(seed)
    return [_random_case(rng, index) for index in range(count)]


def _random_case(rng: random.Random, index: int) -> PackedCase:
    problem = PROBLEMS[index % len(PROBLEMS)]
    batch, heads_kv, group = rng.choice((1, 2, 3, 5, 16, 70)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4, 5))
    equal = rng.random() < 0.5  # as many queries as keys
    longest = LONGEST if batch < 10 else 300
    lengths = [_lengths(rng, longest, equal) for _ in range(batch)]
    while sum(q * kv for q, kv in lengths) * heads_kv * group > MAX_PAIRS:
        lengths = [(q - q // 3, kv - kv // 3) for q, kv in lengths]
    unused = [(_part(rng, q), _part(rng, kv)) for q, kv in lengths] if rng.random() < 0.5 else None
    while _rows(lengths, unused) * heads_kv * group < MIN_ROWS:  # short sequences get others beside them
        lengths.append((rng.randint(1, 90), rng.randint(90, 150)))
        if unused is not None:
            unused.append((0, rng.randint(0, 9)))
    before, behind = ((rng.choice((0, 0, 1, 40)), rng.choice((0, 0, 1, 70))) for _ in range(2))
    expected, apart = rng.choice(("told", "told", "short", "unknown")), rng.random() < 0.5
    scale, magnitude = problem.head_dim**-0.5 * rng.choice((1.0, 1.0, 0.5)), rng.choice((1.0, 1.0, 4.0))
    if problem.modifiers:
        scale, magnitude = problem.head_dim**-0.5, 1.0
    name = f"{index:03d}-{problem.name}-b{batch}-h{heads_kv * group}.{heads_kv}-{expected}{'-used' if unused else ''}"
    sizes = (heads_kv * group, heads_kv), tuple(lengths), None if unused is None else tuple(unused), (before, behind)
    return PackedCase(name, problem, *sizes, expected, apart, scale, magnitude, rng.getrandbits(32))


def _lengths(rng: random.Random, longest: int, equal: bool) -> tuple[int, int]:
    """Of queries and keys: log-uniform, each eighth 0, each eighth 1."""

    def length() -> int:
        kind = rng.random()
        return 0 if kind < 1 / 8 else 1 if kind < 1 / 4 else round(math.exp(rng.uniform(0, math.log(longest))))

    queries = length()
    return queries, queries if equal else length()


def _rows(lengths: Sequence[tuple[int, int]], unused: Sequence[tuple[int, int]] | None) -> int:
    """How many queries see keys, whatever the mask: no more than these come behind the first ones."""
    none = unused or [(0, 0)] * len(lengths)
    return sum(min(q - of_q, kv - of_kv) for (q, kv), (of_q, of_kv) in zip(lengths, none, strict=True))


def _part(rng: random.Random, length: int) -> int:
    """How many tokens of a sequence are not used."""
    return rng.choice((0, 0, min(1, length), length // 3, length))


def with_wrong_values(tensors: Tensors, seed: int, scale: float | None = None) -> Tensors:
    """The tensors with boundaries and used lengths that may be anything, and values in all tokens.

    As often as none of them comes out long enough to be judged by others are drawn, up to a hundred times.
    """
    found = tensors
    for more in range(100):
        found = _wrong(tensors, seed + more)
        lengths = [(one.queries.stop - one.queries.start, one.keys.stop - one.keys.start) for one in sequences_of(found)]
        if _rows(lengths, None) * tensors.workload.heads_q >= MIN_ROWS:
            break
    for name in (name for name in ("q", "k", "v", "d_out") if name in tensors):
        tensors[name].nan_to_num_(0.25)
    found.derive(None if scale is None else {"scale": scale})
    return found


def _wrong(tensors: Tensors, seed: int) -> Tensors:
    rng = random.Random(seed)

    def wrong(tensor: Tensor, tokens: int) -> Tensor:
        kinds = (lambda: rng.randint(-(2**31), 2**31 - 1), lambda: rng.randint(-5, tokens + 5), lambda: rng.choice((-(2**31), 2**31 - 1)))
        return guarded_ints([rng.choice(kinds)() for _ in range(len(tensor))], str(tensor.device))

    found: dict[str, Tensor] = {}
    for side, tokens in (("q", tensors.workload.tokens_q), ("kv", tensors.workload.tokens_kv)):
        found |= {name: wrong(tensors[name], tokens) for name in (f"cu_seqlens_{side}", f"seqused_{side}") if name in tensors}
    return replace(tensors, by_name={**tensors.by_name, **found})
