"""Kernels that a file of tests has by names, to be run in the emulator: what they are, cases and planted faults of them as parameters of
tests, and what the numerics rule says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.fault import Fault, Setting
from tests.support.plan import planned, to_run
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text

# Families whose kernels every run has with each modifier of these files. Calls (test_modifier_calls) have gradients of Hopper's.
EVERY_RUN = ("attention_forward", "attention_forward_sm90", "attention_backward")
_UNUSED = AttentionForwardSm90Config(2, 64)  # of a fault's setting, which nobody asks for here


@dataclass(frozen=True)
class NamedKernel:
    """config: None for the family's default."""

    family: str
    head_dim: int
    mask: Mask
    deterministic: bool
    modifiers: tuple[str, ...]
    config: Config | None = None
    dtype: Dtype = Dtype.FP16
    sequences: Sequences = Sequences.DENSE
    batch_invariant: bool = False
    dtype_kv: CacheDtype | None = None

    def spec(self) -> KernelSpec:
        """For sm_90a, which every family has kernels for."""
        family, target = find_family(self.family), find_target("sm_90a")
        problem = Problem(
            *(self.dtype, self.head_dim, self.head_dim, self.mask, family.operation),
            deterministic=self.deterministic,
            modifiers=self.modifiers,
            sequences=self.sequences,
            batch_invariant=self.batch_invariant,
            dtype_kv=self.dtype_kv,
        )
        return KernelSpec(family, problem, self.config or family.default(problem, target), target)


def compile_wanted(request: pytest.FixtureRequest, kernels: Mapping[str, NamedKernel]) -> None:
    """Compiles those that the tests of the request's module which run have as their `kernel`, all at once."""
    wanted = {params["kernel"] for params in to_run(request) if "kernel" in params}
    compile_ahead(emulated_text(kernel.spec()) for name, kernel in kernels.items() if name in wanted)


def planned_cases(
    cases: Iterable[tuple[Any, ...]], kernels: Mapping[str, NamedKernel], seconds: float = 1.0, families: Collection[str] = EVERY_RUN
) -> list[object]:
    """Cases that begin with a kernel's name, as parameters. Of each of `families` one is for every run, of its first kernel: all tests of
    a file have the same kernels then. seconds: that one takes.
    """
    first = {kernel.family: name for name, kernel in reversed(list(kernels.items()))}
    return planned(
        cases,
        lambda family: int(family in families),
        family=lambda case: kernels[case[0]].family,
        kinds=lambda case: case,
        name=lambda case: "-".join(map(str, case)),
        seconds=lambda case: seconds,
        able=lambda case: case[0] == first[kernels[case[0]].family],
    )


def fault_of(name: str, find: str, replace: str, kernel: str) -> tuple[str, Fault]:
    """A fault of the kernel of that name."""
    return kernel, Fault(f"{name}-{kernel}", find, replace, Setting(_UNUSED, ()))


def planned_faults(faults: Iterable[tuple[str, Fault]], kernels: Mapping[str, NamedKernel], seconds: float = 2.0) -> list[object]:
    """Those of `fault_of`, as parameters of a test, all for --slow."""
    return planned(
        faults,
        0,
        family=lambda case: kernels[case[0]].family,
        kinds=lambda case: [case[1].find],
        name=lambda case: case[1].name,
        seconds=lambda case: seconds,
        fault=True,
    )


def why_caught(kernel: NamedKernel, planted: Fault, judge: Callable[[Source], Verdict]) -> str:
    """What rejects the kernel with the fault: a check of the emulator, or the rule, which `judge` asks of a text. Empty if nothing does."""
    try:
        verdict = judge(planted.apply(emulated_text(kernel.spec()), Atoms.EMULATED))
    except EmulatorFaultError as error:
        return str(error)
    return "" if verdict.ok else verdict.message


def judged(spec: KernelSpec, text: Source, tensors: Tensors, scalars: Mapping[str, float] | None = None) -> Verdict:
    """What the rule says of the kernel with that text. scalars: values of modifiers other than those of verification."""
    run_on_cpu(emulated_kernel(spec, text), tensors, scalars, limits=LIMITS)
    return Expected.of(tensors, scalars).judge(tensors)
