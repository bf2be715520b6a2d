"""Cells with a relative bias: each score gains an element of its head's table, by how far the key is from the query.

There is no keyword for it: flashgen and FlexAttention get a score_mod, which captures the table. Tables are fp32, drawn at random, and get
no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashgen.codegen.modifiers import short_name
from flashgen.codegen.modifiers.traced import CAPTURED_NUMBER, CAPTURED_TENSOR, shape_scalars
from flashgen.codegen.operation import dense, operation_of
from flashgen.codegen.problem import Problem

from ..cells import Cell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAME = "relative"  # of the grid, and of the modifier for people
RELATIVE = "traced(score: add(score, t0:fp32[head, add(add(query, neg(key)), n0:int32)]))"  # what `relative_bias` is traced to
TABLE = f"{CAPTURED_TENSOR}t0"


def relative_bias(table: Tensor, offset: int) -> Callable[..., Any]:
    """The score_mod. table: [heads_q, distances], of which `offset` is that of a query and a key of the same number."""
    return lambda score, batch, head, query, key: score + table[head, query - key + offset]


def has_relative_bias(cell: Cell) -> bool:
    """Whether the cell's scores gain elements of a table."""
    return RELATIVE in cell.problem.modifiers


def offset_of(cell: Cell) -> int:
    """Of the cell's tables: the last key is so far from the first query."""
    return cell.workload.len_kv - 1


def relative_table(cell: Cell, generator: torch.Generator) -> dict[str, Tensor]:
    """By operand name, on the generator's device; none for a cell without a relative bias."""
    import torch

    if not has_relative_bias(cell):
        return {}
    return {TABLE: torch.randn(_sizes(cell), generator=generator, device=generator.device)}


def scalars_of(cell: Cell) -> Mapping[str, float]:
    """The numbers of a call of the cell, by name: as `Operation.scalars`, with what its own table makes of them."""
    usual = operation_of(cell.problem).scalars(cell.problem, cell.workload)
    if not has_relative_bias(cell):
        return usual
    return {**usual, f"{CAPTURED_NUMBER}n0": offset_of(cell), **shape_scalars("t0", _sizes(cell), dense(_sizes(cell)))}


def names_of_modifiers(problem: Problem) -> tuple[str, ...]:
    """Of a cell's problem, for people."""
    return tuple(NAME if name == RELATIVE else name for name in problem.modifiers)


def problem_name(problem: Problem) -> str:
    """`Problem.name` of a cell's problem, without a digest."""
    return problem.name.replace(short_name(RELATIVE), NAME)


def _sizes(cell: Cell) -> tuple[int, int]:
    return cell.workload.heads_q, cell.workload.len_q + cell.workload.len_kv - 1
