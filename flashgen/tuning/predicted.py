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
from .result import Row, TriedConfig, TuneResult

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
    screen = CpuScreen(begun + (request.budget_seconds or BUDGET_SECONDS))
    progress.begin("verifying on the CPU", len(cells))
    rows = []
    for cell, shortlist in cells.items():
        among = [spec for spec in shortlist if spec in artifacts]
        rows.append(_row(cell, request.default(cell, device), among, artifacts, device, screen, failures, known[cell]))
        progress.advance()
    tried = {
        cell: [_tried(cell, spec, artifacts.get(spec), device, failures, known[cell]) for spec in specs] for cell, specs in cells.items()
    }
    rows = [replace(row, default=request.default(row.cell, device), candidates=tuple(tried[row.cell])) for row in rows]
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


def _tried(
    cell: Cell, spec: KernelSpec, artifact: Artifact | CompileError | None, device: Device, failures: dict[str, str], known: Measured | None
) -> TriedConfig:
    """What is known of a candidate once all are compiled, and the winners verified."""
    report = artifact.report if isinstance(artifact, Artifact) else None
    registers, spills = (report.registers, report.spill_bytes) if report else (None, None)
    prediction = spec.family.predict(spec.problem, spec.config, cell.workload, device, registers)
    seconds = known[1] if known and known[0] == spec else None
    shared, failure = spec.largest_block.shared_bytes, failures.get(spec.name, "")
    return TriedConfig(spec, seconds, None, None, prediction.seconds, registers, spills, shared, failure, artifact is not None)


def _row(
    cell: Cell,
    default: KernelSpec,
    specs: list[KernelSpec],
    artifacts: dict[KernelSpec, Artifact | CompileError],
    device: Device,
    screen: CpuScreen,
    failures: dict[str, str],
    measured: Measured | None,
) -> Row:
    """The measured kernel, else the best sound candidate by the model, now that the compiler has said how many registers each takes.

    It is right on the CPU.
    """
    winner = measured[0] if measured else None
    sound = []
    for spec in specs:
        artifact = artifacts[spec]
        if isinstance(artifact, Artifact) and not artifact.report.defects:
            prediction = spec.family.predict(spec.problem, spec.config, cell.workload, device, artifact.report.registers)
            sound.append((prediction.seconds, spec, prediction.bound_by, artifact.report))
    sound.sort(key=lambda item: (item[1] != winner, item[0], item[1].name))
    while sound and (fault := screen.fault(sound[0][1])):
        failures[sound[0][1].name] = f"wrong on the CPU: {fault}"
        del sound[0]
    failed = len(specs) - len(sound)
    if not sound:
        return Row(cell, None, None, None, None, None, None, "", len(specs), failed)
    predicted, spec, bound_by, report = sound[0]
    known = measured is not None and spec == winner
    seconds = measured[1] if measured and known else predicted
    untuned = next((s for s, candidate, _, _ in sound if candidate == default), None)
    gain = untuned / predicted if untuned and (not known or spec == default) else None  # a prediction over a measurement would tell nothing
    shared = spec.largest_block.shared_bytes
    resources = (report.registers, report.spill_bytes, shared)
    return Row(cell, spec, seconds, gain, *resources, bound_by, len(specs), failed, known)
