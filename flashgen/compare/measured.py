"""A comparison on the GPU that is here: times by the benchmark's protocol, the peak of what a call allocates, and counted bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from flashgen.bench.peer import Peer, reason
from flashgen.bench.peers import FamilyPeer, make_peers
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import sdpa_settings_kept
from flashgen.bench.session import measured_environment, torch_device
from flashgen.build.gpu.driver import Gpu

from ..cells import Cell
from ..progress import Progress
from ..timing.gpu_lock import exclusive
from .counters import CountersError, count_bytes
from .formula import ByteBounds, Roofline, traffic_of
from .result import CellComparison, ComparedRow, Comparison
from .shapes import all_participants, calls_of, participants
from .with_backward import FamilyWithBackward, with_backward

# Bytes: of a call that allocates more nothing is counted. The profiler runs each kernel several times, and saves what it writes before.
MOST_REPLAYED = 2**33


@dataclasses.dataclass(frozen=True)
class _TakingPart:
    """In the cells of one operation. names: each with the rungs that it stands for; absent: why some cannot be imported."""

    runner: Runner
    names: Mapping[str, tuple[str, ...]]
    absent: Mapping[str, str]


class Measurement:
    """A comparison that can be stopped: `result` always holds what was measured so far."""

    def __init__(self, names: Sequence[str], on: Gpu, rounds: int, command: str, profiler: str | None) -> None:
        """`profiler`: the path of Nsight Compute, None to count no bytes. Raises DriverError where PyTorch has no GPU."""
        self._on, self._device, self._rounds = on, torch_device(on), rounds
        environment = measured_environment(on, make_peers(names)[0].values(), command)
        self.result = Comparison(on.device.name, Roofline.of(on.device), environment, list(names))
        self._profiler = profiler
        if profiler is None:
            self.result.no_counters = "not asked for, or ncu (Nsight Compute) is not on PATH"

    def run(self, cells: Mapping[str, Sequence[Cell]], progress: Progress, save: Callable[[Comparison], object]) -> None:
        """Measures all cells, and calls `save` after each. Raises ContextLostError and HungKernelError."""
        names, every = self.result.names, list(itertools.chain(*cells.values()))
        taking_part = {operation: self._taking_part(names, operation) for operation in {cell.problem.operation for cell in every}}
        self.result.names = all_participants(names, every)
        with exclusive(self._on.uuid, progress), sdpa_settings_kept():
            progress.begin("comparing", sum(map(len, cells.values())))
            for grid, some in cells.items():
                for cell in some:
                    self.result.cells.append(self._compared(grid, cell, taking_part[cell.problem.operation]))
                    save(self.result)
                    progress.advance()
        self.result.complete = True

    def _taking_part(self, names: Sequence[str], operation: str) -> _TakingPart:
        standing = participants(names, operation)
        peers, absent = make_peers(standing)
        if operation == "backward":
            peers = {name: with_backward(peer) for name, peer in peers.items()}
        return _TakingPart(Runner(peers, self._device, self._on.device.l2_bytes, self._rounds), standing, absent)

    def _compared(self, grid: str, cell: Cell, taking_part: _TakingPart) -> CellComparison:
        runner, rows = taking_part.runner, []
        timed = runner.measure(grid, cell)
        for name, rungs in taking_part.names.items():
            if (error := taking_part.absent.get(name) or timed.errors.get(name, "")) or name not in timed.times:
                rows.append(ComparedRow(name, error=error, stands_for=rungs))
                continue
            peer, peak = runner.peers[name], None
            try:
                peak = peak_bytes(peer, cell, runner)
            except Exception as failed:  # it was timed: memory alone is missing
                error = f"memory not measured: {reason(failed)}"
                runner.recover(name, f"memory of {timed.name}", failed)
            row = ComparedRow(name, ms=timed.times[name].ms, peak_bytes=peak, error=error, stands_for=rungs)
            rows.append(_with_formula(row, peer, cell, self._on))
        return CellComparison(grid, cell, ByteBounds.of(cell, self._on.device), self._with_counts(cell, rows))

    def _with_counts(self, cell: Cell, rows: list[ComparedRow]) -> list[ComparedRow]:
        """The rows with what counters see of their calls."""
        counting = [row.name for row in rows if row.ms is not None and row.peak_bytes is not None and row.peak_bytes <= MOST_REPLAYED]
        if self.result.no_counters or self._profiler is None or not counting:
            return rows
        torch.cuda.empty_cache()
        try:
            found = count_bytes([(name, cell) for name in counting], self._on.ordinal, self._profiler)
        except CountersError as error:  # the next cell would fare no better
            self.result.no_counters = str(error)
            return rows
        counted = dict(zip(counting, found, strict=True))
        return [dataclasses.replace(row, counted=counted.get(row.name)) for row in rows]


def _with_formula(row: ComparedRow, peer: Peer, cell: Cell, on: Gpu) -> ComparedRow:
    """The row with a family's kernel for the cell, and the bytes of its loops; or with the kernels of both passes."""
    if isinstance(peer, FamilyWithBackward):
        forward, backward = specs = peer.specs(cell, on)
        traffic = traffic_of(zip(specs, calls_of(cell), strict=True), on.device)
        return dataclasses.replace(row, kernel=f"{forward.name} + {backward.name}", backward=backward.family.name, traffic=traffic)
    if isinstance(peer, FamilyPeer):
        spec = peer.spec(cell, on)
        return dataclasses.replace(row, kernel=spec.name, traffic=traffic_of([(spec, cell)], on.device))
    return row


def peak_bytes(peer: Peer, cell: Cell, runner: Runner) -> int:
    """The most that a call has allocated at once, its outputs included, its inputs and what stays from call to call not."""
    peer.select()
    with torch.no_grad():
        run = peer.prepare(cell, runner.device)(runner.inputs(cell, peer.layout))
        run()  # the first time compiles, and allocates what stays
        runner.settle()
        before = torch.cuda.memory_allocated(runner.device)
        torch.cuda.reset_peak_memory_stats(runner.device)
        run()
        runner.settle()
        return torch.cuda.max_memory_allocated(runner.device) - before
