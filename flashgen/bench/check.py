"""Whether what a peer computes is what was asked for: what is fast but something else gets no time."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from flashgen.codegen.modifier import modifier_gradients
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of

from ..cells import Cell
from ..numerics.oracle import oracle_of, torch_dtype
from ..numerics.rule import judge
from .relative import scalars_of
from .work import Given, Inputs, outputs

SAMPLED_ROWS = 256
# Of a row's norm. Rounding probabilities and out to bf16 costs about 0.3 %; another mask, head, scale or order of dimensions all of it.
ROW_TOLERANCE = 0.02
# A row that sees few keys, one of them by far the most, has a d_q that is left of two nearly equal numbers. FlashAttention takes one of
# them from the rounded out: 2.3 % were seen, where most rows of gradients err by less than 0.5 %.
GRADIENT_TOLERANCE = 0.05
DEVIATIONS = 10  # times what plain PyTorch errs by in a number that is a sum over all rows of a head, and may be near 0 by chance


class CellCheck:
    """The float64 reference of one set of inputs, on sampled rows."""

    def __init__(self, cell: Cell, inputs: Inputs, seed: int = 0) -> None:
        """`inputs`: in layout bshd."""
        self.cell, self._inputs = cell, inputs
        self._oracle, self._scalars = oracle_of(cell.problem), scalars_of(cell)
        self._operands = {operand.name: operand for operand in operation_of(cell.problem).operands(cell.problem)}
        self._rows = self._oracle.sample(cell.problem, cell.workload, SAMPLED_ROWS, seed).to(inputs["q"].device)
        self._exact = self._oracle.exact(cell.problem, inputs, self._scalars, self._rows)

    def fault(self, given: Given) -> str:
        """What is wrong with outputs (layout bshd), empty if nothing: each sampled row must be the reference's, within a share of its norm.

        The norm counts as no less than the median of all: rows of gradients may be 0, where rounding leaves more.
        """
        found = outputs(self.cell.problem, given)
        for name, tensor in found.items():
            if tensor.shape != self._sizes(name):
                return f"wrong: {name} has shape {tuple(tensor.shape)}, not {self._sizes(name)}"
        sampled = self._oracle.sampled(found, self._rows)
        return next(filter(None, (self._fault_of(name, rows, found) for name, rows in sampled.items())), "")

    def _fault_of(self, name: str, rows: Tensor, found: Inputs) -> str:
        """Of one output, of which `rows` are sampled."""
        exact, tolerance = self._exact[name], ROW_TOLERANCE if name == "out" else GRADIENT_TOLERANCE
        if exact.ndim == 1:
            right = (rows.double() - exact).abs() <= DEVIATIONS * (self._plain[name].double() - exact).abs()
            return "" if right.all() else f"wrong: {name} of the sampled heads is not the reference's"
        norms = exact.norm(dim=1)
        wrong = ~((rows.double() - exact).norm(dim=1) <= tolerance * norms.clamp(min=norms.median()))  # also where it is NaN
        if not wrong.any():
            return ""
        first = self._first_row(name, found, wrong)
        return f"wrong: {int(wrong.sum())} of {len(wrong)} sampled rows of {name} are not the reference's, first at {first}"

    @cached_property
    def _plain(self) -> Inputs:
        return self._oracle.plain(self.cell.problem, self._inputs, self._scalars, self._rows)

    def rule(self, given: Given) -> str:
        """What the numerics rule says of all outputs on the sampled rows, empty if it is kept."""
        rows = self._oracle.sampled(outputs(self.cell.problem, given), self._rows)
        unseen = self._oracle.unseen(self.cell.problem, self.cell.workload, self._exact, self._rows)
        verdict = judge(rows, self._exact, self._plain, unseen)
        return "" if verdict.ok else f"wrong: {verdict.message}"

    def _sizes(self, name: str) -> tuple[int, ...]:
        if self._operands[name] in modifier_gradients(self.cell.problem):
            return tuple(self._inputs[name.removeprefix("d_")].shape)
        return self._operands[name].sizes(self.cell.problem, self.cell.workload)

    def _first_row(self, name: str, found: Inputs, wrong: Tensor) -> str:
        """Where the first of the wrong rows is: what is sampled of the outputs is sampled of their rows' numbers."""
        sizes = {each: self._sizes(each)[:-1] for each in found if self._operands[each].is_strided}
        numbers = {each: torch.arange(math.prod(size), device=wrong.device).view(*size, 1) for each, size in sizes.items()}
        first = self._oracle.sampled(numbers, self._rows)[name][wrong][0, 0]
        indices = torch.unravel_index(first, sizes[name])
        return ", ".join(f"{axis.value} {int(i)}" for axis, i in zip(self._operands[name].axes, indices, strict=False))


def poison(cell: Cell, device: torch.device) -> None:
    """Leaves NaN in memory that outputs of this cell are likely to get next: an earlier peer's right results must not be found there."""
    written = [o for o in operation_of(cell.problem).operands(cell.problem) if o.role is not Role.IN and not o.optional]
    _ = [
        torch.full(operand.sizes(cell.problem, cell.workload), torch.nan, dtype=torch_dtype(operand, cell.problem), device=device)
        for operand in written
    ]
