"""Functions that users give as score_mod and mask_mod: those of FlexAttention's papers and posts, and one for each thing that is traced.

`CASES` has them by name. They are for batches, heads, queries and keys below `SIZES`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

BATCH, HEADS, LENGTH = 2, 4, 32
SIZES = {"batch": BATCH, "head": HEADS, "query": LENGTH, "key": LENGTH}
INF = float("inf")
GLOBAL_CAP = 30.0
GLOBAL_WINDOW = 5
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A function. `smooth`: it has no kinks where random scores may lie, so that its derivative is compared."""

    function: Function
    is_mask: bool = False
    smooth: bool = True

    @property
    def argument(self) -> str:
        return "mask_mod" if self.is_mask else "score_mod"


CASES: dict[str, Case] = {}


def _score(function: Function) -> Function:
    CASES[function.__name__] = Case(function)
    return function


def _rough(function: Function) -> Function:
    CASES[function.__name__] = Case(function, smooth=False)
    return function


def _mask(function: Function) -> Function:
    CASES[function.__name__] = Case(function, is_mask=True)
    return function


def _random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _integers(high: int, *sizes: int, dtype: torch.dtype = torch.int32, low: int = 0) -> Tensor:
    return torch.randint(low, high, sizes, generator=torch.Generator().manual_seed(high)).to(dtype)


SLOPES = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)
BATCH_SLOPES = _random(BATCH, HEADS, seed=1).abs()
BIAS = _random(LENGTH, LENGTH, seed=2)
HEAD_BIAS_16 = _random(HEADS, LENGTH, LENGTH, seed=3, dtype=torch.bfloat16)
FULL_BIAS = _random(BATCH, HEADS, LENGTH, LENGTH, seed=4, dtype=torch.float16)
RELATIVE = _random(2 * LENGTH - 1, seed=5)
TABLE = _random(8, HEADS, seed=6)
DOCUMENTS = torch.sort(_integers(4, LENGTH)).values
DOCUMENTS_64 = DOCUMENTS.long()
BATCH_DOCUMENTS = torch.sort(_integers(3, BATCH, LENGTH, dtype=torch.int16)).values
BYTES = _integers(256, LENGTH, dtype=torch.uint8)
SIGNED_BYTES = _integers(128, LENGTH, dtype=torch.int8, low=-128)
PREFIX = _integers(LENGTH, BATCH)
KEPT = _integers(2, BATCH, LENGTH, dtype=torch.bool)
OFFSETS = torch.tensor([0, 7, 20, LENGTH])
BUCKETS = _integers(8, LENGTH, LENGTH)
SCALE = torch.tensor(1.25)


