"""Kernels in the emulator: a spec loaded for the CPU, and launched on PyTorch's tensors in main memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationLimits, EmulationOrder
from flashgen.build.emulator.memory import MemoryView
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.operands import Role
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.spec import KernelSpec

from ..selection import compilation
from .tensors import Tensors

ARCHITECTURE = "sm_90a"  # whose kernels the CPU runs where nothing else is said


def load_emulated(spec: KernelSpec) -> EmulatedKernel:
    """The kernels of a spec on emulated atoms. Raises CxxCompilerMissingError without a C++ compiler."""
    return EmulatedKernel(spec, compilation.store().get_or_compile(render(spec, Atoms.EMULATED), Emulated.LIBRARY))


def view_of(name: str, tensor: torch.Tensor, writable: bool = False) -> MemoryView:
    """The elements of a tensor on the CPU, whatever its strides, as a kernel may touch them."""
    return MemoryView(name, tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()), writable)


def run_on_cpu(
    kernel: EmulatedKernel,
    tensors: Tensors,
    scalars: Mapping[str, float] | None = None,
    interleaving: EmulationOrder | None = None,
    limits: EmulationLimits | None = None,
) -> None:
    """One call on poisoned outputs; `scalars`: those that are not as usual. The tensors are on the CPU.

    Raises ArgumentError if the kernel cannot take these sizes and strides, EmulatorFaultError if a check of the emulator fails, the
    kernel crashes or does not end.
    """
    tensors.poison()
    family, config, call = kernel.spec.family, kernel.spec.config, tensors.call(scalars)
    family.require_call(call, config)
    given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}
    kernel.launch(family.program(config, call, device_of_target(kernel.spec.target)), given, interleaving, limits=limits)
