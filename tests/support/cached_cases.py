"""Sequences in a cache that kernels are judged on: of all lengths, in pages of all sizes, with NaN in all memory that belongs to none."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.codegen.expressions.functions import functions_of
from flashgen.codegen.modifier import reads_scores, with_sizes_to_verify
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.caches import poison_unused
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.packed_cases import MIN_ROWS, WILD, guarded, guarded_ints, written_outside

MAX_PAIRS = 2**24  # of all heads
LONGEST = 3000
WRONG_ENTRIES = (-1, WILD, -WILD, 2**31 - 1, -(2**31))


def _problem(dtype: Dtype, head_dim: int, head_dim_v: int, mask: Mask, *modifiers: str) -> Problem:
    return Problem(dtype, head_dim, head_dim_v, mask, modifiers=modifiers, sequences=Sequences.CACHED)


# A term by the entry of the batch, the head, the query and the key; and keys that a query sees.
TRACED = name_of_functions(
    functions_of(
        "score: add(score, mul(add(t0:fp32[head, query], t1:fp32[batch, key]), n0:float32)) | "
        "mask: or(eq(mod(add(add(head, query), key), 3), 0), lt(key, t2:int32[batch]))"
    )
)
BF16, FP16, FULL, CAUSAL = Dtype.BF16, Dtype.FP16, Mask.FULL, Mask.CAUSAL
# Few, as each is a kernel to compile for each family.
PROBLEMS = (
    *(_problem(dtype, d, d, mask) for dtype, d, mask in ((BF16, 128, FULL), (BF16, 128, CAUSAL), (FP16, 128, CAUSAL), (BF16, 64, CAUSAL))),
    *(_problem(BF16, d, d_v, CAUSAL) for d, d_v in ((192, 128), (256, 256), (80, 80))),
    _problem(BF16, 8, 24, FULL),
    _problem(BF16, 64, 64, FULL, "chunk"),
    _problem(BF16, 64, 64, CAUSAL, "alibi"),
    _problem(BF16, 128, 128, CAUSAL, "sinks"),
    _problem(FP16, 128, 128, CAUSAL, "softcap", "window"),
    _problem(BF16, 128, 128, CAUSAL, "boolean_mask"),
    _problem(BF16, 64, 64, FULL, "tree_mask"),
    _problem(BF16, 64, 64, CAUSAL, "prefix_len", "window"),
    _problem(FP16, 128, 128, FULL, "bias", TRACED),
)
LAYOUTS = ("rows", "apart", "heads", "slices")


@dataclass(frozen=True)
class CachedCase:
    """lengths: with padding; padding: None without `cache_leftpad`; page_size: None where sequence b has page b alone, without a table.

    table: pages of each sequence, as many for all; pages: of the cache; layout: of the cache: rows of heads one behind the other ("rows"),
    with gaps ("apart"), heads of a page one behind the other ("heads"), or keys and values as slices of one tensor ("slices")
    """

    name: str
    problem: Problem
    heads: tuple[int, int]
    len_q: int
    lengths: tuple[int, ...]
    padding: tuple[int, ...] | None
    page_size: int
    table: tuple[tuple[int, ...], ...] | None
    pages: int
    layout: str
    scale: float
    magnitude: float
    seed: int

    @property
    def workload(self) -> Workload:
        """What a call is told of sizes."""
        table_pages = 1 if self.table is None else len(self.table[0])
        sizes = len(self.lengths), *self.heads, self.len_q, table_pages * self.page_size
        workload = Workload(*sizes, pages=self.pages, page_size=self.page_size, table_pages=table_pages)
        return with_sizes_to_verify(self.problem, workload, self.seed % 13)

    def make(self, device: str) -> Tensors:
        """The tensors; what no sequence uses is NaN, as what is written is. The same on each call with the same device type."""
        drawn = Tensors.random(self.problem, self.workload, torch.Generator(device).manual_seed(self.seed))
        of_cache = ("block_table", "cache_leftpad", "k", "v")
        given = {name: drawn[name] for name in drawn if name not in of_cache}
        given["cache_seqlens"] = guarded_ints(self.lengths, device)
        if self.padding is not None:
            given["cache_leftpad"] = guarded_ints(self.padding, device)
        if self.table is not None:
            given["block_table"] = guarded_table(self.table, device)
        for name, tensor in zip(("k", "v"), _pools(drawn["k"], drawn["v"], self.layout), strict=True):
            given[name] = tensor.copy_(drawn[name])
        given["q"] = guarded(drawn["q"].shape, drawn["q"].dtype, device, 24 if self.layout == "apart" else 0).copy_(drawn["q"])
        given["q"].mul_(self.magnitude)
        for name, tensor in drawn.outputs.items():
            given[name] = guarded(tensor.shape, tensor.dtype, device)
        made = Tensors(self.problem, self.workload, given)
        poison_unused(made)
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


def _pools(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Tensors of NaN of the shapes of k and v."""
    device = str(k.device)
    if layout == "slices":
        *outer, _ = k.shape
        both = guarded((*outer, 2, max(k.shape[-1], v.shape[-1])), k.dtype, device)
        return both[..., 0, : k.shape[-1]], both[..., 1, : v.shape[-1]]
    if layout == "heads":
        by_head = [(pages, heads, rows, width) for pages, rows, heads, width in (k.shape, v.shape)]
        k, v = (guarded(shape, k.dtype, device).transpose(1, 2) for shape in by_head)
        return k, v
    k, v = (guarded(one.shape, one.dtype, device, 24 if layout == "apart" else 0) for one in (k, v))
    return k, v