@_score
def identity(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score


@_score
def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - SLOPES[h] * (q - k).abs()


@_score
def alibi_by_formula(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    slope = torch.exp2(-((h + 1) * 8.0 / HEADS))
    return score + (k - q) * slope


@_score
def alibi_of_batch(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + BATCH_SLOPES[b, h] * (k - q)


@_score
def relative_position(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (q - k)


@_score
def relative_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + RELATIVE[q - k + LENGTH - 1]


@_score
def negative_index(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + RELATIVE[-1] + RELATIVE[torch.minimum(q, k) - LENGTH]


@_score
def t5_buckets(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + TABLE[BUCKETS[q, k], h]


@_score
def t5_by_formula(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    distance = torch.clamp(q - k, min=0)
    far = 4 + (torch.log(distance.float().clamp(min=1.0) / 4) / math.log(8) * 4).to(torch.int32)
    bucket = torch.where(distance < 4, distance, torch.minimum(far, torch.full_like(far, 7)))
    return score + TABLE[bucket, h]


@_score
def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + BIAS[q, k]


@_score
def bias_of_heads(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + HEAD_BIAS_16[h][q][k]


@_score
def bias_of_all(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + FULL_BIAS[b, h, q, k]


@_score
def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return GLOBAL_CAP * torch.tanh(score / GLOBAL_CAP)


@_score
def softcap_of_softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return softcap(softcap(score, b, h, q, k) + SLOPES[h], b, h, q, k)


@_score
def temperature(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * torch.log(q + 1.0) / SCALE


@_score
def causal_in_score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, score, -INF)


@_score
def prefix_in_score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where((k <= PREFIX[b]) | (q >= k), score, float("-inf"))


@_score
def checkerboard(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    score = torch.where(torch.abs(k - q) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(k - q) % 2 == 0, score * 2.0, score)


@_score
def in_place(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    score *= 2
    score += SLOPES[h]
    return score


@_score
def sigmoid_gate(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * torch.sigmoid(BIAS[q, h] * score) + torch.special.expit(score) + torch.nn.functional.silu(score)


@_score
def gaussian(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    distance = (q - k).to(torch.float32)
    return score - distance**2 / (2 * 3.5**2) + torch.exp(-0.5 * distance.square())


@_score
def rotary_phase(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    angle = (q - k) * torch.pow(10000.0, -h / HEADS)
    return score + torch.cos(angle) - torch.sin(angle).mul(0.5)


@_score
def powers(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x = score * score + 1
    return x**-0.5 + x**1.7 / 10 + x.sqrt() + torch.rsqrt(x) + (q - 3) ** 2 + x**3 * 0.01 + 2**score + 1.5 ** (score / 2) + x.reciprocal()


@_score
def special_functions(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x = score.abs() + 0.5
    return x.log() + x.log2() + x.log1p() + torch.expm1(score) + torch.erf(score) + score.exp2() + torch.exp(-x)


@_score
def ends(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.maximum(score, BIAS[q, k]) + torch.minimum(score * 0.5, SLOPES[h]) + score.clamp(-1.5, 2) + torch.nn.functional.relu(score)


@_score
def remainders(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (
        score + (q - k) % 5 + (q - k) // 3 + torch.remainder(q - k, -4) + torch.floor_divide(k, 6) + (score % 1.75) + q / 7 + 3 // (k + 1)
    )


@_score
def divisors(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    size = score.abs() + 2
    return (q * 1.0) % size + k / size - (score - q) / (size * size) + torch.remainder(-7.5, size)


@_rough
def rounded(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    steps = torch.floor(score) + score.ceil() + torch.round(score * 2) + torch.trunc(score) + torch.sign(score) + score // 0.75
    return steps + torch.div(q - k, 3, rounding_mode="floor") + score.to(torch.int32)


@_score
def scalars_of_types(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (q > k) * 2 + (q == 3) + True + torch.tensor(0.25) + torch.ones(()) + score.new_zeros(()) + torch.logical_not(q)


@_score
def bytes_wrap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (BYTES[q] + BYTES[k]) + (BYTES[q] - BYTES[k]) * 0.5 + (SIGNED_BYTES[q] * SIGNED_BYTES[k]) + (SIGNED_BYTES[q] + BYTES[k])


@_score
def long_integers(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    far = q.long() * 3_000_000_000 - DOCUMENTS_64[k]
    return score + (far // 1_000_000_000) + (far > 2_000_000_000) + far % 7


@_score
def hashed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x = (q * 1103515245 + k * 12345) ^ (h << 7)
    x = (x ^ (x >> 13)) * 1274126177
    return torch.where((x & 255) < 64, score - 1, score)


@_mask
def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@_mask
def sliding_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k <= GLOBAL_WINDOW) & (q >= k)


@_mask
def symmetric_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs() <= GLOBAL_WINDOW + 2


@_mask
def prefix_lm(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < PREFIX[b]) | (k <= q)


@_mask
def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENTS[q] == DOCUMENTS[k]


@_mask
def other_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENTS[q] != DOCUMENTS[k]


@_mask
def documents_64(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENTS_64[q] == DOCUMENTS_64[k]) & causal(b, h, q, k)


@_mask
def documents_of_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return BATCH_DOCUMENTS[b][q] == BATCH_DOCUMENTS[b][k]


@_mask
def jagged(b: Any, h: Any, q: Any, k: Any) -> Any:
    own = DOCUMENTS[q].clamp(max=2)
    start, end = OFFSETS[own], OFFSETS[own + 1]
    return (start <= k) & (k < end)


@_mask
def padding(b: Any, h: Any, q: Any, k: Any) -> Any:
    return KEPT[b, k] & ~(q < 2)


@_mask
def natten(b: Any, h: Any, q: Any, k: Any) -> Any:
    width, kernel = 8, 3
    q_x, q_y, k_x, k_y = q // width, q % width, k // width, k % width
    centre_x, centre_y = q_x.clamp(kernel // 2, LENGTH // width - 1 - kernel // 2), q_y.clamp(kernel // 2, width - 1 - kernel // 2)
    return ((centre_x - k_x).abs() <= kernel // 2) & ((centre_y - k_y).abs() <= kernel // 2)


@_mask
def dilated_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k).abs() <= 8) & ((q - k) % 2 == 0)


@_mask
def blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.logical_or(torch.div(q, 8, rounding_mode="floor") == k // 8, k < 1)


@_mask
def strided(b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.logical_and(q.ge(k), torch.logical_xor(k % 4 == 0, h.eq(1)))


@_mask
def by_float(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 0.5 < k) & ~(q > 20.5) | torch.isnan(BIAS[q, k]) & torch.isfinite(BIAS[q, k])


@_mask
def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return True


def _sliding(window: int) -> Function:
    return lambda b, h, q, k: q - k <= window


CASES["union_and_intersection"] = Case(or_masks(and_masks(causal, _sliding(4)), prefix_lm), is_mask=True)
CASES["noop"] = Case(noop_mask, is_mask=True)


class Learned(torch.nn.Module):
    """Captures parameters, numbers and functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(_random(HEADS, LENGTH, seed=8))
        self.cap = 12.5
        self.settings = SimpleNamespace(window=3, names=("a", "b"))

    def _soft(self, score: Any) -> Any:
        return self.cap * torch.tanh(score / self.cap)

    def score_mod(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self._soft(score) + self.bias[h, q]

    def mask_mod(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < self.settings.window) | (self.bias[h, k] > 0)


class Called:
    """An object that is a function."""

    def __init__(self, factors: list[float]) -> None:
        self.factors = factors

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i, factor in enumerate(self.factors):
            score = score + factor * (q == i)
        return score


def _with_options(score: Any, b: Any, h: Any, q: Any, k: Any, *, factor: float, table: Tensor, offset: int = 2) -> Any:
    return score * factor + table[h] * (q + offset)


LEARNED = Learned()
CASES["method"] = Case(LEARNED.score_mod)
CASES["mask_method"] = Case(LEARNED.mask_mod, is_mask=True)
CASES["callable_object"] = Case(Called([0.5, -0.25, 1.0]))
CASES["partial"] = Case(functools.partial(_with_options, factor=0.75, table=SLOPES))
CASES["default"] = Case(lambda score, b, h, q, k, table=SLOPES, n=3: score + table[h] * n)


def _nested(causal_only: bool, tables: dict[str, Tensor], steps: int) -> Function:
    def inner(distance: Any) -> Any:
        found = distance * 0.0
        for step in range(steps):
            found = found + tables["slopes"][step % HEADS] * (distance > step)
        return found

    def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if causal_only:
            score = torch.where(q >= k, score, -INF)
        return score + inner((q - k).abs())

    return function


CASES["nested_with_structure"] = Case(_nested(True, {"slopes": SLOPES}, 3))
