"""Kernels in the emulator: a spec loaded for the CPU, and launched on PyTorch's tensors in main memory."""

from __future__ import annotations

import torch

from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationLimits, EmulationOrder
from flashgen.build.emulator.memory import MemoryView
from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload

from ..selection import compilation
from .tensors import Tensors

ARCHITECTURE = "sm_90a"  # whose kernels the CPU runs where nothing else is said


def load_emulated(spec: KernelSpec) -> EmulatedKernel:
    """The kernel of a spec on emulated atoms. Raises CxxCompilerMissingError without a C++ compiler."""
    artifacts = (compilation.store().get_or_compile(render(spec, Atoms.EMULATED, suffix), Emulated.LIBRARY) for suffix in spec.kernels)
    return EmulatedKernel(spec, *artifacts)


def view_of(name: str, tensor: torch.Tensor, writable: bool = False) -> MemoryView:
    """The elements of a tensor on the CPU, whatever its strides, as a kernel may touch them."""
    return MemoryView(name, tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()), writable)


def run_on_cpu(
    kernel: EmulatedKernel,
    tensors: Tensors,
    scale: float | None = None,
    order: EmulationOrder | None = None,
    limits: EmulationLimits | None = None,
) -> None:
    """One launch on poisoned outputs. The tensors are on the CPU.

    Raises ArgumentError if the kernel cannot take these sizes and strides, EmulatorFaultError if a check of the emulator fails, the
    kernel crashes or does not end.
    """
    tensors.poison()
    (batch, len_q, heads_q, _), (_, len_kv, heads_kv, _) = tensors.q.shape, tensors.k.shape
    workload = Workload(batch, heads_q, heads_kv, len_q, len_kv)
    family, config = kernel.spec.family, kernel.spec.config
    call = attention_call(kernel.spec.problem, workload, tensors.strides(), scale)
    family.require_call(call, config)
    given = {name: view_of(name, getattr(tensors, name), writable=name in ("out", "lse")) for name in call.views}
    kernel.launch(family.program(config, call, device_of_target(kernel.spec.target)), given, order, limits=limits)
