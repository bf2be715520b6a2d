"""What a comparison found, and the same as JSON."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from flashgen.codegen.family import Traffic
from flashgen.codegen.operations import BOTH
from flashgen.codegen.plain import to_plain
from flashgen.codegen.spec import problem_to_json

from ..bench.result import Environment
from ..cells import Cell
from ..timing.spread import Spread
from .formula import ByteBounds, Roofline
from .shapes import GRIDS, LENGTHS_GRID, PASSES, calls_of

SCHEMA = 2
LONG = 1024  # queries from which on memory grows as its order says
_PASS = {"forward": "forward", "backward": "forward_backward"}  # what is called in the cells of an operation


@dataclass(frozen=True)
class CountedBytes:
    """Bytes that hardware counters saw of all kernels of one call: see counters.py.

    read, written, reduced: between the SMs and the L2; an addition in the L2 (`red`) counts as reduced
    memory_read, memory_written: between the L2 and the device's memory, where nothing of the operands is in the L2 before
    """

    read: int
    written: int
    reduced: int
    memory_read: int
    memory_written: int


@dataclass(frozen=True)
class ComparedRow:
    """One participant in one cell.

    kernel: the name of the kernel, of families, or the names of both passes' kernels; ms: milliseconds of a call; peak_bytes: the most that
    a call has allocated at once, its outputs included, its inputs not; traffic: bytes by the algorithm's loops; counted: bytes that
    hardware counters saw; error: why there are no figures, empty if there are
    backward: the family of the gradients, of families in cells with a backward pass; stands_for: rungs without one
    """

    name: str
    kernel: str = ""
    ms: Spread | None = None
    peak_bytes: int | None = None
    traffic: Traffic | None = None
    counted: CountedBytes | None = None
    error: str = ""
    backward: str = ""
    stands_for: tuple[str, ...] = ()

    @property
    def moved_bytes(self) -> int | None:
        """All of `traffic`; an addition in the L2 counts once."""
        return None if self.traffic is None else self.traffic.read + self.traffic.written + self.traffic.reduced


@dataclass
class CellComparison:
    """One cell: what its sizes say, and its rows."""

    grid: str
    cell: Cell
    bounds: ByteBounds
    rows: list[ComparedRow] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.cell.problem.variant} {self.cell.workload.name}{', with backward' if self.with_backward else ''}"

    @property
    def with_backward(self) -> bool:
        """Whether a call is a forward pass followed by its backward pass."""
        return self.cell.problem.operation == "backward"

    @property
    def flops(self) -> float:
        """By the field's count."""
        return sum(call.flops for call in calls_of(self.cell))

    @property
    def input_bytes(self) -> int:
        """Of q, k and v, and of d_out with a backward pass."""
        p, w = self.cell.problem, self.cell.workload
        keys = w.heads_kv * w.len_kv * (p.head_dim + p.head_dim_v)
        queries = w.heads_q * w.len_q * (p.head_dim + (p.head_dim_v if self.with_backward else 0))
        return w.batch * (queries + keys) * p.dtype.bytes

    def intensity(self, row: ComparedRow) -> float | None:
        """FLOP a byte of the row's formula; None without one."""
        return self.flops / row.moved_bytes if row.moved_bytes else None

    def flops_per_second(self, row: ComparedRow) -> float | None:
        """By the field's count of FLOP, None without a time."""
        return None if row.ms is None else self.flops / (row.ms.median * 1e-3)


@dataclass
class Comparison:
    """A whole comparison. environment: None where nothing was measured, and all times and bytes are the models'.

    complete: whether it came to its end; no_counters: why no bytes were counted, empty if they were
    """

    device: str
    roofline: Roofline
    environment: Environment | None
    names: list[str]
    cells: list[CellComparison] = field(default_factory=list)
    complete: bool = False
    no_counters: str = ""

    @property
    def predicted(self) -> bool:
        """Whether nothing was measured."""
        return self.environment is None

    def memory_exponents(self, grid: str = LENGTHS_GRID, operation: str = "forward") -> dict[str, float]:
        """By which power of the length each participant's peak grows, from `LONG` queries on: the slope between logarithms.

        Of a grid of lengths, and of its cells of one operation.
        """
        points: dict[str, list[tuple[float, float]]] = {}
        for cell in self.cells:
            fits = (cell.grid, cell.cell.problem.operation) == (grid, operation) and cell.cell.workload.len_q >= LONG
            for row in cell.rows if fits else ():
                if row.peak_bytes:
                    points.setdefault(row.name, []).append((math.log(cell.cell.workload.len_q), math.log(row.peak_bytes)))
        fitting = {name: some for name, some in points.items() if len(some) > 2}
        return {name: statistics.linear_regression(*zip(*some, strict=True)).slope for name, some in fitting.items()}

    def memory_growth(self) -> list[tuple[str, str, dict[str, float]]]:
        """`memory_exponents` of each grid and operation that has some."""
        every = ((grid, operation) for grid in GRIDS for operation in PASSES[BOTH])
        return [(*which, exponents) for which in every if (exponents := self.memory_exponents(*which))]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with what follows from the figures beside them."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "predicted": self.predicted,
            "complete": self.complete,
            "no_counters": self.no_counters,
            "environment": to_plain(self.environment),
            "roofline": asdict(self.roofline),
            "memory_exponents": self.memory_exponents(),
            "memory_growth": [{"grid": grid, "pass": _PASS[name], "exponents": found} for grid, name, found in self.memory_growth()],
            "cells": [self._cell_to_json(cell) for cell in self.cells],
        }

    def _cell_to_json(self, cell: CellComparison) -> dict[str, Any]:
        return {
            "grid": cell.grid,
            "pass": _PASS[cell.cell.problem.operation],
            "problem": problem_to_json(cell.cell.problem),
            "workload": to_plain(cell.cell.workload),
            "flops": cell.flops,
            "input_bytes": cell.input_bytes,
            "bounds": asdict(cell.bounds),
            "rows": [
                {
                    **to_plain(row),
                    "moved_bytes": row.moved_bytes,
                    "intensity": (intensity := cell.intensity(row)),
                    "bound": None if intensity is None else self.roofline.bound(intensity),
                    "flops_per_second": cell.flops_per_second(row),
                }
                for row in cell.rows
            ],
        }
