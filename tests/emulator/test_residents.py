"""Blocks that are resident together: they wait for each other through memory, and a spin that never ends is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from tests.emulator.test_atoms import BY_NAME, halves
from tests.support.cases import Case
from tests.support.examples import families_of
from tests.support.probes import Probe, Words, compile_at_once
from tests.support.runs import emulated_kernel, launch

NAMES = [f"{order.schedule.name}-{'late' if order.late_copies else 'early'}" for order in ORDERS]
every_order = pytest.mark.parametrize("order", ORDERS, ids=NAMES)
ENDLESS = Probe(
    "endless",
    "if (block_index() == 1) while (ld_acquire_gpu(p.out + 1) != 7) {}\n    barrier_sync();",
    lambda: halves(1),
    2,
    blocks=2,
    resident=2,
)
# The flag is set by a plain store, of which nobody is told.
UNTOLD = Probe(
    "untold",
    "volatile u32* flag = p.out + 1; if (block_index() == 0) *flag = 7; else while (ld_acquire_gpu(p.out + 1) != 7) {}\n    out[0] = t;",
    lambda: halves(1),
    2,
    blocks=2,
    resident=2,
)
DEADLOCK = Probe("half-a-barrier", "if (block_index() == 1 && t % 64 < 32) barrier_sync();", lambda: halves(1), blocks=3, resident=3)
FLAGS = [BY_NAME[f"flag-of-block-{setter}"] for setter in (0, 1)]
ALONE = [dataclasses.replace(probe, resident=1) for probe in FLAGS]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    compile_at_once([*FLAGS, *ALONE, BY_NAME["meeting-of-blocks"], ENDLESS, UNTOLD, DEADLOCK])


def results(words: Words) -> Words:
    """The even words of the output: odd ones are for what threads share."""
    return words[::2]


@every_order
def test_blocks_wait_for_each_other(order: EmulationOrder) -> None:
    for setter in (0, 1):
        given, expected = halves(128), np.full(128, halves(128)[5])
        expected[setter * 64 : setter * 64 + 64] = given[setter * 64 : setter * 64 + 64]
        assert np.array_equal(results(FLAGS[setter].on_cpu(order)), expected)
    assert np.array_equal(results(BY_NAME["meeting-of-blocks"].on_cpu(order)), np.full(128, 128))


@every_order
def test_a_spin_that_never_ends(order: EmulationOrder) -> None:
    report = r"block 1: threads 0-63 spin at ld_acquire_gpu of 0x[0-9a-f]+, which stays 3735928559$"
    with pytest.raises(EmulatorFaultError, match=report) as caught:
        ENDLESS.on_cpu(order)
    assert caught.value.check == "spin that never ends"
    assert "block 0" not in str(caught.value), "that one has ended"


@every_order
def test_a_plain_store_ends_a_spin(order: EmulationOrder) -> None:
    assert np.array_equal(results(UNTOLD.on_cpu(order)), np.arange(128))


def test_blocks_that_wait_for_each_other_must_be_resident_together() -> None:
    with pytest.raises(EmulatorFaultError, match=r"block 0: threads 0-63 spin at .*must be resident together: 1 at a time are") as caught:
        ALONE[1].on_cpu(EmulationOrder())
    assert caught.value.check == "spin that never ends"
    # The first block sets the flag: then the second one finds it, resident or not.
    ALONE[0].on_cpu(EmulationOrder())


def test_a_deadlock_of_one_of_several_blocks() -> None:
    with pytest.raises(
        EmulatorFaultError, match=r"go on: block 1: threads 0-31 wait at barrier_sync 0; threads 32-63 have ended$"
    ) as caught:
        DEADLOCK.on_cpu(EmulationOrder())
    assert caught.value.check == "deadlock"


def test_blocks_that_do_not_wait_compute_the_same_together() -> None:
    (family, *_), target, problem = families_of(), find_target("sm_90a"), Problem(Dtype.FP16, 64)
    kernel = emulated_kernel(KernelSpec(family, problem, family.default(problem, target), target))
    case = Case("small", problem, Workload(1, 3, 1, 150, 200), 0.125)
    alone, together = case.make("cpu"), case.make("cpu")
    launch(kernel, case, alone)
    for order in ORDERS:
        launch(kernel, case, together, order, resident=2)
        assert torch.equal(alone.out.view, together.out.view)
        assert torch.equal(alone.lse.view, together.lse.view)
    with pytest.raises(ArgumentError, match=r"resident must be an integer from 1 to \d+; got 0"):
        launch(kernel, case, together, resident=0)
