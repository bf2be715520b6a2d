"""Which kernels `flashgen generate --from-records` writes: the one that each record of a device chooses for its workload. No GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from flashgen.codegen.devices import Device, devices_like
from flashgen.codegen.errors import ArgumentError, choice_error
from flashgen.codegen.family import families
from flashgen.codegen.operations import operations_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from ..records import sources
from ..records.record import Timing
from ..selection.bundle import Generated
from ..selection.families import families_not_asked
from ..selection.picks import recorded_workloads
from .generation import chosen, device_of_records, sound


@dataclass(frozen=True)
class Narrowing:
    """Of which problems records count: those with these values, where one is given; `passes` as `flashgen tune` takes it."""

    head_dim: int | None = None
    head_dim_v: int | None = None
    dtype: str | None = None
    causal: bool | None = None
    passes: str | None = None
    deterministic: bool | None = None

    def of(self, problems: list[Problem]) -> list[Problem]:
        """Those of these problems that are wanted. Raises ArgumentError, which lists what there is, for a value that none has."""
        wanted: dict[str, tuple[Callable[[Problem], Any], Collection[object]]] = {}
        if self.passes is not None:
            wanted["pass"] = attrgetter("operation"), operations_of(self.passes)
        if self.dtype is not None:
            wanted["dtype"] = attrgetter("dtype.value"), (Dtype.parse(self.dtype).value,)
        if self.causal is not None:
            wanted["causal"] = (lambda problem: problem.mask is Mask.CAUSAL), (self.causal,)
        for name in ("head_dim", "head_dim_v", "deterministic"):
            if getattr(self, name) is not None:
                wanted[name] = attrgetter(name), (getattr(self, name),)
        for name, (value, allowed) in wanted.items():
            there = sorted({value(problem) for problem in problems})
            problems = [problem for problem in problems if value(problem) in allowed]
            if not problems:
                raise choice_error(name, self.passes if name == "pass" else next(iter(allowed)), there)
        return problems


def generate_recorded(
    narrowing: Narrowing, targets: list[Target], device: Device | None, say: Callable[[str], object] = lambda text: None
) -> list[Generated]:
    """The kernels that records choose for their own workloads, compiled without defects: of each device that counts for a target.

    device: as `generate` has it; say: hears how much there is to do. Raises ArgumentError where there are no records, or none of what
    `narrowing` asks for.
    """
    if device is not None and device.target not in targets:
        raise ArgumentError(f"device must be of {', '.join(target.name for target in targets)}; got {device.name}, of {device.target.name}")
    candidates: dict[tuple[Target, Problem, Workload], Iterator[KernelSpec]] = {}
    for target in targets:
        on, toolchain = device_of_records(target, device)
        problems = narrowing.of(recorded_problems(on))
        for problem in problems:
            for workload in sorted(recorded_workloads(problem, on, families_not_asked())):
                candidates[target, problem, workload] = chosen(problem, workload, on, toolchain, None, lambda text: None)
        count = sum(of is target for of, _, _ in candidates)
        say(f"{on.name}: records of {count} workloads of {len(problems)} problems")
    kernels: dict[KernelSpec, Generated] = {}
    for (_, _, workload), (spec, artifact) in sound(candidates).items():
        known = kernels.get(spec, Generated(spec, artifact))
        kernels[spec] = known._replace(workloads=tuple(sorted((*known.workloads, workload))))
    return list(kernels.values())


def recorded_problems(device: Device) -> list[Problem]:
    """The problems that records of a device, or of one like it, know a kernel for. Raises ArgumentError where there are none."""
    automatic, found = {family.name for family in families().values() if family.automatic}, dict[Problem, None]()
    for source in (sources.own_records(), sources.shipped_records()):
        for one in (device, *devices_like(device)):
            for record in source.for_device(one.name, one.sm_count):
                with suppress(ArgumentError):  # of a problem that this version does not know
                    if isinstance(record.outcome, Timing) and record.spec["family"] in automatic:
                        found[record.problem] = None
    known = [problem for problem in found if recorded_workloads(problem, device, families_not_asked())]
    if not known:
        raise ArgumentError(f"device must be one that there are tuning records of; got {device.name}: `flashgen tune` makes some")
    return known
