"""Running cases on the CPU: compile a text with host atoms, launch it thread for thread, judge what it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from flashgen.build.artifact import Artifact
from flashgen.build.host_compiler import HOST
from flashgen.build.host_kernel import HostKernel, HostLimits, HostOrder
from flashgen.build.store import ArtifactStore
from flashgen.codegen.device import device_of_target
from flashgen.codegen.render import Atoms, Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.host import view_of
from tests.gpu.cases import Case, Tensors

LIMITS = HostLimits(stall_seconds=60.0, seconds=600.0)


def compiled(source: Source) -> Artifact:
    """The text as a shared library, from the store or the compiler."""
    return ArtifactStore().get_or_compile(source, HOST)


def host_kernel(spec: KernelSpec, source: Source | None = None) -> HostKernel:
    """The kernel of a spec on host atoms, or another text of it."""
    return HostKernel(spec, compiled(source or render(spec, Atoms.HOST)))


def launch(
    kernel: HostKernel,
    case: Case,
    tensors: Tensors,
    order: HostOrder | None = None,
    resident: int = 1,
    sm_count: int | None = None,
    with_lse: bool = True,
) -> None:
    """Poisons the results and runs the kernel, as on a GPU with so many SMs. Raises HostFaultError if a check of the runtime fails."""
    tensors.out.buffer.fill_(torch.nan)
    tensors.lse.buffer.fill_(torch.nan)
    family, config, device = kernel.spec.family, kernel.spec.config, device_of_target(kernel.spec.target)
    if sm_count is not None:
        device = dataclasses.replace(device, sm_count=sm_count)
    given = {name: view_of(name, getattr(tensors, name)) for name in ("q", "k", "v")}
    given["out"] = view_of("out", tensors.out.view, writable=True)
    if with_lse:
        given["lse"] = view_of("lse", tensors.lse.view, writable=True)
    kernel.launch(case.program(family, config, device), given, order, resident=resident, limits=LIMITS)


def why_rejected(kernel: HostKernel, case: Case, orders: Iterable[HostOrder], sm_count: int | None = None) -> str:
    """What rejects the kernel on a case, in any of these orders: empty if nothing does."""
    tensors = case.make("cpu")
    for order in orders:
        launch(kernel, case, tensors, order, sm_count=sm_count)
        if found := case.rejections(tensors):
            return f"{order}: {'; '.join(found)}"
    return ""
