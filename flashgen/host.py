"""Kernels on the CPU: host atoms in place of a GPU, and PyTorch's tensors in main memory."""

from __future__ import annotations

from functools import cache

import torch

from flashgen.build.host_compiler import HOST
from flashgen.build.host_kernel import HostKernel, HostLimits, HostOrder
from flashgen.build.host_memory import HostTensor
from flashgen.codegen.attention_launch import attention_call
from flashgen.codegen.device import device_of_target
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target

from . import arguments, selection
from .measure import Tensors

ARCHITECTURE = "sm_90a"  # whose kernels the CPU runs where nothing else is said


def load(spec: KernelSpec) -> HostKernel:
    """The kernel of a spec on host atoms. Raises HostCompilerMissingError without a C++ compiler."""
    artifacts = (selection.store().get_or_compile(render(spec, Atoms.HOST, suffix), HOST) for suffix in spec.kernels)
    return HostKernel(spec, *artifacts)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of CPU tensors that have passed `arguments.check_call`, by the default kernel.

    Raises ArgumentError for memory that a kernel cannot take.
    """
    arguments.require_memory(q, k, v)
    problem, workload = arguments.problem_and_workload(q, k, v, causal, layout)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((workload.batch, workload.heads_q, workload.len_q), dtype=torch.float32)
    if lse.numel():
        q, k, v, written = (t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v, out))
        tensors = Tensors(q, k, v, written, lse)
        without = selection.left_out(problem, workload, tensors.strides(), find_target(ARCHITECTURE))
        run_on_host(_default_kernel(problem, without), tensors, scale)
    return out, lse


@cache
def _default_kernel(problem: Problem, without: frozenset[str]) -> HostKernel:
    return load(selection.default_spec(problem, find_target(ARCHITECTURE), without))


def view_of(name: str, tensor: torch.Tensor, writable: bool = False) -> HostTensor:
    """The elements of a tensor on the CPU, whatever its strides, as a kernel may touch them."""
    return HostTensor(name, tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()), writable)


def run_on_host(
    kernel: HostKernel, tensors: Tensors, scale: float | None = None, order: HostOrder | None = None, limits: HostLimits | None = None
) -> None:
    """One launch on poisoned outputs. The tensors are on the CPU.

    Raises ArgumentError if the kernel cannot take these heads, HostFaultError if a check of the runtime fails, the kernel crashes or does
    not end.
    """
    tensors.poison()
    (batch, len_q, heads_q, head_dim), (_, len_kv, heads_kv, _) = tensors.q.shape, tensors.k.shape
    workload = Workload(batch, heads_q, heads_kv, len_q, len_kv)
    family, problem, config = kernel.spec.family, kernel.spec.problem, kernel.spec.config
    family.require_workload(config, workload)
    call = attention_call(problem, workload, tensors.strides(), scale if scale is not None else head_dim**-0.5)
    given = {name: view_of(name, getattr(tensors, name), writable=name in ("out", "lse")) for name in call.views}
    kernel.launch(family.program(config, call, device_of_target(kernel.spec.target)), given, order, limits=limits)
