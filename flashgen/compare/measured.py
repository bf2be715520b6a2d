"""A comparison on the GPU that is here: times by the benchmark's protocol, and the peak of what a call allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from flashgen.bench.peer import Peer, reason
from flashgen.bench.peers import FamilyPeer, make_peers
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import sdpa_settings_kept
from flashgen.bench.session import measured_environment, torch_device
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.family import Traffic

from ..cells import Cell
from ..progress import Progress
from ..timing.gpu_lock import exclusive
from .formula import ByteBounds, Roofline, traffic_of
from .result import CellComparison, ComparedRow, Comparison


def measure(
    cells: Mapping[str, Sequence[Cell]],
    names: Sequence[str],
    on: Gpu,
    rounds: int,
    command: str,
    progress: Progress,
    save: Callable[[Comparison], object],
) -> Comparison:
    """Measures all cells on a GPU, and calls `save` after each. Raises DriverError if PyTorch has none, and ContextLostError."""
    device = torch_device(on)
    peers, absent = make_peers(names)
    runner = Runner(peers, device, on.device.l2_bytes, rounds)
    found = Comparison(on.device.name, Roofline.of(on.device), measured_environment(on, peers.values(), command), list(names))
    with exclusive(on.uuid, progress), sdpa_settings_kept():
        progress.begin("comparing", sum(map(len, cells.values())))
        for grid, some in cells.items():
            for cell in some:
                found.cells.append(_compared(grid, cell, runner, absent, names, on))
                save(found)
                progress.advance()
    return found


def _compared(grid: str, cell: Cell, runner: Runner, absent: Mapping[str, str], names: Sequence[str], on: Gpu) -> CellComparison:
    timed, rows = runner.measure(grid, cell), []
    for name in names:
        if (error := absent.get(name) or timed.errors.get(name, "")) or name not in timed.times:
            rows.append(ComparedRow(name, error=error))
            continue
        peer, peak = runner.peers[name], None
        try:
            peak = peak_bytes(peer, cell, runner)
        except Exception as failed:  # it was timed: memory alone is missing
            error = f"memory not measured: {reason(failed)}"
            runner.recover(name, f"memory of {timed.name}", failed)
        kernel, traffic = _formula(peer, cell, on)
        rows.append(ComparedRow(name, kernel, timed.times[name].ms, peak, traffic, error))
    return CellComparison(grid, cell, ByteBounds.of(cell, on.device), rows)


def _formula(peer: Peer, cell: Cell, on: Gpu) -> tuple[str, Traffic | None]:
    """A family's kernel for the cell, and the bytes of its loops."""
    if not isinstance(peer, FamilyPeer):
        return "", None
    spec = peer.spec(cell, on)
    return spec.name, traffic_of(spec, cell, on.device)


def peak_bytes(peer: Peer, cell: Cell, runner: Runner) -> int:
    """The most that a call has allocated at once, its output included, its inputs and what stays from call to call not."""
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
