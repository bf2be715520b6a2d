"""The sequences of packed cells: how long each is, and the work that they leave. They follow from a cell's sizes alone.

So a file of results needs no more than its cells.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from flashgen.codegen.problem import Sequences
from flashgen.codegen.workload import Workload

from ..cells import Cell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHORTEST = 128  # tokens of a document
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv")


@cache
def document_lengths(batch: int, longest: int) -> tuple[int, ...]:
    """So many lengths, log-uniform from `SHORTEST` to `longest`."""
    drawn = random.Random(2)
    return tuple(round(math.exp(drawn.uniform(math.log(SHORTEST), math.log(longest)))) for _ in range(batch))


def packed_documents(batch: int, heads: int, longest: int) -> Workload:
    """A workload of so many documents, whose tokens are those of `document_lengths`."""
    tokens = sum(document_lengths(batch, longest))
    return Workload(batch, heads, heads, longest, longest, tokens_q=tokens, tokens_kv=tokens)


def packed_boundaries(cell: Cell, device: torch.device) -> dict[str, Tensor]:
    """By operand name, int32; none for a cell of dense sequences."""
    import torch

    if not cell.problem.is_packed:
        return {}
    ends = [0, *accumulate(document_lengths(cell.workload.batch, cell.workload.len_q))]
    boundaries = torch.tensor(ends, dtype=torch.int32, device=device)
    return dict.fromkeys(BOUNDARIES, boundaries)


def packed_flops(cell: Cell) -> float:
    """Floating-point operations of all documents of a packed cell, each as a dense sequence is counted."""
    lengths = document_lengths(cell.workload.batch, cell.workload.len_q)
    return sum(replace(dense_cell(cell), workload=_dense(cell.workload, 1, length)).flops for length in lengths)


def dense_cell(cell: Cell) -> Cell:
    """Dense sequences, equally long, with the FLOPs of a packed cell: as nearly as many tokens as whole sequences have."""
    lengths = document_lengths(cell.workload.batch, cell.workload.len_q)
    squares = sum(length**2 for length in lengths)
    batch = max(1, round(sum(lengths) ** 2 / squares))
    return Cell(replace(cell.problem, sequences=Sequences.DENSE), _dense(cell.workload, batch, round(math.sqrt(squares / batch))))


def _dense(workload: Workload, batch: int, length: int) -> Workload:
    return replace(workload, batch=batch, len_q=length, len_kv=length, tokens_q=0, tokens_kv=0)
