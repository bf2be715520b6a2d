"""Planted faults of the ladder's families: what their kernels have in common, and what each family's file lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.caught import TARGET, caught_by, listed
from tests.support.fault import Fault

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


def listed_faults(faults: Sequence[Fault]) -> list[object]:
    """As parameters, all for --slow: every run has faults of the families whose parts these share."""
    return listed(faults, 0, kinds=lambda fault: (fault.setting.spec(TARGET).name,))


def caught_on_one_sm(fault: Fault) -> str:
    """What rejects the faulty kernels, empty if nothing does. A GPU with one SM gives a head few blocks, which then have more to do."""
    return caught_by(fault, sm_count=1)
