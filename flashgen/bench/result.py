"""What the benchmark found: times a round for each peer and cell, what follows from them, and both as JSON."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.former_names import renamed_bench
from flashgen.codegen.plain import INLINE, from_plain, named, to_plain

from ..cells import Cell
from ..timing.spread import Spread
from .caches import io_bytes
from .cells import is_decode
from .documents import flops
from .relative import problem_name

SCHEMA = 1
SUBJECT = "flashgen"


@dataclass(frozen=True)
class Environment:
    """What the figures depend on beside flashgen. packages: versions of peers that come on their own, by distribution."""

    date: str
    command: str
    device: str
    sm_count: int
    driver: str
    python: str
    flashgen: str
    torch: str
    cudnn: str
    nvrtc: str
    packages: dict[str, str]


@dataclass(frozen=True)
class PeerTimes:
    """One peer on one cell: milliseconds of one call in each round, in the order of rounds.

    graph: whether they are of CUDA graph replays; first_call_s: seconds of the first call, with what it compiles.
    """

    rounds_ms: tuple[float, ...]
    graph: bool
    first_call_s: float

    def __post_init__(self) -> None:
        if not self.rounds_ms or not all(isinstance(ms, float) and math.isfinite(ms) and ms > 0 for ms in self.rounds_ms):
            raise ArgumentError(f"rounds_ms must be finite numbers of milliseconds > 0, one a round; got {list(self.rounds_ms)}")

    @property
    def ms(self) -> Spread:
        """Milliseconds of one call."""
        return Spread.of(self.rounds_ms)


@dataclass
class CellResult:
    """One cell: the peers that were timed, why others were not, and what else is to be said of some."""

    grid: str
    cell: Cell = field(metadata=INLINE)
    times: dict[str, PeerTimes] = field(default_factory=dict, metadata=named("peers"))
    errors: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return f"{problem_name(self.cell.problem)} {self.cell.workload.name}"

    @property
    def unit(self) -> str:
        """Of `speed`: decoding is bound by memory, everything else by arithmetic."""
        return "GB/s" if is_decode(self.cell.workload) else "TFLOP/s"

    def speed(self, peer: str) -> Spread | None:
        """In `unit`, of the peer's median time and of its spread; None if it was not timed."""
        if peer not in self.times:
            return None
        ms = self.times[peer].ms
        work = io_bytes(self.cell) / 1e6 if is_decode(self.cell.workload) else flops(self.cell) / 1e9
        return Spread(work / ms.median, work / ms.high, work / ms.low)

    def ratio(self, subject: str, against: str | None) -> Spread | None:
        """How many times as fast `subject` is: taken in each round. None where one of the two was not timed."""
        if against is None or subject not in self.times or against not in self.times:
            return None
        theirs, ours = self.times[against].rounds_ms, self.times[subject].rounds_ms
        return Spread.of([a / b for a, b in zip(theirs, ours, strict=True)])

    def best(self, other_than: str) -> str | None:
        """The fastest of the other peers by median, None if no other was timed."""
        return min((name for name in self.times if name != other_than), key=lambda name: self.times[name].ms.median, default=None)


@dataclass(frozen=True)
class CallOverhead:
    """Microseconds of CPU time of one eager call, with gradients off and on, and of one with its backward pass: None if it has none."""

    us: float
    us_grad: float
    us_backward: float | None = None


