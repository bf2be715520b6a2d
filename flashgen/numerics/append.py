"""The oracle of what appends to a cache: in float64, and as plain PyTorch computes it, in fp32. All of it runs on any device.

Tensors: k_cache and v_cache [pages, page_size, heads_kv, ..]; k_new and v_new [batch, new_keys, heads_kv, ..]; q and q_rotated
[batch, len_q, heads_q, head_dim]; cache_seqlens and lengths [batch], int32; block_table [batch, table_pages], int32, without which sequence
b has page b alone; tables of cosines and sines [rotary_positions, rotary_dim / 2], without which nothing is rotated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .oracle import TORCH_DTYPES, Oracle, Sample

E4M3, _MOST_E4M3 = torch.float8_e4m3fn, 448.0


class AppendOracle(Oracle):
    """See the module's docstring.

    A row of a sample is of a query, (batch, head, query); of both caches, (-1 - page, head, key of the page); or of a sequence, of which
    it is the length, (batch, -1, 0).
    """

    def inputs(self, problem: Problem, workload: Workload, generator: torch.Generator) -> dict[str, Tensor]:
        """See Oracle. Two of three sequences have room for all new keys, the others as it comes; see `drawn_tables`."""
        drawn, scalars = super().inputs(problem, workload, generator), operation_of(problem).scalars(problem, workload)
        lengths = drawn["cache_seqlens"]
        number = torch.arange(workload.batch, device=lengths.device)
        room = lengths.clamp(max=max(0, workload.len_kv - workload.new_keys))
        tables = drawn_tables(int(scalars["rotary_positions"]), int(scalars["rotary_dim"]), generator)
        found = {"cache_seqlens": torch.where(number % 3 == 0, lengths, room).int()}
        for name, table in zip(("rotary_cos", "rotary_sin"), tables, strict=True):
            found |= {name: table.to(TORCH_DTYPES[problem.dtype]), f"{name}_fp32": table}
        return {**drawn, **found}

    def exact(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle."""
        return self._some(_appended(tensors, scalars, torch.float64), sample)

    def plain(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle. Products, and what is added of them, are rounded to fp32. Of e4m3 caches the elements, as fp32 numbers."""
        found = _appended(tensors, scalars, torch.float32)
        rounded = {name: tensor.to(_dtype_of(name, tensors)) for name, tensor in found.items()}
        return self._some({name: one.float() if one.dtype is E4M3 else one for name, one in rounded.items()}, sample)

    def sample(self, problem: Problem, workload: Workload, count: int, seed: int) -> Sample:
        """See Oracle. Half of it is of queries, and half of caches, as far as there are any; all lengths."""
        w, generator = workload, torch.Generator().manual_seed(seed)
        sizes = torch.tensor([[w.batch, w.heads_q, w.len_q], [w.pages, w.heads_kv, w.page_size]])
        drawn = [(torch.rand(count // 2, 3, generator=generator) * each).long() for each in sizes if int(each.prod())]
        if w.pages and w.page_size and w.heads_kv:
            drawn[-1][:, 0] = -1 - drawn[-1][:, 0]
        lengths = torch.tensor([[0, -1, 0]]).repeat(w.batch, 1)
        lengths[:, 0] = torch.arange(w.batch)
        return torch.cat([*drawn, lengths])

    def sampled(self, outputs: Mapping[str, Tensor], sample: Sample) -> dict[str, Tensor]:
        """See Oracle."""
        batch, head, row = sample.to(outputs["lengths"].device).unbind(1)
        of_caches, of_lengths = batch < 0, head < 0
        page, head_kv, key = -1 - batch[of_caches], head[of_caches], row[of_caches]
        of_queries = ~of_caches & ~of_lengths
        found = {name: outputs[name][page, key, head_kv] for name in ("k_cache", "v_cache")}
        found["q_rotated"] = outputs["q_rotated"][batch[of_queries], row[of_queries], head[of_queries]]
        return {**found, "lengths": outputs["lengths"][batch[of_lengths]]}

    def rows_of(self, touched: Mapping[str, Tensor]) -> Sample:
        """See Oracle."""
        page, key, head_kv = (touched["k_cache"].any(-1) | touched["v_cache"].any(-1)).nonzero().unbind(1)
        batch, query, head = touched["q_rotated"].any(-1).nonzero().unbind(1)
        (sequence,) = touched["lengths"].nonzero().unbind(1)
        of_sequences = sequence, torch.full_like(sequence, -1), torch.zeros_like(sequence)
        return torch.cat([torch.stack(rows, 1) for rows in ((batch, head, query), (-1 - page, head_kv, key), of_sequences)])

    def _some(self, outputs: dict[str, Tensor], sample: Sample | None) -> dict[str, Tensor]:
        return outputs if sample is None else self.sampled(outputs, sample)


def drawn_tables(positions: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [positions, width / 2], of any angles: with usual ones most columns are hardly rotated near position 0."""
    angles = torch.rand(positions, width // 2, generator=generator, device=generator.device) * (2 * math.pi)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotates the first columns of x [batch, length, heads, columns] by the tables' rows of these positions [batch, length]."""
    half = tables[0].shape[1]
    at = positions.clamp(0, max(0, len(tables[0]) - 1))
    cosine, sine = (table.to(x.dtype)[at][:, :, None] for table in tables)
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    both = first * cosine - second * sine, second * cosine + first * sine
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def written_rows(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where new keys go that are written: int64 sequence, new key, page, and key of the page."""
    pages, page_size = tensors["k_cache"].shape[:2]
    batch, new_keys = tensors["k_new"].shape[:2]
    position = tensors["cache_seqlens"].long().clamp(min=0)[:, None] + torch.arange(new_keys, device=tensors["k_new"].device)
    table = tensors.get("block_table")
    if table is None:
        table = torch.arange(batch, device=position.device)[:, None]
    there = position < table.shape[1] * page_size
    entry = torch.where(there, position, 0) // max(1, page_size)
    page = table.long().gather(1, entry) if table.shape[1] else torch.full_like(position, -1)
    sequence, new = (there & (page >= 0) & (page < pages)).nonzero().unbind(1)
    return sequence, new, page[sequence, new], position[sequence, new] % max(1, page_size)


def _appended(tensors: Mapping[str, Tensor], scalars: Mapping[str, float], dtype: torch.dtype) -> dict[str, Tensor]:
    lengths, interleaved = tensors["cache_seqlens"].long().clamp(min=0), bool(scalars["rotary_interleaved"])
    keys, queries = tensors["k_new"].to(dtype), tensors["q"].to(dtype)
    kind = next((kind for kind in ("_fp32", "") if f"rotary_cos{kind}" in tensors), None)
    if kind is not None:
        tables = tensors[f"rotary_cos{kind}"], tensors[f"rotary_sin{kind}"]
        new, query = (torch.arange(x.shape[1], device=x.device) for x in (keys, queries))
        keys = rotated(keys, lengths[:, None] + new, tables, interleaved)
        queries = rotated(queries, lengths[:, None] + query * int(scalars["rotary_by_query"]), tables, interleaved)
    caches = {name: tensors[name].to(dtype, copy=True) for name in ("k_cache", "v_cache")}
    sequence, new, page, row = written_rows(tensors)
    for name, added in (("k", keys), ("v", tensors["v_new"].to(dtype))):
        caches[f"{name}_cache"][page, row] = _as_elements(added, tensors, name)[sequence, new]
    table_pages = tensors["block_table"].shape[1] if "block_table" in tensors else 1
    most = table_pages * tensors["k_cache"].shape[1]
    after = (lengths.clamp(min=0) + tensors["k_new"].shape[1]).clamp(max=most)
    return {**caches, "q_rotated": queries, "lengths": after}


def _dtype_of(name: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    if name == "lengths":
        return torch.int32
    return tensors[name].dtype if name.endswith("cache") else tensors["q"].dtype


def _as_elements(added: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """New rows [batch, new_keys, heads_kv, ..] of k or v as the cache holds them, not rounded: e4m3 ones are divided, and not too large."""
    if tensors[f"{name}_cache"].dtype is not E4M3:
        return added
    descale = tensors.get(f"{name}_descale")
    elements = added.to(tensors["q"].dtype).to(added.dtype)  # what is rotated is rounded before
    by = None if descale is None else torch.where(descale == 0, 1.0, descale)[:, None, :, None].to(added.dtype)
    divided = elements if by is None else elements / by
    return divided.clamp(-_MOST_E4M3, _MOST_E4M3)


ORACLE = AppendOracle()
