"""Deterministic gradients in the emulator: right, the same to the bit in every order, and faults planted in how blocks take turns."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cache

import pytest

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from tests.support.deterministic import ALONE, ATOMIC, DIFFERENT, GENERIC, NARROW, PAIR, WIDE, OrderedCase
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text

FAMILIES = (GENERIC, NARROW, WIDE, PAIR)
# Lengths of queries and keys, and heads: tiles of one more than of the other, rows without keys under a causal mask, one tile, one row.
SIZES = (((200, 300), (2, 1)), ((300, 120), (2, 2)), ((60, 330), (4, 2)), ((40, 40), (1, 1)), ((1, 200), (2, 1)))
CASES = [OrderedCase(of, mask, *sizes) for sizes, mask, of in itertools.product(SIZES, Mask, FAMILIES)]
CASES += [OrderedCase(ALONE, mask, *SIZES[0]) for mask in Mask]
FULL, CAUSAL = OrderedCase(GENERIC, Mask.FULL), OrderedCase(GENERIC, Mask.CAUSAL)
NARROW_FULL, WIDE_FULL, PAIR_FULL = (OrderedCase(of, Mask.FULL) for of in (NARROW, WIDE, PAIR))
PAIR_LONG = OrderedCase(PAIR, Mask.FULL, lengths=(130, 700))  # several blocks are at their last query tile at once
SPINS = "spin that never ends"


@cache
def kernel_of(spec: KernelSpec) -> EmulatedKernel:
    return emulated_kernel(spec)


@pytest.mark.parametrize(
    "case",
    planned(
        CASES,
        0,  # a fault that is caught proves first that kernels without it are right
        family=lambda case: case.spec.family.name,
        kinds=lambda case: (case.mask, case.lengths),
        name=lambda case: case.name,
        seconds=lambda case: 2.0 if case.of in (ALONE, ATOMIC) else 8.0,
    ),
)
def test_right_and_the_same_in_every_order(case: OrderedCase) -> None:
    assert not case.why_rejected(kernel_of(case.spec))


@pytest.mark.parametrize(
    "case",
    planned(
        [OrderedCase(of, Mask.FULL, deterministic=False) for of in (*FAMILIES, ATOMIC)],
        0,
        family=lambda case: case.spec.family.name,
        kinds=lambda case: (),
        name=lambda case: case.name,
        seconds=lambda case: 2.0 if case.of in (ALONE, ATOMIC) else 8.0,
    ),
)
def test_others_differ_from_order_to_order(case: OrderedCase) -> None:
    """Else the test above would prove nothing."""
    assert case.why_rejected(kernel_of(case.spec)) == DIFFERENT


@cache
def control(case: OrderedCase) -> str:
    """What is wrong with the kernels without a fault: nothing, as it should be."""
    return case.why_rejected(kernel_of(case.spec))


@dataclass(frozen=True)
class Planted:
    """Replaces `find`, which occurs once in the text, by `replace`; the fault is `caught` so on the case."""

    name: str
    find: str
    replace: str
    case: OrderedCase
    caught: str

    def text(self) -> Source:
        """With the fault."""
        source = emulated_text(self.case.spec)
        assert source.text.count(self.find) == 1, f"{self.name} must find its text once: {self.find!r}"
        return Source(source.entry, source.text.replace(self.find, self.replace))


_WAIT = "            while (ld_acquire_gpu(semaphore) != own) {}\n"
_TAKEN = "        held = semaphore, next = own + 1;\n"
_BETWEEN = "        barrier_warp_sync();\n" * 8  # for others to come between
_PASSED = "        if (lane_index() == 0) st_release_gpu(semaphore, own + 1);\n" + _BETWEEN
_TAKES = "            if constexpr (Traits::kDeterministic) stages.keeper.wait_turn(state);\n"
_LOOKS = "            while (ld_acquire_gpu(semaphore) != own) {}\n"
_HANDS_OVER = "            mbarrier_arrive(turn(state.stage));\n"
_ADDED = "            wait_added(state, next.left == 1);\n"
_PASSES = "            st_release_gpu(semaphore, own + 1);\n"
_ADDS = "            d_q.add_to(p.d_q_sum + next.index * DQShare::Sums::kFloats, warp);  // while products are under way\n"
_FIRST_KEYS_FIRST = "(kLastFirst ? work.tile :", "(!kLastFirst ? work.tile :"
_WIDE_ADDED = "wait(stages.query_pipeline.empty(state.stage), state.parity);"
_ADDS_LAST = "        if constexpr (kLast) add_d_q();\n"
_RELEASES = "        release(stages.query_pipeline, own.stage);\n"
_ADDED_TO_ANY = "            state.advance();\n            wait(stages.d_out_pipeline.empty(state.stage), state.parity);\n"
FAULTS = [
    Planted("turn-passed-before-the-additions", _TAKEN, _PASSED, FULL, DIFFERENT),
    Planted("turn-not-waited-for", _WAIT, "{}\n", FULL, DIFFERENT),
    Planted("lanes-do-not-wait-for-the-first", _WAIT + "        barrier_warp_sync();\n", _WAIT, FULL, DIFFERENT),
    Planted("turn-one-late", "(end - 1) / kBlockKv - key_tile)", "(end - 1) / kBlockKv - key_tile + 1)", CAUSAL, SPINS),
    Planted("turns-of-the-whole-sequence", "((end = min(end, static_cast<const Links&>(chain).keys(last_query).end)), ...);",
            "end = chain.SequenceEnd::keys(last_query).end;", CAUSAL, SPINS),
    Planted("turns-of-the-first-query", "min(query_tile * kBlockQ + kBlockQ, len_q) - 1", "query_tile * kBlockQ", CAUSAL, SPINS),
    Planted("turn-not-passed-in-the-end", "    semaphore.release();\n    cp_async_wait", "    cp_async_wait", FULL, SPINS),
    Planted("semaphores-not-zeroed", "of_tile[thread_index()] = 0;", "{}", FULL, SPINS),
    Planted("semaphores-of-one-head", "p.d_q_semaphores + tile_index * kWarps", "p.d_q_semaphores + tile * kWarps", FULL, SPINS),
    Planted("first-keys-first", "key_tile_index = work.tile;", "key_tile_index = p.key_tiles - 1 - work.tile;", FULL, SPINS),
    Planted("keeper-does-not-look", _LOOKS, "", NARROW_FULL, DIFFERENT),
    Planted("keeper-does-not-wait-for-zeros", "        griddepcontrol_wait();  // for semaphores of zero\n", "", NARROW_FULL, SPINS),
    Planted("keeper-does-not-hand-over", _HANDS_OVER, "", NARROW_FULL, SPINS),
    Planted("keeper-passes-before-the-additions", _ADDED + _PASSES, _PASSES + _ADDED, NARROW_FULL, DIFFERENT),
    Planted("keeper-does-not-pass", _PASSES, "", NARROW_FULL, SPINS),
    Planted("keeper-looks-one-late", "(end - 1) / kBlockKv - key_tile)", "(end - 1) / kBlockKv - key_tile + 1)", NARROW_FULL, SPINS),
    Planted("keeper-of-one-head", "next.index * kSemaphores", "next.tile * kSemaphores", NARROW_FULL, SPINS),
    Planted("consumers-do-not-wait-for-the-keeper", _TAKES, "", NARROW_FULL, SPINS),
    Planted("consumers-add-before-their-turn", _TAKES + _ADDS, _ADDS + _TAKES, NARROW_FULL, DIFFERENT),
    Planted("narrow-semaphores-not-zeroed", "of_tile[thread_index()] = 0;", "{}", NARROW_FULL, SPINS),
    Planted("narrow-first-keys-first", *_FIRST_KEYS_FIRST, NARROW_FULL, SPINS),
    Planted("wide-turn-not-waited-for", "stages.keeper.wait_turn(state);", "{}", WIDE_FULL, DIFFERENT),
    Planted("wide-turn-passed-before-the-additions", _WIDE_ADDED, "{}", WIDE_FULL, SPINS),
    Planted("wide-first-keys-first", *_FIRST_KEYS_FIRST, WIDE_FULL, SPINS),
    Planted("pair-turn-not-waited-for", "stages.keeper.wait_turn(pending_state);", "{}", PAIR_FULL, DIFFERENT),
    Planted("pair-turn-of-the-next-tile", "stages.keeper.wait_turn(pending_state);", "stages.keeper.wait_turn(state);", PAIR_FULL, SPINS),
    Planted("pair-semaphores-of-one-block", "kPair>(p, chain, work, cluster_ctarank(),", "kPair>(p, chain, work, 0,", PAIR_FULL, SPINS),
    Planted("pair-turn-passed-before-the-additions", _ADDED_TO_ANY, "", PAIR_FULL, SPINS),
    Planted("pair-turn-passed-before-the-last-additions", _ADDS_LAST + _RELEASES, _RELEASES + _BETWEEN + _ADDS_LAST, PAIR_LONG,
            DIFFERENT),
    Planted("pair-first-keys-first", *_FIRST_KEYS_FIRST, PAIR_FULL, SPINS),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    running = to_run(request)
    cases = {params["case"] for params in running if "case" in params} | {params["fault"].case for params in running if "fault" in params}
    texts = [emulated_text(case.spec) for case in cases]
    compile_ahead([*texts, *(params["fault"].text() for params in running if "fault" in params)])


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        0,
        family=lambda fault: fault.case.spec.family.name,
        kinds=lambda fault: (fault.case, fault.caught),
        name=lambda fault: fault.name,
        seconds=lambda fault: 5.0,
        fault=True,
    ),
)
def test_caught(fault: Planted) -> None:
    assert not control(fault.case), "the kernels without the fault are rejected"
    why = fault.case.why_rejected(emulated_kernel(fault.case.spec, fault.text()))
    assert why, f"fault {fault.name} was accepted"
    assert fault.caught in why


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({dataclasses.astuple(case) for case in CASES}) == len(CASES)
