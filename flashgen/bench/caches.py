"""The keys of cells with caches: how many each sequence has, in which pages, and the bytes that they leave. They follow from sizes alone.

Where the cache has a page for each entry of the tables, sequences have all keys that they may have; where it has fewer, lengths are
log-uniform. Sequences with one page have no table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.codegen.operations.forward import BLOCK_TABLE, CACHE_SEQLENS
from flashgen.codegen.problem import Sequences
from flashgen.codegen.workload import Workload, equal_lengths

from ..cells import Cell
from .packed import document_lengths

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OF_CACHES = (CACHE_SEQLENS, BLOCK_TABLE)


def with_cache(workload: Workload, page_size: int, ragged: bool = False) -> Workload:
    """A workload's keys in pages of a cache. ragged: of lengths that are log-uniform up to its number of keys."""
    each = -(-workload.len_kv // page_size)
    longest = each * page_size
    lengths = document_lengths(workload.batch, longest) if ragged else (longest,) * workload.batch
    pages = sum(-(-length // page_size) for length in lengths)
    return replace(workload, len_kv=longest, pages=pages, page_size=page_size, table_pages=each)


def cache_lengths(workload: Workload) -> tuple[int, ...]:
    """Keys of each sequence."""
    if workload.pages < workload.batch * workload.table_pages:
        return document_lengths(workload.batch, workload.len_kv)
    return (workload.len_kv,) * workload.batch


def cache_tensors(cell: Cell, device: torch.device) -> dict[str, Tensor]:
    """By operand name, int32; none for a cell without a cache. Pages are in random places; entries without a page are -1."""
    import torch

    if not cell.problem.is_cached:
        return {}
    w, lengths = cell.workload, cache_lengths(cell.workload)
    found = {CACHE_SEQLENS: torch.tensor(lengths, dtype=torch.int32, device=device)}
    if w.table_pages > 1:
        drawn = torch.randperm(w.pages, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        table, begin = torch.full((w.batch, w.table_pages), -1, dtype=torch.int32), 0
        for row, length in zip(table, lengths, strict=True):
            own = drawn[begin : begin + -(-length // w.page_size)]
            row[: len(own)] = own
            begin += len(own)
        found[BLOCK_TABLE] = table.to(device)
    return found


def io_bytes(cell: Cell) -> int:
    """As `Cell.io_bytes`; of a cache the keys that its sequences have."""
    if not cell.problem.is_cached:
        return cell.io_bytes
    problem, w = replace(cell.problem, sequences=Sequences.DENSE), replace(equal_lengths(cell.workload), batch=1)
    return sum(Cell(problem, replace(w, len_kv=length)).io_bytes for length in cache_lengths(cell.workload))


def equal_cell(cell: Cell) -> Cell:
    """Dense sequences that are equally long, with as many keys in all as a cache's have, or a few more."""
    lengths = cache_lengths(cell.workload)
    workload = replace(equal_lengths(cell.workload), len_kv=-(-sum(lengths) // max(1, len(lengths))))
    return Cell(replace(cell.problem, sequences=Sequences.DENSE), workload)
