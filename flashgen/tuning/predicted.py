"""Tuning for a GPU that is not here: the model ranks, NVRTC compiles the best and corrects the ranking, the CPU verifies the winners."""

from __future__ import annotations

import time
from functools import partial

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.compiler import compile_many
from flashgen.codegen.device import Device
from flashgen.codegen.spec import KernelSpec

from .. import selection
from .on_host import HostScreen
from .request import Cell, Progress, Request, Row, TuneResult

BUDGET_SECONDS = 45.0  # of compiling and verifying
COMPILED = 8  # candidates a cell, the default beside them


def run(request: Request, device: Device, progress: Progress) -> TuneResult:
    """Predicted winners, each compiled cleanly. Nothing is timed, and nothing goes into the tuning records."""
    begun = time.monotonic()
    cells = {cell: _shortlist(request, cell, device) for cell in request.cells()}
    specs = list(
        dict.fromkeys(spec for rank in range(max(map(len, cells.values()))) for specs in cells.values() for spec in specs[rank : rank + 1])
    )
    artifacts = _compile(request, specs, {shortlist[0] for shortlist in cells.values()}, progress, begun)
    failures = {spec.name: _fault(result) for spec, result in artifacts.items() if _fault(result)}
    screen = HostScreen(begun + (request.budget_seconds or BUDGET_SECONDS))
    progress.begin("verifying on the CPU", len(cells))
    rows = []
    for cell, shortlist in cells.items():
        rows.append(_row(cell, [s for s in shortlist if s in artifacts], artifacts, device, screen, failures))
        progress.advance()
    complete, seconds = len(artifacts) == len(specs), time.monotonic() - begun
    return TuneResult(device.name, False, complete, rows, failures, 0, seconds, device.measured, screen.verified, screen.skipped)


def _shortlist(request: Request, cell: Cell, device: Device) -> list[KernelSpec]:
    """The default first: there is a sound kernel for every cell however short the budget."""
    default = selection.default_spec(cell.problem, device.target)
    others = [spec for spec in request.candidates(cell, device) if spec != default]
    return [default, *(others if request.exhaustive else others[:COMPILED])]


def _compile(
    request: Request, specs: list[KernelSpec], defaults: set[KernelSpec], progress: Progress, begun: float
) -> dict[KernelSpec, Artifact | CompileError]:
    """Compiles until the budget is spent, and all of `defaults` at any rate: others may be done before them, and broken."""
    budget = request.budget_seconds or BUDGET_SECONDS
    artifacts: dict[KernelSpec, Artifact | CompileError] = {}
    progress.begin("compiling", len(specs))
    jobs = [(spec, partial(selection.compile_spec, spec)) for spec in specs]
    for spec, result in compile_many(jobs, request.jobs):
        artifacts[spec] = result
        progress.advance()
        if time.monotonic() - begun > budget and defaults <= artifacts.keys():
            break
    return artifacts


def _fault(result: Artifact | CompileError) -> str:
    return str(result) if isinstance(result, CompileError) else "; ".join(result.report.defects)


def _row(
    cell: Cell,
    specs: list[KernelSpec],
    artifacts: dict[KernelSpec, Artifact | CompileError],
    device: Device,
    screen: HostScreen,
    failures: dict[str, str],
) -> Row:
    """The best sound candidate by the model, now that the compiler has said how many registers each takes, that is right on the CPU."""
    sound = []
    for spec in specs:
        artifact = artifacts[spec]
        if isinstance(artifact, Artifact) and not artifact.report.defects:
            prediction = spec.family.predict(spec.problem, spec.config, cell.workload, device, artifact.report.registers)
            sound.append((prediction.seconds, spec, prediction.bound_by, artifact.report))
    sound.sort(key=lambda item: (item[0], item[1].name))
    while sound and (fault := screen.fault(sound[0][1])):
        failures[sound[0][1].name] = f"wrong on the CPU: {fault}"
        del sound[0]
    failed = len(specs) - len(sound)
    if not sound:
        return Row(cell, None, None, None, None, None, None, "", len(specs), failed)
    seconds, spec, bound_by, report = sound[0]
    default = selection.default_spec(cell.problem, device.target)
    untuned = next((s for s, candidate, _, _ in sound if candidate == default), None)
    shared = spec.family.shared_bytes(spec.problem, spec.config)
    return Row(
        cell,
        spec,
        seconds,
        untuned / seconds if untuned else None,
        report.registers,
        report.spill_bytes,
        shared,
        bound_by,
        len(specs),
        failed,
    )
