"""Programs of several launches on the CPU: each kernel of a text is run, in order, and what they hand over is in a buffer."""

from __future__ import annotations

import pytest
import torch

from flashgen.build.nvrtc import compile_source
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from tests.support.two_steps import TwoSteps, TwoStepsConfig
from tests.support.two_steps import two_steps as two_steps

PROBLEM, SM_90 = Problem(Dtype.BF16, 8), find_target("sm_90a")


@pytest.mark.parametrize("rows", [1, 32, 70])
def test_launches_follow_each_other(two_steps: TwoSteps, rows: int) -> None:
    spec = KernelSpec(two_steps, PROBLEM, TwoStepsConfig(), SM_90)
    tensors = Tensors.random(PROBLEM, Workload(1, 2, 1, rows, 3), torch.Generator().manual_seed(0))
    cpu.run_on_cpu(cpu.load_emulated(spec), tensors, {"scale": 0.5})
    assert tensors["lse"].flatten().tolist() == [2 * row + 0.5 for row in range(2 * rows)]


def test_the_text_has_both_kernels(two_steps: TwoSteps) -> None:
    spec = KernelSpec(two_steps, PROBLEM, TwoStepsConfig(), SM_90)
    artifact = compile_source(render(spec), "sm_90a")
    assert artifact.report.entries.keys() == {spec.name, f"{spec.name}_add"}
    assert artifact.report.defects == []