def guarded_table(table: Sequence[Sequence[int]], device: str) -> Tensor:
    """An int32 tensor of these rows, with numbers before, between and behind them that are no pages."""
    width = len(table[0])
    rows = [[*row, WILD, -WILD, -1] for row in table]
    flat = torch.tensor([WILD, -1, *(entry for row in rows for entry in row), WILD], dtype=torch.int32, device=device)
    return flat.as_strided((len(table), width), (width + 3, 1), 2)


def random_cached_cases(count: int, seed: int, longest: int = LONGEST, pairs: int = MAX_PAIRS) -> list[CachedCase]:
    """`count` cases; the same for the same arguments. All problems come up, one after the other."""
    rng = random.Random(seed)
    return [_random_case(rng, index, longest, pairs) for index in range(count)]


def _random_case(rng: random.Random, index: int, longest: int, pairs: int) -> CachedCase:
    problem = PROBLEMS[index % len(PROBLEMS)]
    batch, heads_kv, group = rng.choice((1, 2, 3, 5, 16, 70)), rng.choice((1, 2, 3, 8)), rng.choice((1, 1, 2, 4, 5, 8))
    len_q = rng.choice((1, 1, 1, 2, 3, 5, 16, 70, 300))
    heads = heads_kv * group
    lengths = [_length(rng, longest) for _ in range(batch)]
    all_have_room = reads_scores(problem)  # tensors have elements of all keys that a sequence has room for
    while (len(lengths) * max(lengths) if all_have_room else sum(lengths)) * len_q * heads > pairs:
        lengths = [length - length // 3 for length in lengths]
        len_q = max(1, len_q - len_q // 3)
    while sum(min(len_q, length) for length in lengths) * heads < MIN_ROWS:  # few sequences get others beside them
        lengths.append(rng.randint(20, 150))
    padding = [rng.choice((0, 1, length // 3, length)) for length in lengths] if rng.random() < 0.3 else None
    if padding is not None:
        padding[-1] = 0  # so that there is a row that sees keys
    page_size, table, pages = _pages(rng, lengths)
    layout = rng.choice(LAYOUTS)
    scale, magnitude = problem.head_dim**-0.5 * rng.choice((1.0, 1.0, 0.5)), rng.choice((1.0, 1.0, 4.0))
    if problem.modifiers:
        scale, magnitude = problem.head_dim**-0.5, 1.0
    kind = f"p{page_size}" if table else "dense"
    name = f"{index:03d}-{problem.name}-b{len(lengths)}-h{heads}.{heads_kv}-q{len_q}-{kind}-{layout}{'-pad' if padding else ''}"
    sizes = (heads, heads_kv), len_q, tuple(lengths), None if padding is None else tuple(padding), page_size, table, pages
    return CachedCase(name, problem, *sizes, layout, scale, magnitude, rng.getrandbits(32))


def _length(rng: random.Random, longest: int) -> int:
    """Log-uniform, each eighth 0, each eighth 1."""
    kind = rng.random()
    return 0 if kind < 1 / 8 else 1 if kind < 1 / 4 else round(math.exp(rng.uniform(0, math.log(longest))))


def _pages(rng: random.Random, lengths: Sequence[int]) -> tuple[int, tuple[tuple[int, ...], ...] | None, int]:
    """Keys of a page, the table and how many pages there are: each sequence has pages of its own, or they share the first ones."""
    batch = len(lengths)
    if rng.random() < 0.2:  # one page for each, without a table or with one of one column
        page_size, pages = max(lengths) + rng.choice((0, 1, 50)), batch + rng.choice((0, 3))
        one_each = tuple((page,) for page in rng.sample(range(pages), batch))
        return page_size, rng.choice((None, one_each)), pages
    page_size = rng.choice((1, 2, 16, 48, 64, 100, 128, 256))
    used = [-(-length // page_size) for length in lengths]
    shared = rng.choice((0, 0, 1, 4)) if batch > 1 else 0
    pages = sum(used) + rng.choice((1, 5))
    order = rng.sample(range(pages), pages)
    table_pages = max(1, *used) + rng.choice((0, 0, 1, 7))
    table: list[tuple[int, ...]] = []
    for own in used:
        taken = [order.pop() for _ in range(own)]
        if table and shared:
            both = min(shared, own, used[0])
            taken[:both] = table[0][:both]
        table.append((*taken, *(rng.choice(WRONG_ENTRIES) for _ in range(table_pages - own))))
    return page_size, tuple(table), pages


def with_wrong_values(tensors: Tensors, seed: int) -> Tensors:
    """The tensors with lengths, padding and pages that may be anything, and values in all of the cache.

    As often as too few rows see keys to be judged by others are drawn, up to a hundred times.
    """
    rng, w = random.Random(seed), tensors.workload
    for name in ("k", "v"):
        tensors[name].nan_to_num_(0.25)

    def wrong(limit: int) -> int:
        return rng.choice((rng.randint(-(2**31), 2**31 - 1), rng.randint(-5, limit + 5), -(2**31), 2**31 - 1, limit))

    found: dict[str, Tensor] = {}
    for _ in range(100):
        lengths = [wrong(w.len_kv) for _ in range(w.batch)]
        if sum(min(w.len_q, max(length, 0)) for length in lengths) * w.heads_q >= MIN_ROWS // 2:
            break
    device = str(tensors["q"].device)
    found["cache_seqlens"] = guarded_ints(lengths, device)
    if "cache_leftpad" in tensors:
        found["cache_leftpad"] = guarded_ints([rng.choice((0, 0, wrong(w.len_kv))) for _ in range(w.batch)], device)
    if "block_table" in tensors:
        found["block_table"] = guarded_table([[wrong(w.pages) for _ in range(w.table_pages)] for _ in range(w.batch)], device)
    return tensors.replacing(**found)
