"""Softmax kernels on the GPU: the numerics rule on all cases, rows of odd values, and the wrong control."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.verification.screen import verify_kernel
from tests.support.examples import families_of


def kernel_of(family: Family, dtype: Dtype) -> Kernel:
    on, problem = gpu(0), Problem(dtype, operation="softmax")
    spec = KernelSpec(family, problem, family.default(problem, on.device.target), on.device.target)
    return Kernel(spec, compile_source(render(spec), on.device.target.name), on)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("family", families_of("softmax"), ids=lambda family: str(family.name))
def test_the_rule_on_all_cases(family: Family, dtype: Dtype) -> None:
    """One that is wrong on purpose is rejected."""
    failed = [result.verdict.message for result in verify_kernel(kernel_of(family, dtype)) if not result.verdict.ok]
    assert (not failed) is family.correct, failed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("family", [family for family in families_of("softmax") if family.correct], ids=lambda family: str(family.name))
def test_rows_of_odd_values(family: Family, dtype: Dtype) -> None:
    """A row of -inf gives 0, one with NaN or +inf gives NaN in all columns, as in PyTorch, and rows beside them are what they would be."""
    tensors = Tensors.random(Problem(dtype, operation="softmax"), Workload(1, 1, 1, 5, 300), torch.Generator("cuda").manual_seed(0))
    rows = tensors["x"][0, 0]
    rows[0], rows[1, 7], rows[2, 299] = -math.inf, math.nan, math.inf
    rows[3, :299] = -math.inf
    run_once(kernel_of(family, dtype), tensors)
    y = tensors["y"][0, 0]
    assert (y[0] == 0).all()
    assert y[1:3].isnan().all()
    assert y[3, 299] == 1
    assert (y[3, :299] == 0).all()
    torch.testing.assert_close(y[4].double(), torch.softmax(rows[4].double(), -1), rtol=1e-2 if dtype is Dtype.BF16 else 1e-3, atol=1e-7)
