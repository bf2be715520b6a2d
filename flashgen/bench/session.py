"""One run of the benchmark on the GPU that is here: tunes where asked, holds the GPU's lock, keeps the result after every cell."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

import torch

from flashgen.build.gpu.driver import DriverError, Gpu, gpu
from flashgen.build.nvrtc import nvrtc_version
from flashgen.codegen.errors import ArgumentError, FlashgenError, choice_error, require_int
from flashgen.codegen.family import families

from .. import tuning
from ..cells import Cell
from ..timing.gpu_lock import exclusive
from ..timing.spread import ROUNDS
from ..version import __version__
from .call_overhead import call_overheads
from .cells import OURS
from .peer import Peer, reason
from .peers import make_peers
from .relative import problem_name
from .result import BenchResult, CellResult, Environment
from .runner import Runner
from .sdpa import sdpa_settings_kept

BASELINE = "flash"


@dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    cells: by the name of their grid; peers: names of `peers.PEERS`; baseline: the one that ratios are against, None for flash where it
    takes part; device: the GPU's ordinal; call_overhead: also the CPU cost of a call; tune: tune flashgen for the cells first;
    command: how the run was asked for, to be kept with the result.
    """

    cells: dict[str, list[Cell]]
    peers: list[str]
    baseline: str | None = None
    rounds: int = ROUNDS
    device: int = 0
    call_overhead: bool = False
    tune: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        require_int("rounds", self.rounds, 1, 1000)
        if self.baseline is not None and self.baseline not in self.peers:
            raise choice_error("baseline", self.baseline, self.peers)
        if self.baseline is None and BASELINE in self.peers:
            object.__setattr__(self, "baseline", BASELINE)


class Session:
    """A run that can be stopped: `result` always holds what was measured so far."""

    def __init__(self, request: BenchRequest, result: BenchResult, runner: Runner, uuid: str, progress: tuning.Progress) -> None:
        self.request, self.result, self.runner, self.uuid, self.progress = request, result, runner, uuid, progress

    @classmethod
    def here(cls, request: BenchRequest, progress: tuning.Progress) -> Session:
        """On a GPU of this machine. Raises DriverError without one, and FlashgenError if no peer can be imported."""
        on = gpu(request.device)
        device = torch_device(on)
        peers, absent = make_peers(request.peers)
        if not peers:
            raise FlashgenError("no peer can be imported: " + "; ".join(f"{name}: {why}" for name, why in absent.items()))
        result = BenchResult(
            measured_environment(on, peers.values(), request.command), request.rounds, list(peers), absent, request.baseline
        )
        runner = Runner(peers, device, on.device.l2_bytes, request.rounds)
        return cls(request, result, runner, on.uuid, progress)

    def run(self, save: Callable[[BenchResult], object]) -> None:
        """Measures everything; calls `save` whenever there is more to keep. Raises ContextLostError and HungKernelError."""
        for name, why in self.result.absent.items():
            self.progress.say(f"{name} is left out: {why}")
        if self.request.tune:
            self._tune()
        with exclusive(self.uuid, self.progress), sdpa_settings_kept():
            self.progress.begin("measuring", sum(map(len, self.request.cells.values())))
            for grid, cells in self.request.cells.items():
                for cell in cells:
                    self.result.cells.append(self.runner.measure(grid, cell))
                    save(self.result)
                    self.progress.say(_line(self.result.cells[-1]))
                    self.progress.advance()
            if self.request.call_overhead:
                self._call_overhead()
        self.result.complete = True
        save(self.result)

    def _call_overhead(self) -> None:
        def failed(name: str, error: Exception) -> None:
            self.result.call_overhead_errors[name] = reason(error)
            self.runner.recover(name, "the CPU cost of a call", error)

        peers, device, settle = self.runner.peers, self.runner.device, self.runner.settle
        self.result.call_overhead.update(call_overheads(peers, device, settle, failed))

    def _tune(self) -> None:
        cells = dict.fromkeys(cell for cells in self.request.cells.values() for cell in cells)
        asked = [None if name == OURS else name for name in self.runner.peers if name == OURS or name in families()]
        self.progress.begin("tuning", len(cells) * len(asked))
        for cell, family in itertools.product(cells, asked):
            try:
                tuning.run(tuning.Request([cell], self.request.device, family=family), _SayOnly(self.progress))
            except ArgumentError as error:  # flashgen cannot do this cell, which its row will say as well
                about = f"{problem_name(cell.problem)} {cell.workload.name}{f' {family}' if family else ''}"
                self.progress.say(f"{about}: not tuned: {error}")
            self.progress.advance()


class _SayOnly(tuning.Progress):
    """Passes on what a person should know; the stages of each of many small tunes are too much."""

    def __init__(self, progress: tuning.Progress) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        """See Progress."""
        self._progress.say(text)


def _line(result: CellResult) -> str:
    speeds = [f"{peer} {speed.median:.0f}" for peer in result.times if (speed := result.speed(peer))]
    faults = [f"{peer} {why}" for peer, why in result.errors.items()]
    return f"{result.name}: " + ", ".join([*([f"{', '.join(speeds)} {result.unit}"] if speeds else []), *faults])


def torch_device(on: Gpu) -> torch.device:
    """The GPU as PyTorch's device, made the current one. Raises DriverError where PyTorch has none."""
    if not torch.cuda.is_available():
        raise DriverError(f"PyTorch {torch.__version__} finds no GPU: install one that was built for CUDA")
    torch.cuda.set_device(on.ordinal)
    return torch.device("cuda", on.ordinal)


def measured_environment(on: Gpu, peers: Iterable[Peer], command: str) -> Environment:
    """What the figures depend on, as it is now."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        device=on.device.name,
        sm_count=on.device.sm_count,
        driver=on.driver_version,
        python=platform.python_version(),
        flashgen=__version__,
        torch=str(torch.__version__),
        cudnn=_cudnn_version(torch.backends.cudnn.version()),
        nvrtc=nvrtc_version(),
        packages=dict(found for peer in peers if (found := _distribution(peer))),
    )


def _cudnn_version(number: int | None) -> str:
    """'9.19.0' for 91900."""
    return "none" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _distribution(peer: Peer) -> tuple[str, str] | None:
    for name in peer.packages:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
