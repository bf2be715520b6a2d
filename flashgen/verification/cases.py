"""The workloads that verification runs: awkward shapes, and cases whose tensors are made for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from flashgen.codegen.problem import Dtype, Sequences
from flashgen.codegen.workload import Workload, equal_lengths

from ..launch.tensors import Tensors
from ..numerics.sequences import equal_sequences

# (batch, heads_q, heads_kv, len_q, len_kv): lengths of one, off by one from tiles, more queries than keys (rows that see no
# key under a causal mask), no keys, grouped and single key/value heads, many tiles; one key that the last query of a tile alone sees, and
# one that its first query alone does not, each in a step of its own. Each has rows enough for the rule's statistics.
SHAPES = (
    (8, 16, 16, 1, 1),
    (2, 4, 2, 131, 197),
    (1, 2, 1, 130, 33),
    (1, 8, 1, 63, 65),
    (3, 2, 2, 127, 129),
    (8, 16, 2, 1, 1025),
    (1, 2, 1, 300, 0),
    (4, 8, 8, 1025, 1),
    (2, 6, 3, 255, 257),
    (1, 1, 1, 641, 642),
    (1, 1, 1, 642, 640),
    (1, 4, 4, 1000, 1531),
    (1, 2, 1, 2048, 2048),
)
SCREENING = (SHAPES[1], SHAPES[2])
PAGE_SIZE = 48  # of caches: no power of two
ROWS = 128  # enough for the rule's statistics
# Cases whose tensors are made for them: nearly equal probabilities of so many keys, whose sum has to be kept more exactly than fp32 adds
# it up; scores of which some are huge; values so large that the rule grants no noise; tensors past 2^31 elements, on the CPU alone.
LONG, HUGE, COARSE, FAR = (1, 1, 1, 16, 65536), (2, 4, 2, 131, 500), (1, 2, 1, 131, 1000), (2, 2, 1, 131, 197)
_MAGNITUDE = {Dtype.BF16: 2.0**40, Dtype.FP16: 2.0**13}  # of HUGE
_MOST_E4M3 = 448.0
_OFFSET = {Dtype.BF16: 190.0, Dtype.FP16: 1500.0}  # of COARSE: neighbours are 1 apart, and 0.3 more rounds away


def grouped_workload(
    shape: tuple[int, int, int, int, int], group_unit: int, layout: Sequences = Sequences.DENSE, more: int = 0
) -> Workload:
    """A workload of that shape, with as many query heads as make its groups a multiple of `group_unit`: see `Family.group_unit`.

    Packed sequences have the tokens of the whole batch. more: that many further ones share these, and so most of them are shorter; where
    there are few keys there are more of them, too, so that enough rows see some. Caches have pages that no sequence has, and with `more`
    several pages for a sequence; without, one
    """
    batch, heads_q, heads_kv, len_q, len_kv = shape
    sizes = heads_kv * math.lcm(heads_q // heads_kv, group_unit), heads_kv, len_q, len_kv
    if layout is Sequences.DENSE:
        return Workload(batch, *sizes)
    if layout is Sequences.CACHED:
        page = PAGE_SIZE if more else max(1, len_kv)
        pages = -(-len_kv // page)
        return Workload(batch, *sizes[:3], pages * page, pages=batch * max(1, pages) + 1, page_size=page, table_pages=pages)
    seeing = batch * min(len_q, len_kv) * heads_q if more else ROWS
    times = -(-ROWS // max(1, seeing)) if len_kv else 1
    return Workload(batch * times + more, *sizes, tokens_q=batch * len_q, tokens_kv=batch * times * len_kv)


def as_dense(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors with packed sequences that are equally long, and views of these as dense ones, by which cases are made.

    Dense sequences are both.
    """
    if tensors.problem.is_cached:
        return _as_dense_cache(tensors)
    if not tensors.problem.is_packed:
        return tensors, tensors
    w = tensors.workload
    equal = tensors.without_optional_inputs().replacing(**equal_sequences(tensors, w))
    views = {name: tensor.unflatten(0, (w.batch, -1)) for name, tensor in equal.items() if name in ("q", "k", "v")}
    dense = replace(tensors.problem, sequences=Sequences.DENSE)
    return equal, Tensors(dense, replace(w, tokens_q=0, tokens_kv=0), views)


def _as_dense_cache(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The same of a cache with one page for each sequence: these have all keys of it."""
    w = tensors.workload
    lengths = torch.full_like(tensors["cache_seqlens"], w.len_kv)
    equal = tensors.without_optional_inputs().replacing(cache_seqlens=lengths)
    views = {"q": equal["q"], **{name: equal[name][: w.batch] for name in ("k", "v")}}
    if tensors.problem.dtype_kv is not None:  # PyTorch does not compute with such elements: cases are made of q's, and rounded
        views |= {name: views[name].to(equal["q"].dtype) for name in ("k", "v")}
    return equal, Tensors(replace(tensors.problem, sequences=Sequences.DENSE, dtype_kv=None), equal_lengths(w), views)


def take_keys(tensors: Tensors, dense: Tensors) -> None:
    """Puts keys and values of `as_dense` where they come from, if they are no views."""
    if tensors.problem.dtype_kv is not None:
        for name in ("k", "v"):
            tensors[name][: len(dense[name])].copy_(dense[name].clamp(-_MOST_E4M3, _MOST_E4M3))


_Special = tuple[float, list[Sequence[int]]]  # what q was multiplied by, and groups of queries, each judged by itself


def _nearly_equal(tensors: Tensors, _dtype: Dtype) -> _Special:
    """Gives a row's keys one score, but for those that it sees first, which a kernel takes for the maximum: they are a little higher.

    The additions of one number round to the same side again and again. Which side depends on the row: each has other scores. They are
    such that log-sum-exps are small, where fp32 grants little noise.
    """
    (_, len_q, _, head_dim), len_kv = tensors["q"].shape, tensors["k"].shape[1]
    tensors["q"].copy_((1 + torch.arange(len_q) / 128)[None, :, None, None])
    tensors["k"].fill_(-math.log(len_kv) * head_dim**-0.5)
    tensors["k"][:, -2 * len_q :] *= 0.95
    return 1.0, [range(len_q)]


def _huge(tensors: Tensors, dtype: Dtype) -> _Special:
    """Gives every third row scores that have to be shifted before they are scaled, next to rows of ordinary ones.

    All scores are sums of whole numbers, which are exact in any order: two of them are the same, or so far apart that one has all the
    probability. Those of the second batch are below 0. Of the first key/value head, keys that come last have ordinary scores in all rows.
    """
    q, k, magnitude = tensors["q"], tensors["k"], _MAGNITUDE[dtype]
    q.round_()
    k.round_()
    q[1].abs_()
    k[1].abs_().neg_()
    q[:, ::3] *= magnitude
    k[:, : k.shape[1] // 3, 0] /= magnitude
    queries = range(q.shape[1])
    return magnitude, [queries[::3], [query for query in queries if query % 3]]


def _coarse(tensors: Tensors, dtype: Dtype) -> _Special:
    """Moves values to where the rule is strictest: it grants the rounding of the output alone."""
    tensors["v"].add_(_OFFSET[dtype])
    return 1.0, [range(tensors["q"].shape[1])]


def _far(tensors: Tensors, _dtype: Dtype) -> _Special:
    """Of tensors that `Screen` lays far apart."""
    return 1.0, [range(tensors.workload.len_q)]


SPECIAL = {LONG: _nearly_equal, HUGE: _huge, COARSE: _coarse, FAR: _far}
