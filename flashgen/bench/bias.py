"""Cells with a bias: what it is the same for follows from their grid, as a problem and a workload do not say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cells import Cell

if TYPE_CHECKING:
    from torch import Tensor

NAME = "bias"  # of the modifier, and of its tensor
OF_SCORES, OF_KEYS = "bias", "key-bias"  # grids: [1, heads, len_q, len_kv] and [batch, heads, 1, len_kv]
_ALIKE = {OF_SCORES: 0, OF_KEYS: 2}  # along which dimension; in other grids along none


def has_bias(cell: Cell) -> bool:
    """Whether scores of the cell gain elements of a bias."""
    return NAME in cell.problem.modifiers


def bias_of_grid(grid: str, drawn: Tensor) -> Tensor:
    """Of a bias [batch, heads, len_q, len_kv] what cells of the grid have, dense."""
    return drawn.narrow(_ALIKE[grid], 0, 1).contiguous() if grid in _ALIKE else drawn
