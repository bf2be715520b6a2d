"""Running cases on the CPU: compile a text with emulated atoms, launch it thread for thread, judge what it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial

import pytest
import torch

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationLimits, EmulationOrder
from flashgen.build.emulator.memory import MemoryView
from flashgen.build.nvrtc import compile_many
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.render import Atoms, Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.launch.cpu import view_of
from tests.support.cases import Case, Tensors

LIMITS = EmulationLimits(stall_seconds=60.0, seconds=600.0)
# On two cores: of a compile, and of a launch for each (query, key) pair of a head and column of q and v.
COMPILE_SECONDS, PAIR_SECONDS = 1.2, 2.5e-9


def compiled(source: Source) -> Artifact:
    """The text as a shared library, from the store or the compiler."""
    return ArtifactStore().get_or_compile(source, Emulated.LIBRARY)


def emulated_text(spec: KernelSpec) -> Source:
    """The text of a spec with emulated atoms."""
    return render(spec, Atoms.EMULATED)


def compile_ahead(texts: Iterable[Source]) -> None:
    """Compiles these on all cores: one after the other they would take most of a file's time. Fails if one does not compile."""
    jobs = {(source.entry, source.digest): partial(compiled, source) for source in texts}
    for _, result in compile_many(jobs.items()):
        if isinstance(result, CompileError):
            pytest.fail(str(result), pytrace=False)


def emulated_kernel(spec: KernelSpec, source: Source | None = None) -> EmulatedKernel:
    """The kernels of a spec on emulated atoms, or of another text of them."""
    return EmulatedKernel(spec, compiled(source or emulated_text(spec)))


def launch(
    kernel: EmulatedKernel,
    case: Case,
    tensors: Tensors,
    order: EmulationOrder | None = None,
    resident: int = 1,
    sm_count: int | None = None,
    with_lse: bool = True,
) -> None:
    """Poisons the results and runs the kernel, as on a GPU with so many SMs. Raises EmulatorFaultError if a check of the runtime fails.

    resident: how many blocks run together, or all of a launch that has fewer.
    A call that the family refuses never reaches its kernel: such a case is a mistake of the test.
    """
    family, config, device = kernel.spec.family, kernel.spec.config, device_of_target(kernel.spec.target)
    assert not (refused := family.call_refusals(case.call(), config)), f"{family.name} refuses this case: {'; '.join(refused)}"
    if sm_count is not None:
        device = dataclasses.replace(device, sm_count=sm_count)
    program = case.program(family, config, device)
    fitting = min(resident, *(each.grid for each in program.launches))
    kernel.launch(program, poisoned(tensors, with_lse), order, resident=fitting, limits=LIMITS)


def poisoned(tensors: Tensors, with_lse: bool = True) -> dict[str, MemoryView]:
    """What a launch is given, with results of NaN."""
    tensors.out.buffer.fill_(torch.nan)
    tensors.lse.buffer.fill_(torch.nan)
    given = {name: view_of(name, getattr(tensors, name)) for name in ("q", "k", "v")}
    given["out"] = view_of("out", tensors.out.view, writable=True)
    if with_lse:
        given["lse"] = view_of("lse", tensors.lse.view, writable=True)
    return given


def seconds_of(cases: Iterable[Case], compiles: int = 1) -> float:
    """About how long it takes on two cores to compile so many texts and to launch the kernels on these cases."""
    columns = ((case.workload, case.problem.head_dim + case.problem.head_dim_v) for case in cases)
    pairs = sum(w.batch * w.heads_q * w.len_q * w.len_kv * width for w, width in columns)
    return compiles * COMPILE_SECONDS + pairs * PAIR_SECONDS


def why_rejected(kernel: EmulatedKernel, case: Case, orders: Iterable[EmulationOrder], sm_count: int | None = None) -> str:
    """What rejects the kernel on a case, in any of these orders: empty if nothing does."""
    tensors = case.make("cpu")
    for order in orders:
        launch(kernel, case, tensors, order, sm_count=sm_count)
        if found := case.rejections(tensors):
            return f"{order}: {'; '.join(found)}"
    return ""
