"""The documents of cells with document ids: which there are, and the work that they leave. They follow from a cell's sizes alone.

So block masks and the like can be made of them before what is timed, and a file of results needs no more than its cells.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from flashgen.codegen.modifiers.document_ids import DOCUMENT_IDS, IDS_KV, IDS_Q
from flashgen.codegen.problem import Mask
from flashgen.codegen.workload import OPEN, Workload

from ..cells import Cell
from .packed import packed_flops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MEAN_LENGTH = 1024  # tokens of a document


def has_documents(cell: Cell) -> bool:
    """Whether a query of the cell sees its own document alone."""
    return DOCUMENT_IDS in cell.problem.modifiers


def document_ids(cell: Cell, device: torch.device) -> dict[str, Tensor]:
    """By operand name: int32, of queries [batch, len_q], and of keys [batch, len_kv]; none for a cell without documents.

    In order, of random lengths. The last query and the last key are the same token.
    """
    import torch

    if not has_documents(cell):
        return {}
    w = cell.workload
    ids = torch.tensor(_ids(w.batch, max(w.len_q, w.len_kv)), dtype=torch.int32, device=device)
    return {IDS_Q: ids[:, ids.shape[1] - w.len_q :].contiguous(), IDS_KV: ids[:, ids.shape[1] - w.len_kv :].contiguous()}


def flops(cell: Cell) -> float:
    """As `Cell.flops`; where there are documents, of each pair of a query and a key that is seen, and of packed ones by their lengths."""
    if cell.problem.is_packed:
        return packed_flops(cell)
    if not has_documents(cell):
        return cell.flops
    problem, w = replace(cell.problem, mask=Mask.FULL), cell.workload
    every = Cell(problem, replace(w, window_left=OPEN, window_right=OPEN, chunk=OPEN))
    return every.flops * _seen(w, cell.problem.mask is Mask.CAUSAL) / (w.batch * w.len_q * w.len_kv)


@cache
def _ids(batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Each token begins a document with the same probability."""
    drawn, found = random.Random(0), []
    for _ in range(batch):
        document, ids = 0, []
        for _ in range(length):
            document += drawn.random() * MEAN_LENGTH < 1
            ids.append(document)
        found.append(tuple(ids))
    return tuple(found)


@cache
def _seen(workload: Workload, causal: bool) -> int:
    """Pairs of a query and a key that documents, the mask, the window and the chunks let through, of one head of every entry."""
    w, pairs, length = workload, 0, max(workload.len_q, workload.len_kv)
    first_query, first_key = length - w.len_q, length - w.len_kv  # tokens, numbered as `_ids` are
    right = min(w.window_right, 0) if causal else w.window_right
    for ids in _ids(w.batch, length):
        begins = [i for i in range(length) if i == 0 or ids[i] != ids[i - 1]]
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            for query in range(max(begin, first_query), end):
                first, last = max(begin, first_key, query - w.window_left), min(end - 1, query + right)
                if w.chunk != OPEN:
                    chunk = (query - first_key) // w.chunk * w.chunk + first_key
                    first, last = max(first, chunk), min(last, chunk + w.chunk - 1)
                pairs += max(0, last + 1 - first)
    return pairs
