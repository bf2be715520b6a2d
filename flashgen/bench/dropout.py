"""Cells with dropout. Each peer draws its own elements, so no two give the same: they are checked by how far they are from no dropout.

flashgen is checked by its elements, too: with PyTorch's generator as `repeat_seed` leaves it, its next call has the seed of the inputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from flashgen.codegen.modifiers.dropout import DROPOUT_P, SEED

from ..cells import Cell
from ..launch.seeds import drawn_seed
from .check import CellCheck
from .relative import scalars_of
from .work import Inputs

NAME = "dropout"  # of the modifier
SEEDS = 4  # of which the reference knows how far they are from no dropout
# Of means over some hundreds of rows. Outputs without the division by 1 - p are off by 0.1; FlashAttention-2 meets p to 2^-8.
SHARE_TOLERANCE, DISTANCE_TOLERANCE = 0.05, 0.2
SEEN = 1e-3  # of the median row's square, below which rounding counts, as in d_q of a row that sees one key


def has_dropout(cell: Cell) -> bool:
    """Whether elements of P are dropped in the cell."""
    return NAME in cell.problem.modifiers


def dropout_p(cell: Cell) -> float:
    """The probability of the cell; 0 without dropout."""
    return scalars_of(cell)[DROPOUT_P] if has_dropout(cell) else 0.0


def repeat_seed() -> None:
    """Puts PyTorch's generators where the seed of `dropout_seed` comes from."""
    torch.manual_seed(0)


def dropout_seed(cell: Cell, device: torch.device) -> dict[str, Tensor]:
    """By operand name, what flashgen draws behind `repeat_seed`; none for a cell without dropout."""
    if not has_dropout(cell):
        return {}
    repeat_seed()
    return {SEED: drawn_seed(device).clone()}


class DropoutCheck(CellCheck):
    """Of outputs whose elements of P were dropped by any seed. `rule` is of those that were dropped by the seed of the inputs.

    In the mean over rows an output is what it is without dropout, and as far from that as the reference with other seeds is. A few wrong
    rows of many, and a mask that is aligned otherwise, may change less than dropout does: cells without dropout see them.
    """

    def _fault_of(self, name: str, rows: Tensor, found: Inputs) -> str:
        if rows.ndim == 1:
            return super()._fault_of(name, rows, found)
        expected, squares = self._expected[name], self._squares[name]
        off, seen = rows.double() - expected, squares > SEEN * squares.median()
        weights = 1 / (squares + expected.square().sum(1))[seen]
        total, of_these = ((each * expected).sum(1)[seen] @ weights for each in (expected, rows.double()))
        if not abs(of_these / total - 1) <= SHARE_TOLERANCE:
            return f"wrong: {name} is {float(of_these / total):.3f} times what it is without dropout in the mean, not 1"
        own = off.square().sum(1)[seen]
        distances = own / (own + SEEDS * squares[seen]) * (SEEDS + 1)  # one of so many that are alike
        if not abs(float(distances.mean()) - 1) <= DISTANCE_TOLERANCE:
            told = f"{float(distances.mean()):.3f} times as far, in squares, from what it is without dropout"
            return f"wrong: {name} is {told} as by a dropout_p of {dropout_p(self.cell):g}"
        return ""

    @cached_property
    def _expected(self) -> Inputs:
        """The reference without dropout."""
        modifiers = tuple(name for name in self.cell.problem.modifiers if name != NAME)
        return self._oracle.exact(replace(self.cell.problem, modifiers=modifiers), self._inputs, self._scalars, self._rows)

    @cached_property
    def _squares(self) -> Inputs:
        """Of each row, the mean square of the reference's distance from that without dropout."""
        sums = {name: torch.zeros_like(rows[:, 0]) for name, rows in self._expected.items() if rows.ndim == 2}
        for number in range(1, SEEDS + 1):
            seed = torch.full_like(self._inputs[SEED], number)
            found = self._oracle.exact(self.cell.problem, {**self._inputs, SEED: seed}, self._scalars, self._rows)
            for name, total in sums.items():
                total += (found[name] - self._expected[name]).square().sum(1) / SEEDS
        return sums
