"""Planted faults of the ladder's families: the settings in which their kernels run, and how each fault is caught on the CPU.

A family's own file lists its faults. `Faults` turns them into parameters, compiles their texts ahead, and says what rejects each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
NOT_WRITTEN = "read of shared memory that nobody wrote"
NOT_SEEN = "read of what another thread wrote, with no barrier between"

TILE_BARRIER = "barrier_sync();  // every thread's copies of this tile have landed"
TILE_WAIT = "cp_async_wait_group<kStages - 2>();"
WRONG_HEAD = "work.head % divide(p.heads_q, p.group_reciprocal)"  # in place of head_kv
OUTPUT_BARRIER = "barrier_sync();  // all warps have read Q"


@dataclass(frozen=True)
class Faults:
    """The faults of one family. `wrong`: those that the numerics rule or any check catches; `races`: by the check that must catch them."""

    wrong: Sequence[Fault]
    races: Mapping[str, Sequence[Fault]]

    @property
    def raced(self) -> list[Fault]:
        """All races."""
        return [fault for faults in self.races.values() for fault in faults]

    def check_of(self, fault: Fault) -> str:
        """What must catch a race."""
        (check,) = (check for check, faults in self.races.items() if fault in faults)
        return check

    def require_unique_names(self) -> None:
        """Each fault goes by its name."""
        names = [fault.name for fault in (*self.wrong, *self.raced)]
        assert len(set(names)) == len(names)


def listed(faults: Sequence[Fault]) -> list[object]:
    """As parameters, all for --slow: every run has faults of the families whose parts these share."""
    return planned(
        faults,
        0,
        family=lambda fault: fault.setting.spec(TARGET).family.name,
        kinds=lambda fault: (fault.setting.spec(TARGET).name,),
        name=lambda fault: fault.name,
        seconds=lambda fault: seconds_of(fault.setting.cases),
        fault=True,
    )


def faulty_text(fault: Fault) -> Source:
    """The emulated text with the fault in it."""
    return fault.apply(emulated_text(fault.setting.spec(TARGET)), Atoms.EMULATED)


def compile_planted(request: pytest.FixtureRequest) -> None:
    """All texts that a file will run, on all cores."""
    planted = [params["fault"] for params in to_run(request)]
    compile_ahead(text for fault in planted for text in (emulated_text(fault.setting.spec(TARGET)), faulty_text(fault)))


@cache
def sound_kernel(spec: KernelSpec) -> EmulatedKernel:
    """The kernel without a fault."""
    return emulated_kernel(spec)


@cache
def control(spec: KernelSpec, case: Case, sm_count: int) -> str:
    """Why that kernel is rejected: empty, as it should be."""
    return why_rejected(sound_kernel(spec), case, ORDERS, sm_count)


def caught_by(fault: Fault, sm_count: int = 1) -> str:
    """What rejects the faulty kernels, empty if nothing does. A GPU with few SMs gives a head few blocks, which then have more to do."""
    spec = fault.setting.spec(TARGET)
    faulty = emulated_kernel(spec, faulty_text(fault))
    for case in fault.setting.cases:
        assert not control(spec, case, sm_count), f"the kernel without the fault is rejected on {case.name}"
        try:
            if why := why_rejected(faulty, case, ORDERS, sm_count):
                return f"the numerics rule: {why}"
        except EmulatorFaultError as error:
            return str(error)
    return ""
