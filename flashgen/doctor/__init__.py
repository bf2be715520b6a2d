"""`flashgen doctor`: is everything here that flashgen needs, and if not, what is the cure.

`machine.py` checks what flashgen stands on, `stored.py` what it keeps on disk, `trial.py` one kernel from end to end.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial

from flashgen.build.gpu.driver import Gpu, gpu, gpu_count
from flashgen.codegen.devices import Device
from flashgen.codegen.target import find_target

from . import machine, stored, trial
from .finding import Check, Finding, Status

__all__ = ["Check", "Finding", "Status", "checks"]


def checks() -> list[Check]:
    """The checks for this machine, in the order in which their findings are to be read."""
    count = gpu_count()
    gpus = _readable(count)
    models: dict[Device, Gpu] = {}
    for on in gpus:
        models.setdefault(on.device, on)
    target = gpus[0].device.target if gpus else find_target("sm_90a")
    return [
        Check("flashgen", machine.versions),
        Check("driver", machine.installed_driver),
        *(Check(f"GPU {ordinal}", partial(machine.graphics_card, ordinal=ordinal)) for ordinal in range(count)),
        *(Check(f"target of {device.name}", partial(machine.target, on=on)) for device, on in models.items()),
        Check("NVRTC", machine.nvrtc),
        Check("cuda-python", machine.bindings),
        Check("PyTorch", machine.torch),
        Check("kernels on the CPU", machine.cpu),
        Check("environment", machine.environment),
        Check("cache folder", stored.folder),
        Check("compiled kernels", stored.kernels),
        Check("tuning records", stored.records),
        *(Check(f"records of {device.name}", partial(stored.records_of, on=on)) for device, on in models.items()),
        Check("compile", partial(trial.compiling, target=target)),
        *(Check(f"launch on GPU {on.ordinal}", partial(trial.launching, on=on)) for on in gpus),
    ]


def _readable(count: int) -> list[Gpu]:
    """The GPUs that the driver tells of. Why another cannot be read, or has no target file, is for its own check to say."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ordinal in range(count):
            with suppress(Exception):
                found.append(gpu(ordinal))
    return found
