"""Every planted fault is caught in the emulator: races by its checks in one launch, the rest by those or by the numerics rule."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.cases import Case
from tests.support.caught import IN_FLIGHT, OVERWRITE, TWICE, caught_by, compile_planted, listed
from tests.support.fault import Fault, setting
from tests.support.faults import FAULTS

MAX_PAIRS = 2**21  # of queries and keys: a second or two

RACES, OTHERS = ([fault for fault in FAULTS if fault.race is race] for race in (True, False))
# By which check each is caught: with a barrier missing before a read, before an overwrite, a wait missing or one group short.
RACE_CHECKS = {
    "barrier-before-queries": IN_FLIGHT,
    "barrier-before-query-fragments": IN_FLIGHT,
    "barrier-before-a-stage": OVERWRITE,
    "stage-loaded-before-the-barrier": OVERWRITE,
    "barrier-before-output": OVERWRITE,
    "output-in-the-place-of-another-warp": TWICE,
    "sums-in-the-place-of-another-warp": TWICE,
    "first-wait-removed": IN_FLIGHT,
    "first-wait-one-group-short": IN_FLIGHT,
    "wait-removed": IN_FLIGHT,
    "wait-one-group-short": IN_FLIGHT,
    "wait-one-group-short-of-three-stages": IN_FLIGHT,
}
# How many of a family's faults every run has, of each kind; --slow has all.
QUICK_RACES, QUICK_OTHERS, QUICK_OF_THE_RUNTIME, QUICK_NUMBERS = 1, 1, 1, 0

# Faults of the emulator: what no GPU would show reliably, or at all. Each with the check that finds it.
SMALL = setting((40, 100), batch=1, heads=(1, 1))
_SUMS = "last_stage = ring + (kStages - 1) * kStageBytes;"
_STORE_BEHIND = "\n    if (thread_index() == 0) store_shared(sums + Softmax::kBytes + kRedZone, 0);"
_TAKE = "const QueryTile query_tile{regions.take(kQueryBytes)};"
RUNTIME = [
    ("deadlock", Fault("warp-that-leaves", _TAKE, _TAKE + "\n    if (warp_index() == 0) return;", SMALL)),
    (
        "spin that never ends",
        Fault(
            "spin-that-never-ends",
            _TAKE,
            _TAKE + "\n    for (const u32* flag = reinterpret_cast<const u32*>(p.lse); *flag != 7;) "
            'emulator::current->spins("flag", flag, *flag);',
            SMALL,
        ),
    ),
    (
        "divergence",
        Fault(
            "vote-of-half-the-lanes",
            _TAKE,
            _TAKE + "\n    if (lane_index() < 16) vote_sync_any(true);\n    else barrier_warp_sync();",
            SMALL,
        ),
    ),
    (
        "write to a red zone",
        Fault("overrun-into-the-next-region", _TAKE, _TAKE + "\n    store_shared(query_tile.base + kQueryBytes, 0);", SMALL),
    ),
    (
        "write over what another lane may still read, with no barrier between",
        Fault("off-by-one-shared-index", "load_shared_v4(slot)", "load_shared_v4(slot + 16)", SMALL),
    ),
    ("shared access outside of the block's memory", Fault("overrun-past-the-last-region", _SUMS, _SUMS + _STORE_BEHIND, SMALL)),
    (
        "shared memory claim",
        Fault("region-too-large", "sums = regions.take(Softmax::kBytes);", "sums = regions.take(Softmax::kBytes + 16);", SMALL),
    ),
    (
        "a different one",
        Fault(
            "regions-of-each-warp",
            "    SharedRegions regions;",
            "    SharedRegions regions;\n    regions.next += warp_index() * 16;",
            SMALL,
        ),
    ),
    ("outside of the block's memory", Fault("past-the-end", _TAKE, _TAKE + "\n    store_shared(1u << 20, 0);", SMALL)),
    ("misaligned", Fault("misaligned-store", _TAKE, _TAKE + "\n    store_shared(query_tile.base + 2, 0);", SMALL)),
    ("outside of the tensors", Fault("copy-from-nowhere", "queries_in(q, p.q_row);", "queries_in(q - 100000, p.q_row);", SMALL)),
]
# Faults that break no rule of memory: wrong numbers are all there is to see.
NUMBERS = [
    Fault("wrong-swizzle-on-one-side", "offsets.at(values, slice * 16, j));", "offsets.at(values, slice * 16, j) ^ 16);", SMALL),
    Fault("wrong-fragment-map", "S[i][j], a[i], b[0], b[1]);", "S[i][j], a[i], b[1], b[0]);", SMALL),
]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_planted(request)


def forms(fault: Fault) -> list[Case]:
    """A fault's cases, each with one key/value head as well, smallest first: those for a GPU are large so that races show there.

    A fault that only several heads, or long rows, show is met in a larger one.
    """
    found = []
    for case in fault.setting.cases:
        w = case.workload
        if w.batch * w.heads_q * w.len_q * w.len_kv > 2 * MAX_PAIRS:
            w = dataclasses.replace(w, batch=1, heads_q=1, heads_kv=1, len_q=min(w.len_q, 512), len_kv=min(w.len_kv, 512))
        one = dataclasses.replace(w, batch=1, heads_q=w.heads_q // w.heads_kv, heads_kv=1)
        found += [dataclasses.replace(case, workload=workload) for workload in dict.fromkeys((one, w))]
    return sorted(found, key=lambda case: case.workload.batch * case.workload.heads_q * case.workload.len_q * case.workload.len_kv)


def smallest(fault: Fault) -> list[Case]:
    """What most faults take: the kernel without them runs once for many."""
    return forms(fault)[:1]


def caught_in_a_form(fault: Fault) -> str:
    """What rejects the faulty kernel, empty if nothing does."""
    return caught_by(fault, cases=forms(fault))


@pytest.mark.parametrize("fault", listed(RACES, QUICK_RACES, lambda fault: (RACE_CHECKS[fault.name], fault.setting.config), smallest))
def test_a_race_is_caught_by_the_check_for_it(fault: Fault) -> None:
    caught = caught_in_a_form(fault)
    assert caught.startswith("shared memory: ")
    assert RACE_CHECKS[fault.name] in caught


@pytest.mark.parametrize("fault", listed(OTHERS, QUICK_OTHERS, lambda fault: (fault.setting.config,), smallest))
def test_caught(fault: Fault) -> None:
    assert caught_in_a_form(fault), f"fault {fault.name} was accepted"


@pytest.mark.parametrize("fault", listed(dict(RUNTIME).values(), QUICK_OF_THE_RUNTIME, lambda fault: (), smallest))
def test_caught_by_its_check(fault: Fault) -> None:
    (check,) = (check for check, planted in RUNTIME if planted is fault)
    assert check in caught_in_a_form(fault)


@pytest.mark.parametrize("fault", listed(NUMBERS, QUICK_NUMBERS, lambda fault: (), smallest))
def test_caught_by_the_numerics_rule(fault: Fault) -> None:
    assert caught_in_a_form(fault).startswith("the numerics rule: ")


def test_a_deadlock_and_a_spin_say_who_waits_where() -> None:
    faults = dict(RUNTIME)
    assert "threads 0-31 have ended; threads 32-127 wait at barrier_sync 0" in caught_in_a_form(faults["deadlock"])
    assert "threads 0-127 spin at flag of 0x" in caught_in_a_form(faults["spin that never ends"])
