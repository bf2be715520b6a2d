"""Tuning on a GPU that is here: compile in parallel, verify against the reference, time interleaved, record each outcome at once."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.gpu.driver import DriverError, Gpu
from flashgen.build.nvrtc import compile_many, nvrtc_version
from flashgen.codegen.devices import Device
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from ..progress import Progress
from ..records import sources
from ..records.record import BENCHMARK_VERSION
from ..records.store import Failure, FailureKind, Record, RecordKey, Timing
from ..selection import compilation, loaded
from ..timing.gpu_lock import exclusive
from .request import Request
from .result import NO_TIMES, Row, TriedConfig, TuneResult

if TYPE_CHECKING:  # PyTorch is loaded only when something is left to measure
    from flashgen.build.gpu.kernel import Kernel

    from ..timing.kernels import Bench
    from ..verification.expected import Expected
    from ..verification.screen import Screen


def run_timed(request: Request, gpu: Gpu, progress: Progress) -> TuneResult:
    """Measures what the records lack, and returns the winners of all cells."""
    begun = time.monotonic()
    deadline = begun + request.budget_seconds if request.budget_seconds else float("inf")
    wanted = {cell: request.candidates(cell, gpu.device) for cell in request.cells}
    timed = TimedRun(gpu, progress, deadline, request.jobs)
    found = timed.recorded(wanted)
    if _missing(found):
        with exclusive(gpu.uuid, progress):
            timed.measure(_missing(timed.recorded(wanted)))  # asked again: another tune may have measured some meanwhile
        loaded.kernels.forget()
        found = timed.recorded(wanted)
    rows = [timed.row(request, cell, records) for cell, records in found.items()]
    return TuneResult(gpu.device.name, True, not _missing(found), rows, _failures(found), timed.measured, time.monotonic() - begun)


Recorded = dict[Cell, dict[KernelSpec, Record | None]]
"""What the records hold of each candidate of each cell."""


def _missing(found: Recorded) -> dict[Cell, list[KernelSpec]]:
    """The candidates without a record, of the cells that have any."""
    missing = {cell: [spec for spec, record in records.items() if record is None] for cell, records in found.items()}
    return {cell: specs for cell, specs in missing.items() if specs}


def _failures(found: Recorded) -> dict[str, str]:
    """Why candidates are out, by kernel name."""
    return {
        spec.name: _reason(record.outcome)
        for records in found.values()
        for spec, record in records.items()
        if record and isinstance(record.outcome, Failure)
    }


def _reason(failure: Failure) -> str:
    return f"{failure.kind.value}: {failure.message}"


def _tried(cell: Cell, spec: KernelSpec, record: Record | None, device: Device) -> TriedConfig:
    """A candidate as the records have it."""
    outcome, registers, spills = (record.outcome, record.registers, record.spill_bytes) if record else (None, None, None)
    times = (outcome.seconds, outcome.low, outcome.high) if isinstance(outcome, Timing) else NO_TIMES
    failure = _reason(outcome) if isinstance(outcome, Failure) else ""
    return TriedConfig.of(cell, spec, device, times, registers, spills, failure, record is not None)


class TimedRun:
    """One run of the tuner on one GPU."""

    def __init__(self, gpu: Gpu, progress: Progress, deadline: float, jobs: int) -> None:
        self.gpu, self.progress, self.deadline, self.jobs = gpu, progress, deadline, jobs
        self.records = sources.own_records()
        self.measured = 0
        self._artifacts: dict[KernelSpec, Artifact] = {}
        self._screens: dict[Problem, Screen] = {}
        self._screened: dict[KernelSpec, str] = {}  # message of the failure, empty for a sound kernel

    def key(self, cell: Cell, spec: KernelSpec) -> RecordKey:
        """Under which a candidate's outcome is recorded."""
        device = self.gpu.device
        return RecordKey(
            device.name, device.sm_count, self.gpu.driver_version, nvrtc_version(), spec.digest, cell.workload, BENCHMARK_VERSION
        )

    def recorded(self, wanted: dict[Cell, list[KernelSpec]]) -> Recorded:
        """Reads the records of all candidates."""
        return {cell: {spec: self.records.get(self.key(cell, spec)) for spec in specs} for cell, specs in wanted.items()}

    def measure(self, missing: dict[Cell, list[KernelSpec]]) -> None:
        """Compiles, verifies, times and records. Stops between cells once the deadline has passed."""
        self._compile(missing)
        todo = {cell: [spec for spec in specs if spec in self._artifacts] for cell, specs in missing.items()}
        self.progress.begin("verifying and timing", sum(map(len, todo.values())))
        for cell, specs in todo.items():
            if specs and time.monotonic() < self.deadline:
                self._measure_cell(cell, specs)
            self.progress.advance(len(specs))

    def _compile(self, missing: dict[Cell, list[KernelSpec]]) -> None:
        """Compiles every spec once; records the broken ones for each of their cells."""
        cells: dict[KernelSpec, list[Cell]] = {}
        for cell, specs in missing.items():
            for spec in specs:
                cells.setdefault(spec, []).append(cell)
        self.progress.begin("compiling", len(cells))
        for spec, result in compile_many([(spec, partial(compilation.compile_spec, spec)) for spec in cells], self.jobs):
            self.progress.advance()
            if isinstance(result, CompileError):
                self._fail(cells[spec], spec, FailureKind.COMPILE, str(result))
            elif result.report.defects:
                self._fail(cells[spec], spec, FailureKind.DEFECT, "; ".join(result.report.defects), result)
            else:
                self._artifacts[spec] = result
            if time.monotonic() > self.deadline:
                break

    def _measure_cell(self, cell: Cell, specs: list[KernelSpec]) -> None:
        from ..timing.kernels import Bench

        bench = Bench(cell.problem, cell.workload, self.gpu.ordinal)
        expected = bench.expected()
        sound: dict[KernelSpec, Kernel] = {}
        for spec in specs:
            try:
                kernel = loaded.kernels.load(spec, self.gpu)
                message = self._screen(spec, kernel) or self._verify(bench, expected, kernel)
            except DriverError as error:  # a fault or a kernel that never ends: this process's context is lost
                self._fail([cell], spec, FailureKind.LAUNCH, str(error))
                raise
            if message:
                self._fail([cell], spec, FailureKind.WRONG, message)
            else:
                sound[spec] = kernel
        by_digest = {spec.digest: spec for spec in sound}
        for digest, timing in bench.time({digest: sound[spec] for digest, spec in by_digest.items()}):
            self._record(cell, by_digest[digest], timing)

    def _screen(self, spec: KernelSpec, kernel: Kernel) -> str:
        """The two small awkward workloads, whole, once a kernel."""
        if spec not in self._screened:
            from ..verification.screen import NothingToJudgeError, Screen

            if spec.problem not in self._screens:
                self._screens[spec.problem] = Screen(spec.problem, f"cuda:{self.gpu.ordinal}")
            try:
                cases = self._screens[spec.problem].judge(kernel)
            except NothingToJudgeError as error:
                self._screened[spec] = str(error)
            else:
                self._screened[spec] = "; ".join(f"{c.workload.name}: {c.verdict.message}" for c in cases if not c.verdict.ok)
        return self._screened[spec]

    @staticmethod
    def _verify(bench: Bench, expected: Expected, kernel: Kernel) -> str:
        """Sampled rows of the workload that is about to be timed."""
        from ..launch.once import run_once

        tensors = bench.sets[0]
        run_once(kernel, tensors)
        verdict = expected.judge(tensors)
        return "" if verdict.ok else verdict.message

    def _fail(self, cells: list[Cell], spec: KernelSpec, kind: FailureKind, message: str, artifact: Artifact | None = None) -> None:
        for cell in cells:
            self._record(cell, spec, Failure(kind, message), artifact)

    def _record(self, cell: Cell, spec: KernelSpec, outcome: Timing | Failure, artifact: Artifact | None = None) -> None:
        artifact = artifact or self._artifacts.get(spec)
        report = artifact.report if artifact else None
        shared = spec.largest_block.shared_bytes
        self.records.put(
            Record(
                self.key(cell, spec),
                spec.to_json(),
                outcome,
                report.registers if report else None,
                report.spill_bytes if report else None,
                shared,
            )
        )
        self.measured += 1

    def row(self, request: Request, cell: Cell, found: dict[KernelSpec, Record | None]) -> Row:
        """The fastest recorded kernel of a cell, of the family asked for, whether this run tried it or an earlier one."""
        device, toolchain = self.gpu.device, (self.gpu.driver_version, nvrtc_version())
        default = request.default(cell, device)
        candidates = {spec: _tried(cell, spec, record, device) for spec, record in found.items()}
        failed = sum(bool(each.failure) for each in candidates.values())
        choice = self.records.best(cell.problem, cell.workload, device, *toolchain, BENCHMARK_VERSION, excluded=request.excluded)
        winner = gain = None
        if choice and choice.exact_workload and choice.same_toolchain and isinstance(choice.record.outcome, Timing):
            winner = _tried(cell, KernelSpec.from_json(choice.record.spec, device.target), choice.record, device)
            untuned = candidates.get(default)
            gain = untuned.seconds / choice.record.outcome.seconds if untuned and untuned.seconds else None
        return Row.of(cell, default, tuple(candidates.values()), failed, winner, gain)
