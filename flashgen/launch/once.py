"""One launch on poisoned outputs, with a time limit: for kernels that nobody has run before."""

from __future__ import annotations

import time

import torch

from flashgen.build.gpu.driver import DriverError
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.problem import Mask

from .gpu import Plan
from .tensors import Tensors

FIRST_LAUNCH_LIMIT = 20.0  # seconds


class HungKernelError(DriverError):
    """A kernel did not finish in time. The GPU's context is lost to it: the process must end."""


def plan_of(kernel: Kernel, tensors: Tensors, scale: float | None = None) -> Plan:
    """The bound launch of `kernel` on these tensors' shapes."""
    return Plan(tensors.q, tensors.k, tensors.v, kernel.spec.problem.mask is Mask.CAUSAL, scale, "bshd", kernel)


def run_once(plan: Plan, tensors: Tensors) -> None:
    """One launch on poisoned outputs, waited for. Raises HungKernelError after the time limit, DriverError on a fault."""
    tensors.poison()
    plan.into(tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse)
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
