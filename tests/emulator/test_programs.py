"""Programs of several launches on the CPU: each kernel of a text is run, in order, and what they hand over is in a buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from flashgen.verification import debug
from tests.support.two_steps import InClusters, TwoSteps, TwoStepsConfig
from tests.support.two_steps import two_steps as two_steps

PROBLEM, SM_90 = Problem(Dtype.BF16, 8), find_target("sm_90a")


def in_clusters() -> KernelSpec:
    return KernelSpec(InClusters(), PROBLEM, TwoStepsConfig(), SM_90)


def tensors_of(rows: int) -> Tensors:
    return Tensors.random(PROBLEM, Workload(1, 2, 1, rows, 3), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [1, 32, 70])
def test_launches_follow_each_other(two_steps: TwoSteps, rows: int) -> None:
    spec = KernelSpec(two_steps, PROBLEM, TwoStepsConfig(), SM_90)
    tensors = tensors_of(rows)
    cpu.run_on_cpu(cpu.load_emulated(spec), tensors, {"scale": 0.5})
    assert tensors["lse"].flatten().tolist() == [2 * row + 0.5 for row in range(2 * rows)]


def test_the_text_has_both_kernels(two_steps: TwoSteps) -> None:
    spec = KernelSpec(two_steps, PROBLEM, TwoStepsConfig(), SM_90)
    artifact = compile_source(render(spec), "sm_90a")
    assert artifact.report.entries.keys() == {spec.name, f"{spec.name}_add"}
    assert artifact.report.defects == []


@pytest.mark.usefixtures("two_steps")
def test_clusters_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tensors = in_clusters(), tensors_of(64)
    kernel = cpu.load_emulated(spec)
    cpu.run_on_cpu(kernel, tensors, {"scale": 0.5})
    assert tensors["lse"].flatten().tolist() == [2 * row + 0.5 for row in range(128)]
    with pytest.raises(ArgumentError, match=r"^grid must be a multiple of 2, the blocks of a cluster; got 5$"):
        cpu.run_on_cpu(kernel, tensors_of(70))
    monkeypatch.setattr(InClusters, "resources", TwoSteps.resources)
    with pytest.raises(EmulatorFaultError, match=r"the launch's clusters have 1 blocks, the kernel's text says 2$") as caught:
        cpu.run_on_cpu(kernel, tensors)
    assert caught.value.check == "launch"


@pytest.mark.usefixtures("two_steps")
def test_whole_clusters_are_debugged(tmp_path: Path) -> None:
    spec, tensors = in_clusters(), tensors_of(64)
    for block, blocks, name in ((1, 2, "block"), (2, 1, "blocks")):
        with pytest.raises(ArgumentError, match=f"^{name} must be a multiple of 2, the blocks of a cluster; got 1$"):
            debug.run_blocks(spec, tensors, tmp_path, block=block, blocks=blocks)


@pytest.mark.slow
@pytest.mark.usefixtures("two_steps")
def test_a_cluster_in_a_program_of_its_own(tmp_path: Path) -> None:
    assert debug.run_blocks(in_clusters(), tensors_of(64), tmp_path, block=2, blocks=2).fault is None


def test_the_text_has_the_clusters_that_blocks_have(two_steps: TwoSteps) -> None:
    assert "__cluster_dims__(2, 1, 1)\n" in render(in_clusters()).text
    assert compile_source(render(in_clusters()), "sm_90a").report.defects == []
    assert "cluster" not in render(KernelSpec(two_steps, PROBLEM, TwoStepsConfig(), SM_90)).text
