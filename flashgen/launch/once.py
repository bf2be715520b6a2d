"""One launch on poisoned outputs, with a time limit: for kernels that nobody has run before."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from flashgen.build.gpu.driver import DriverError
from flashgen.build.gpu.kernel import Kernel

from .bound import BoundCall, addresses_of
from .tensors import Tensors

FIRST_LAUNCH_LIMIT = 20.0  # seconds


class HungKernelError(DriverError):
    """A kernel did not finish in time. The GPU's context is lost to it: the process must end."""


def run_once(kernel: Kernel, tensors: Tensors, scalars: Mapping[str, float] | None = None) -> None:
    """One launch on poisoned outputs, waited for; `scalars`: those that are not as usual.

    Raises ArgumentError if the kernel's config cannot take these sizes, HungKernelError after the time limit, DriverError on a fault.
    """
    tensors.poison()
    with torch.cuda.device(kernel.gpu.ordinal):
        if any(tensor.numel() for tensor in tensors.outputs.values()):
            bound = BoundCall(kernel, tensors.call(scalars))
            bound(torch.cuda.current_stream().cuda_stream, *addresses_of(kernel.operands, tensors))
        done = torch.cuda.Event()
        done.record()
    deadline = time.monotonic() + FIRST_LAUNCH_LIMIT
    try:
        while not done.query():
            if time.monotonic() > deadline:
                raise HungKernelError(f"kernel did not finish in {FIRST_LAUNCH_LIMIT:g} s")
            time.sleep(50e-6)
    except RuntimeError as error:  # torch.AcceleratorError by version
        raise DriverError(f"kernel failed: {str(error).splitlines()[0]}") from error
