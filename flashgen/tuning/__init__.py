"""The tuner: enumerate, refuse with reasons, predict, compile in parallel, verify, time, record.

`request.py` holds what is asked for and what comes back, `timed.py` the tuning of a GPU that is here, `predicted.py` the ranking for one
that is not, `passed_over.py` what neither tried. Importing this package does not load PyTorch: a run whose records are complete never
needs it.
"""

from __future__ import annotations

from flashgen.build.gpu.driver import gpu, gpu_count
from flashgen.codegen.devices import Device, device_of_target, find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.target import find_target

from ..progress import Progress
from .request import Request, dry_run
from .result import Row, TuneResult

__all__ = ["Progress", "Request", "Row", "TuneResult", "dry_run", "named_or_here", "run", "where"]


def where(request: Request) -> int | Device:
    """The ordinal of the GPU to tune on, or the named device to predict for. Raises ArgumentError for an unknown one."""
    if request.arch is not None:
        target = find_target(request.arch)
        if request.device is None:
            return device_of_target(target)
        device = find_device(str(request.device))
        if device.target != target:
            raise ArgumentError(f"arch must be {device.target.name}, the architecture of device {request.device}; got {request.arch}")
        return device
    return named_or_here(None if request.device is None else str(request.device))


def named_or_here(text: str | None) -> int | Device:
    """The ordinal of a GPU that is here, or the named device: for None the first GPU, without one the H200. Raises ArgumentError."""
    if text is None:
        return 0 if gpu_count() else find_device("h200")
    if text.isascii() and text.isdigit():
        return gpu(int(text)).ordinal
    return find_device(text)


def run(request: Request, progress: Progress | None = None) -> TuneResult:
    """Tunes, or ranks by the model if the device is not here. What was measured so far is kept whenever this stops.

    Raises ArgumentError for a bad request and HungKernelError if a candidate never finishes (its failure is recorded first).
    """
    on = where(request)
    progress = progress or Progress()
    if isinstance(on, Device):
        from . import predicted

        return predicted.run_predicted(request, on, progress)
    from . import timed

    return timed.run_timed(request, gpu(on), progress)
