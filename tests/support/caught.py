"""How planted faults are caught on the CPU: as parameters of a test, compiled ahead, and run on the cases of their settings beside the
kernel without the fault, which must be right there. A file of faults says in which orders its kernels run, and on how many SMs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationOrder, Schedule
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from tests.support.cases import Case
from tests.support.fault import Fault
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text, seconds_of, why_rejected

TARGET = find_target("sm_90a")
ORDERS = (EmulationOrder(Schedule.ROUND_ROBIN, late_copies=True),)
# What the emulator says of races.
IN_FLIGHT = "read under an asynchronous copy that was not waited for"
OVERWRITE = "write over what another warp may still read, with no barrier between"
TWICE = "write over what another thread wrote, with no barrier between"
NOT_WRITTEN = "read of shared memory that nobody wrote"
NOT_SEEN = "read of what another thread wrote, with no barrier between"


def listed(
    faults: Iterable[Fault],
    each: int,
    kinds: Callable[[Fault], Iterable[Hashable]],
    cases: Callable[[Fault], Iterable[Case]] = lambda fault: fault.setting.cases,
) -> list[object]:
    """As parameters, of which every run has `each` of every family. cases: those that a fault takes time for."""
    return planned(
        faults,
        each,
        family=lambda fault: fault.setting.spec(TARGET).family.name,
        kinds=kinds,
        name=lambda fault: fault.name,
        seconds=lambda fault: seconds_of(cases(fault)),
        fault=True,
    )


def faulty_text(fault: Fault) -> Source:
    """The emulated text with the fault in it."""
    return fault.apply(emulated_text(fault.setting.spec(TARGET)), Atoms.EMULATED)


def compile_planted(request: pytest.FixtureRequest) -> None:
    """All texts that the request's file will run, with faults and without, on all cores: one after the other takes most of its time."""
    planted = [params["fault"] for params in to_run(request) if "fault" in params]
    compile_ahead(text for fault in planted for text in (emulated_text(fault.setting.spec(TARGET)), faulty_text(fault)))


@cache
def sound_kernel(spec: KernelSpec) -> EmulatedKernel:
    """The kernel without a fault."""
    return emulated_kernel(spec)


@cache
def control(spec: KernelSpec, case: Case, orders: Sequence[EmulationOrder] = ORDERS, sm_count: int | None = None) -> str:
    """Why that kernel is rejected: empty, as it should be."""
    return why_rejected(sound_kernel(spec), case, orders, sm_count)


def caught_by(
    fault: Fault, orders: Sequence[EmulationOrder] = ORDERS, sm_count: int | None = None, cases: Iterable[Case] | None = None
) -> str:
    """What rejects the faulty kernels, empty if nothing does. cases: in place of those of the fault's setting."""
    spec = fault.setting.spec(TARGET)
    faulty = emulated_kernel(spec, faulty_text(fault))
    for case in fault.setting.cases if cases is None else cases:
        assert not control(spec, case, orders, sm_count), f"the kernel without the fault is rejected on {case.name}"
        try:
            if why := why_rejected(faulty, case, orders, sm_count):
                return f"the numerics rule: {why}"
        except EmulatorFaultError as error:
            return str(error)
    return ""
