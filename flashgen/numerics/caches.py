"""Caches in oracles: which keys are of which sequence, each computed by itself, and what is drawn to be verified.

Tensors: q [batch, len_q, heads_q, head_dim]; k and v [pages, page_size, heads_kv, ..]; cache_seqlens [batch], int32; block_table
[batch, table_pages], int32, without which sequence b has page b alone; cache_leftpad [batch], int32, 0 without. Where elements of k and v
are e4m3 their values are element * descale, of k_descale and v_descale [batch, heads_kv], fp32, 1 without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from flashgen.codegen.modifier import modifier_operands
from flashgen.codegen.operands import Axis
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

from .link import Link, Rows, links_of
from .sequences import Attention

_SPREAD = 64.0  # of drawn lengths: the longest to the shortest, about
_MOST_PADDING = 40  # keys
_NAN_E4M3 = 0x7F


def cached_keys(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For each sequence where its keys are, as kernels see them: int64 page and row within the page, in the order of the keys.

    Lengths and padding are clamped to the keys that there may be, and entries of the table to the pages that there are.
    """
    pages, page_size = tensors["k"].shape[:2]
    table = tensors.get("block_table")
    if table is None:
        table = torch.arange(len(tensors["cache_seqlens"]), device=tensors["k"].device)[:, None]
    most = table.shape[1] * page_size
    table = table.long().clamp(0, max(0, pages - 1))
    ends = [min(max(length, 0), most) for length in tensors["cache_seqlens"].tolist()]
    begins = tensors["cache_leftpad"].tolist() if "cache_leftpad" in tensors else [0] * len(ends)
    found = []
    for entries, begin, end in zip(table, begins, ends, strict=True):
        position = torch.arange(min(max(begin, 0), end), end, device=table.device)
        found.append((entries[position // max(1, page_size)], position % max(1, page_size)))
    return found


def cached_attention(
    attention: Attention, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gives out and lse, or those of a sample, by the attention of one sequence of the batch at a time."""
    q = tensors["q"]
    if sample is not None:
        sample = sample.to(q.device)
    parts: list[tuple[Tensor, Tensor]] = []
    where: list[Tensor] = []
    for number, (page, row) in enumerate(cached_keys(tensors)):
        own = _of_sequence(problem, tensors, len(page))
        links = (*_descales(problem, own, number), *links_of(problem, own, scalars))
        given = {"causal": problem.mask is Mask.CAUSAL, "scale": scalars["scale"], "first_batch": number, "links": links}
        dense = q[number : number + 1], *(tensors[name][page, row][None].to(q.dtype) for name in ("k", "v"))
        if sample is None:
            parts.append(attention(*dense, **given))
            continue
        (rows,) = (sample[:, 0] == number).nonzero(as_tuple=True)
        if len(rows):
            where.append(rows)
            parts.append(attention(*dense, rows=sample[rows] - torch.tensor([number, 0, 0], device=q.device), **given))
    if not parts:
        k, v = (tensors[name][: len(q)].to(q.dtype) for name in ("k", "v"))
        return attention(q, k, v, causal=False, scale=1.0, rows=sample)
    out, lse = (torch.cat(one) for one in zip(*parts, strict=True))
    if sample is None:
        return out, lse
    back = torch.cat(where).argsort()
    return out[back], lse[back]


@dataclass(frozen=True)
class Descales(Link):
    """What makes scores and outputs of elements those of their values: numbers of key/value heads, for keys and for values."""

    of_keys: Tensor
    of_values: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link; of the tensors of one sequence."""
        ones = torch.ones(tensors["k"].shape[2], device=tensors["q"].device)
        return cls(*(tensors.get(f"{name}_descale", ones) for name in ("k", "v")))

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        return s.mul_(self._of_rows(self.of_keys, rows).to(s.dtype))

    def kept(self, rows: Rows) -> Tensor | None:
        """See Link: of P, as it is the same for all keys of a head."""
        return self._of_rows(self.of_values, rows)

    @staticmethod
    def _of_rows(descales: Tensor, rows: Rows) -> Tensor:
        assert rows.heads is not None
        return descales[rows.heads // (rows.heads_q // len(descales))][..., None]


def _descales(problem: Problem, tensors: Mapping[str, Tensor], number: int) -> tuple[Link, ...]:
    """Of a sequence; none where elements are the values."""
    if problem.dtype_kv is None:
        return ()
    of_sequence = {name: tensors[name][number] for name in ("k_descale", "v_descale") if name in tensors}
    return (Descales.of({**tensors, **of_sequence}, {}),)


def _of_sequence(problem: Problem, tensors: Mapping[str, Tensor], keys: int) -> dict[str, Tensor]:
    """The operands of modifiers with as many keys as the sequence has: they count from 0 in each."""
    found = dict(tensors)
    for operand in modifier_operands(problem):
        for dim, axis in enumerate(operand.axes):
            if axis is Axis.LEN_KV and found[operand.name].shape[dim] > 1:
                found[operand.name] = found[operand.name].narrow(dim, 0, keys)
    return found


def drawn_cache(problem: Problem, workload: Workload, generator: torch.Generator) -> dict[str, Tensor]:
    """Lengths, pages and padding of the sequences of a cache, int32 by operand name, and descales; none where there is no cache.

    The first sequence has all keys that it may have, lengths of the others are log-uniform; every eighth has a key, or none. Pages are in
    any order, and no two sequences share one as long as there are enough. Every other sequence is padded.
    """
    if not problem.is_cached:
        return {}
    w, device = workload, generator.device
    drawn = torch.rand(3, w.batch, generator=generator, device=device, dtype=torch.float64)
    lengths = ((drawn[0] * math.log(_SPREAD)).exp() / _SPREAD * w.len_kv).ceil()
    number = torch.arange(w.batch, device=device)
    lengths = torch.where(number % 8 == 3, (drawn[1] * 2).floor(), lengths)
    lengths[:1] = w.len_kv
    lengths = lengths.clamp(max=w.len_kv)
    padding = (drawn[2] * _MOST_PADDING).floor().minimum((lengths / 3).floor()).masked_fill(number % 2 == 1, 0)
    entries = w.batch * w.table_pages
    pages = torch.randperm(max(1, w.pages), generator=generator, device=device)
    table = pages.repeat(-(-entries // len(pages)))[:entries].view(w.batch, w.table_pages)
    found = {
        "cache_seqlens": lengths.int(),
        "block_table": table.int(),
        "cache_leftpad": padding.int(),
    }
    if problem.dtype_kv is not None:
        of_heads = torch.rand(2, w.batch, w.heads_kv, generator=generator, device=device) + 0.5
        found |= {"k_descale": of_heads[0], "v_descale": of_heads[1]}
    return found


def poison_unused(tensors: Mapping[str, Tensor]) -> None:
    """Fills with NaN, in place, what no sequence uses of k and v, where attention finds them in a cache."""
    if "cache_seqlens" not in tensors or "k" not in tensors:
        return
    used = torch.zeros(tensors["k"].shape[:2], dtype=torch.bool, device=tensors["k"].device)
    for page, row in cached_keys(tensors):
        used[page, row] = True
    for name in ("k", "v"):
        elements, unused = tensors[name], ~used[..., None, None]
        if elements.element_size() == 1:  # PyTorch fills no e4m3 numbers by a mask
            elements.view(torch.uint8).masked_fill_(unused, _NAN_E4M3)
        else:
            elements.masked_fill_(unused, math.nan)
