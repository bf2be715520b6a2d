"""Launches that overlap, on the CPU: blocks begin in every order, and who does not wait for the launch before is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulatedKernel, EmulationOrder, Schedule
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.program import KernelLaunch, Program
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from flashgen.verification import debug
from tests.support.overlapping import ADD, HAND_OUT, WAIT, Overlapping
from tests.support.overlapping import overlapping as overlapping
from tests.support.runs import emulated_kernel, emulated_text
from tests.support.two_steps import TwoStepsConfig

PROBLEM, ROWS = Problem(Dtype.BF16, 8), 400
EXPECTED = torch.arange(ROWS) * 2 + 0.5
NO_WAIT = "ends the block, which has not waited for the launch that this one overlaps"


def spec_of(family: Overlapping) -> KernelSpec:
    return KernelSpec(family, PROBLEM, TwoStepsConfig(), find_target("sm_90a"))


def tensors_of(rows: int) -> Tensors:
    return Tensors.random(PROBLEM, Workload(1, 1, 1, rows, 3), torch.Generator().manual_seed(0))


def faulty(spec: KernelSpec, find: str, replace: str) -> EmulatedKernel:
    source = emulated_text(spec)
    assert source.text.count(find) == 1
    return emulated_kernel(spec, Source(source.entry, source.text.replace(find, replace)))


def right_rows(kernel: EmulatedKernel, order: EmulationOrder, workers: int = 1) -> torch.Tensor:
    """Which rows come out as they must, on so many cores."""
    tensors, spec = tensors_of(ROWS), kernel.spec
    program = spec.family.program(spec.config, tensors.call({"scale": 0.5}), device_of_target(spec.target))
    given = {"lse": cpu.view_of("lse", tensors["lse"], writable=True)}
    kernel.launch(program, given, order, workers=workers)
    return tensors["lse"].flatten() == EXPECTED


@pytest.mark.parametrize("workers", [1, 2])
def test_every_order_is_right(overlapping: Overlapping, workers: int) -> None:
    kernel = emulated_kernel(spec_of(overlapping))
    for order in ORDERS:
        assert right_rows(kernel, order, workers).all(), order


@pytest.mark.parametrize("rows", [1, 32, 70])
def test_few_blocks(overlapping: Overlapping, rows: int) -> None:
    tensors = tensors_of(rows)
    cpu.run_on_cpu(cpu.load_emulated(spec_of(overlapping)), tensors, {"scale": 0.5})
    assert torch.equal(tensors["lse"].flatten(), EXPECTED[:rows])


def test_blocks_begin_before_between_and_after_those_of_the_launch_before(overlapping: Overlapping) -> None:
    kernel = faulty(spec_of(overlapping), WAIT + ADD, ADD + WAIT)  # a sum that is cleared after the addition is lost
    right = {schedule: right_rows(kernel, EmulationOrder(schedule)) for schedule in Schedule}
    assert right[Schedule.AHEAD].all(), "after all of them"
    assert not right[Schedule.REVERSED][1:128].any(), "before the first one: four blocks may; row 0 adds 0"
    assert right[Schedule.REVERSED][128:].all(), "after all of them"
    for schedule in (Schedule.ROUND_ROBIN, Schedule.RANDOM):
        assert right[schedule].any(), "between them"
        assert not right[schedule].all(), "between them"


def test_what_is_read_before_the_wait_is_not_there(overlapping: Overlapping) -> None:
    kernel = faulty(spec_of(overlapping), WAIT + HAND_OUT, HAND_OUT + WAIT)
    for schedule in (Schedule.ROUND_ROBIN, Schedule.REVERSED, Schedule.RANDOM):
        assert not right_rows(kernel, EmulationOrder(schedule), workers=2).all()


@pytest.mark.parametrize(("line", "instead"), [(ADD, f"    if (block_index() != 7) {{ {WAIT.strip()} }}\n"), (HAND_OUT, "")])
def test_every_block_waits(overlapping: Overlapping, line: str, instead: str) -> None:
    kernel = faulty(spec_of(overlapping), WAIT + line, instead + line)
    for schedule in Schedule:
        with pytest.raises(EmulatorFaultError, match=NO_WAIT) as caught:
            right_rows(kernel, EmulationOrder(schedule))
        assert caught.value.check == "overlap"
        assert "block 7:" in str(caught.value) or not instead


def test_one_thread_waits_for_all(overlapping: Overlapping) -> None:
    """As on a GPU, where the others must learn of it from that one."""
    kernel = faulty(spec_of(overlapping), WAIT + ADD, f"    if (thread_index() == 0) {WAIT.strip()}\n    barrier_warp_sync();\n" + ADD)
    for order in ORDERS:
        assert right_rows(kernel, order).all()


@pytest.mark.slow
def test_a_plain_launch_has_nothing_to_wait_for(overlapping: Overlapping, tmp_path: Path) -> None:
    for kernel in ("_clear", "", "_hand_out"):
        done = debug.run_blocks(spec_of(overlapping), tensors_of(70), tmp_path / f"of{kernel}", kernel=kernel, blocks=3)
        assert done.fault is None


def test_the_text_compiles(overlapping: Overlapping) -> None:
    assert compile_source(render(spec_of(overlapping)), "sm_90a").report.defects == []


def test_chains() -> None:
    plain, more, last = KernelLaunch(1, {}), KernelLaunch(2, {}, overlaps=True), KernelLaunch(3, {}, overlaps=True)
    assert Program((plain, more, plain, plain, last, more)).chains == ((plain, more), (plain,), (plain, last, more))
    assert Program((more, plain)).chains == ((more,), (plain,)), "the first one overlaps what others have put into the stream"
