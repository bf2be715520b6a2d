"""Tuning for a GPU that is not here: NVRTC compiles what records and model know to be best, the CPU verifies the winners."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.devices import Device
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from ..progress import Progress
from ..records.record import Timing
from ..selection import compilation
from ..selection.picks import picks
from .on_cpu import CpuScreen
from .request import Request
from .result import NO_TIMES, Row, TriedConfig, TuneResult

BUDGET_SECONDS = 45.0  # of compiling and verifying
ANY_TOOLCHAIN = ("", "")  # of driver and compiler: there are none to compare with
COMPILED = 8  # candidates a cell, the default beside them


def run_predicted(request: Request, device: Device, progress: Progress) -> TuneResult:
    """Winners, each compiled cleanly: the measured one where a tuning record of such a device is of the cell, else the model's.

    Nothing is timed, and nothing goes into the tuning records.
    """
    begun = time.monotonic()
    known = {cell: _measured(request, cell, device) for cell in request.cells}
    cells = {cell: _shortlist(request, cell, device, measured) for cell, measured in known.items()}
    specs = list(
        dict.fromkeys(spec for rank in range(max(map(len, cells.values()))) for specs in cells.values() for spec in specs[rank : rank + 1])
    )
    artifacts = _compile(request, specs, {shortlist[0] for shortlist in cells.values()}, progress, begun)
    failures = {spec.name: _fault(result) for spec, result in artifacts.items() if _fault(result)}
    candidates = {cell: [_tried(cell, spec, artifacts.get(spec), device, known[cell]) for spec in specs] for cell, specs in cells.items()}
    screen = CpuScreen(begun + (request.budget_seconds or BUDGET_SECONDS))
    progress.begin("verifying on the CPU", len(cells))
    sound = {}
    for cell, tried in candidates.items():
        sound[cell] = _sound(tried, screen, failures)
        progress.advance()
    rows = [_row(cell, request.default(cell, device), tried, sound[cell], failures) for cell, tried in candidates.items()]
    complete, seconds = len(artifacts) == len(specs), time.monotonic() - begun
    return TuneResult(device.name, False, complete, rows, failures, 0, seconds, device.measured, screen.verified, screen.skipped)


Measured = tuple[KernelSpec, float]
"""What a record of the cell holds: the fastest kernel, and its time in seconds."""


def _measured(request: Request, cell: Cell, device: Device) -> Measured | None:
    """From the user's records, else from those that come with the package, whatever driver and compiler they were measured with."""
    for pick in picks(cell.problem, cell.workload, device, ANY_TOOLCHAIN, request.excluded):
        record, spec = pick.choice.record, pick.choice.spec(device.target)
        asked = not request.settings or spec in request.candidates(cell, device)
        if asked and not pick.choice.older and record.key.workload == cell.workload and isinstance(record.outcome, Timing):
            return spec, record.outcome.seconds
    return None


def _shortlist(request: Request, cell: Cell, device: Device, measured: Measured | None) -> list[KernelSpec]:
    """The default first: there is a sound kernel for every cell however short the budget. Then what was measured."""
    default = request.default(cell, device)
    others = [spec for spec in request.candidates(cell, device) if spec != default]
    chosen = [default, *([measured[0]] if measured else []), *(others if request.exhaustive else others[:COMPILED])]
    return list(dict.fromkeys(chosen))


def _compile(
    request: Request, specs: list[KernelSpec], defaults: set[KernelSpec], progress: Progress, begun: float
) -> dict[KernelSpec, Artifact | CompileError]:
    """Compiles until the budget is spent, and all of `defaults` at any rate: others may be done before them, and broken."""
    budget = request.budget_seconds or BUDGET_SECONDS
    artifacts: dict[KernelSpec, Artifact | CompileError] = {}
    progress.begin("compiling", len(specs))
    jobs = [(spec, partial(compilation.compile_spec, spec)) for spec in specs]
    for spec, result in compile_many(jobs, request.jobs):
        artifacts[spec] = result
        progress.advance()
        if time.monotonic() - begun > budget and defaults <= artifacts.keys():
            break
    return artifacts


def _fault(result: Artifact | CompileError) -> str:
    return str(result) if isinstance(result, CompileError) else "; ".join(result.report.defects)


def _tried(cell: Cell, spec: KernelSpec, artifact: Artifact | CompileError | None, device: Device, known: Measured | None) -> TriedConfig:
    """What is known of a candidate once all are compiled."""
    report = artifact.report if isinstance(artifact, Artifact) else None
    registers, spills = (report.registers, report.spill_bytes) if report else (None, None)
    times = (known[1], None, None) if known and known[0] == spec else NO_TIMES
    return TriedConfig.of(cell, spec, device, times, registers, spills, _fault(artifact) if artifact else "", artifact is not None)


def _sound(candidates: list[TriedConfig], screen: CpuScreen, failures: dict[str, str]) -> list[TriedConfig]:
    """The measured kernel first, then by the model, now that the compiler has said how many registers each takes.

    The first is right on the CPU; what was found wrong before it is added to `failures`.
    """
    sound = [each for each in candidates if each.tried and not each.failure]
    sound.sort(key=lambda each: (each.seconds is None, each.predicted, each.spec.name))
    while sound and (fault := screen.fault(sound[0].spec)):
        failures[sound[0].spec.name] = f"wrong on the CPU: {fault}"
        del sound[0]
    return sound


def _row(cell: Cell, default: KernelSpec, candidates: list[TriedConfig], sound: list[TriedConfig], failures: dict[str, str]) -> Row:
    """The first that is sound wins. `failures` are those of all cells: a kernel that one of them found wrong may be in others."""
    winner, untuned = sound[0] if sound else None, next((each for each in sound if each.spec == default), None)
    gain = None
    if winner and untuned and (winner.seconds is None or winner is untuned):  # a prediction over a measurement would tell nothing
        gain = untuned.predicted / winner.predicted
    outcomes = tuple(replace(each, failure=failures.get(each.spec.name, "")) for each in candidates)
    return Row.of(cell, default, outcomes, sum(each.tried for each in candidates) - len(sound), winner, gain)
