"""Rows whose last scores that the kernel meets are nearly so far above the stale row max as it may be, and alone count in lse."""

from __future__ import annotations

import pytest

from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from tests.support.cases import Case
from tests.support.plan import of_family
from tests.support.runs import emulated_kernel, launch


@pytest.mark.slow
@of_family("attention_forward_sm90", 2.0)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a row max may be 2^72 too low; 2^12 costs peaked inputs too much: see log")
@pytest.mark.parametrize("head_dim", [128, 144])
def test_lse_of_logits_that_fall_from_the_first_key_on(head_dim: int) -> None:
    """It walks from the last key to the first."""
    family, target, problem = (
        find_family("attention_forward_sm90"),
        find_target("sm_90a"),
        Problem(Dtype.BF16, head_dim, head_dim, Mask.FULL),
    )
    case = Case("falling", problem, Workload(1, 2, 1, 31, 640), head_dim**-0.5, magnitude=1.0, seed=11, rising=-44.0)
    tensors = case.make("cpu")
    tensors.k.copy_(tensors.k.flip(1))
    launch(emulated_kernel(KernelSpec(family, problem, family.default(problem, target), target)), case, tensors)
    assert not case.rejections(tensors)
