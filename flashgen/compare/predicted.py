"""A comparison for a device that is not here: times by the families' models, memory by what a call would allocate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import families
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.program import BufferKind
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from ..selection.families import families_not_asked
from ..selection.picks import model_picks, picks
from ..timing.spread import Spread
from .formula import ByteBounds, Roofline, traffic_of
from .result import CellComparison, ComparedRow, Comparison


def predict(cells: Mapping[str, Sequence[Cell]], names: Sequence[str], device: Device) -> Comparison:
    """Of what has a model. The others' rows say that they have none."""
    found = Comparison(device.name, Roofline.of(device), None, list(names))
    for grid, some in cells.items():
        for cell in some:
            rows = [_row(name, cell, device) for name in names]
            found.cells.append(CellComparison(grid, cell, ByteBounds.of(cell, device), rows))
    found.complete = True
    return found


def _row(name: str, cell: Cell, device: Device) -> ComparedRow:
    if name not in families():
        return ComparedRow(name, error="not predicted: there is no model of it")
    try:
        spec = _spec(name, cell, device)
    except ArgumentError as error:
        return ComparedRow(name, error=str(error).splitlines()[0])
    ms = spec.family.predict(cell.problem, spec.config, cell.workload, device).seconds * 1e3
    return ComparedRow(name, spec.name, Spread(ms, ms, ms), _allocated(spec, cell, device), traffic_of(spec, cell, device))


def _spec(family: str, cell: Cell, device: Device) -> KernelSpec:
    """The tuned kernel of whatever toolchain, else the model's pick. Raises ArgumentError if the family cannot compute the cell."""
    excluded = families_not_asked(family)
    for pick in picks(cell.problem, cell.workload, device, ("", ""), excluded):
        return pick.choice.spec(device.target)
    return next(model_picks(cell.problem, cell.workload, device, excluded, family))


def _allocated(spec: KernelSpec, cell: Cell, device: Device) -> int:
    """Outputs that nobody may leave out, and the buffers of a call."""
    problem, workload, operation = cell.problem, cell.workload, operation_of(cell.problem)
    written = [operand for operand in operation.operands(problem) if operand.role is not Role.IN and not operand.optional]
    outputs = sum(math.prod(operand.sizes(problem, workload)) * operand.bytes(problem) for operand in written)
    buffers = spec.family.program(spec.config, operation.call(problem, workload), device).buffers
    return outputs + sum(buffer.bytes for buffer in buffers if buffer.kind is not BufferKind.STREAM_COUNTER)
