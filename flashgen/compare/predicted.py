"""A comparison for a device that is not here: times by the families' models, memory by what a call would allocate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import families
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.program import BufferKind
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from ..selection.picks import picked_spec
from ..timing.spread import Spread
from .formula import ByteBounds, Roofline, traffic_of
from .result import CellComparison, ComparedRow, Comparison
from .shapes import BACKWARD_FAMILIES, all_participants, calls_of, participants


def predict(cells: Mapping[str, Sequence[Cell]], names: Sequence[str], device: Device) -> Comparison:
    """Of what has a model. The others' rows say that they have none."""
    found = Comparison(device.name, Roofline.of(device), None, all_participants(names, itertools.chain(*cells.values())))
    for grid, some in cells.items():
        for cell in some:
            taking_part = participants(names, cell.problem.operation)
            rows = [replace(_row(name, cell, device), stands_for=rungs) for name, rungs in taking_part.items()]
            found.cells.append(CellComparison(grid, cell, ByteBounds.of(cell, device), rows))
    found.complete = True
    return found


def _row(name: str, cell: Cell, device: Device) -> ComparedRow:
    if name not in families():
        return ComparedRow(name, error="not predicted: there is no model of it")
    named = (name, BACKWARD_FAMILIES.get(name))
    try:
        calls = [(call, _spec(family, call, device)) for family, call in zip(named, calls_of(cell), strict=False)]
    except ArgumentError as error:
        return ComparedRow(name, error=str(error).splitlines()[0])
    ms = 1e3 * sum(spec.family.predict(call.problem, spec.config, call.workload, device).seconds for call, spec in calls)
    spread = Spread(ms, ms, ms)
    traffic = traffic_of([(spec, call) for call, spec in calls], device)
    if len(calls) == 1:
        ((_, spec),) = calls
        return ComparedRow(name, spec.name, spread, _allocated(spec, cell, device), traffic)
    (before, forward), (after, backward) = calls
    # out and lse stay, what else the forward pass allocates does not.
    peak = _outputs(before, True) + max(_buffers(forward, before, device), _allocated(backward, after, device))
    return ComparedRow(name, f"{forward.name} + {backward.name}", spread, peak, traffic, backward=backward.family.name)


def _spec(family: str | None, cell: Cell, device: Device) -> KernelSpec:
    """The tuned kernel of whatever toolchain, else the model's pick. Raises ArgumentError if the family cannot compute the cell."""
    return picked_spec(cell.problem, cell.workload, device, ("", ""), family)


def _allocated(spec: KernelSpec, cell: Cell, device: Device) -> int:
    """Outputs that nobody may leave out, and the buffers of a call."""
    return _outputs(cell, False) + _buffers(spec, cell, device)


def _outputs(cell: Cell, with_optional: bool) -> int:
    problem, operands = cell.problem, operation_of(cell.problem).operands(cell.problem)
    written = [operand for operand in operands if operand.role is not Role.IN and (with_optional or not operand.optional)]
    return sum(math.prod(operand.sizes(problem, cell.workload)) * operand.bytes(problem) for operand in written)


def _buffers(spec: KernelSpec, cell: Cell, device: Device) -> int:
    program = spec.family.program(spec.config, operation_of(cell.problem).call(cell.problem, cell.workload), device)
    return sum(buffer.bytes for buffer in program.buffers if buffer.kind is not BufferKind.STREAM_COUNTER)