@dataclass
class BenchResult:
    """A whole run, or what there is of it so far.

    peers: those that could be imported, in the order of the tables; absent: why the others could not;
    baseline: the peer that ratios are against; complete: whether the run came to its end.
    """

    environment: Environment
    rounds: int
    peers: list[str]
    absent: dict[str, str]
    baseline: str | None
    cells: list[CellResult] = field(default_factory=list)
    call_overhead: dict[str, CallOverhead] = field(default_factory=dict)
    call_overhead_errors: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def operation(self) -> str:
        """What was measured, by its cells; forward before there is one, which is all that the CPU's cost is of."""
        return ", ".join(dict.fromkeys(cell.cell.problem.operation for cell in self.cells)) or "forward"

    @property
    def subject(self) -> str:
        """Whose ratios are told: flashgen's, or where it takes no part or is the baseline, those of the first other peer."""
        others = [peer for peer in self.peers if peer != self.baseline] or self.peers
        return SUBJECT if SUBJECT in others else others[0]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with what follows from the times beside them."""
        plain = to_plain(self)
        return {
            "schema": SCHEMA,
            "pass": self.operation,
            **{name: plain[name] for name in ("environment", "rounds", "peers", "absent", "baseline", "complete", "call_overhead_errors")},
            "subject": self.subject,
            "call_overhead": plain["call_overhead"],
            "cells": [self._cell_to_json(cell) for cell in self.cells],
            "ratios": to_plain(self.summaries()),
        }

    def _cell_to_json(self, result: CellResult) -> dict[str, Any]:
        plain, best = to_plain(result), result.best(self.subject)
        return {
            **{name: plain[name] for name in ("grid", "problem", "workload")},
            "unit": result.unit,
            "best_other": best,
            "ratio_to_best_other": to_plain(result.ratio(self.subject, best)),
            "peers": {
                peer: {
                    **plain["peers"][peer],
                    "ms": times.ms.median,
                    "speed": to_plain(result.speed(peer)),
                    "ratio_to_baseline": to_plain(result.ratio(peer, self.baseline)),
                }
                for peer, times in result.times.items()
            },
            "errors": plain["errors"],
            "notes": plain["notes"],
        }

    def summaries(self) -> list[Summary]:
        """The subject's ratios to the baseline and to the best other peer, over the cells that have them."""
        to_baseline = [(cell.ratio(self.subject, self.baseline), cell) for cell in self.cells if self.baseline != self.subject]
        to_best = [(cell.ratio(self.subject, cell.best(self.subject)), cell) for cell in self.cells]
        found = []
        for against, rows in ((str(self.baseline), to_baseline), ("best other peer", to_best)):
            if ratios := [(ratio.median, cell) for ratio, cell in rows if ratio is not None]:
                worst, where = min(ratios, key=lambda pair: pair[0])
                mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
                found.append(Summary(self.subject, against, len(ratios), mean, worst, f"{where.name} ({where.grid})"))
        return found


@dataclass(frozen=True)
class Summary:
    """Ratios of one peer to another over `cells` cells: their geometric mean, the least and where it is."""

    subject: str
    against: str
    cells: int
    geometric_mean: float
    worst: float
    worst_cell: str


_FOLLOWS = {  # what `to_json` adds, at each of its levels: it follows from the rest
    "result": ("schema", "pass", "subject", "ratios"),
    "cell": ("unit", "best_other", "ratio_to_best_other"),
    "peer": ("ms", "speed", "ratio_to_baseline"),
}


def result_from_json(values: object) -> BenchResult:
    """The reverse of `BenchResult.to_json`. Raises ArgumentError that says what is wrong with the values."""
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise ArgumentError(f"schema must be {SCHEMA}; got {shown(schema)}")
    given = renamed_bench(_without("result", values))
    if isinstance(cells := given.get("cells"), list):
        given["cells"] = [_given_of_cell(cell) for cell in cells]
    result = from_plain(BenchResult, given, "result")
    named = [result.baseline] if result.baseline is not None else []
    unknown = [peer for peer in (*named, *(peer for cell in result.cells for peer in cell.times)) if peer not in result.peers]
    if not result.peers or unknown:
        raise ArgumentError(f"peers must name all that were timed, at least one; got {shown(result.peers)}, and times of {shown(unknown)}")
    for cell in result.cells:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", cell.grid):  # a part of the name of a file
            raise ArgumentError(f"grid must be a name of letters, digits and hyphens; got {shown(cell.grid)}")
        for peer, times in cell.times.items():
            if len(times.rounds_ms) != result.rounds:
                raise ArgumentError(f"rounds_ms of {peer} must have {result.rounds} values; got {len(times.rounds_ms)} in {cell.name}")
    return result


def _given_of_cell(values: Any) -> Any:
    given = _without("cell", values)
    if isinstance(given, dict) and isinstance(peers := given.get("peers"), dict):
        given["peers"] = {peer: _without("peer", times) for peer, times in peers.items()}
    return given


def _without(level: str, values: Any) -> Any:
    return {key: value for key, value in values.items() if key not in _FOLLOWS[level]} if isinstance(values, dict) else values
