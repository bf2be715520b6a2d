"""The backward pass of FlashAttention-2 where warps divide the queries, in the emulator: right, and the same to the bit in every order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
import torch

from flashgen.build.emulator.kernel import ORDERS, EmulationOrder, Schedule
from flashgen.codegen.families.flash2_backward.config import Flash2BackwardConfig
from flashgen.codegen.families.flash2_backward.family import FAMILY
from flashgen.codegen.ladder import WarpSplit
from flashgen.codegen.problem import Dtype, Mask
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.verification.cases import COARSE, FAR, HUGE, LONG
from flashgen.verification.screen import Screen
from tests.emulator.test_backward_kernels import LENGTHS, SM_90, loaded, problem_of, require_right, tensors_of
from tests.support.plan import planned

CONFIG = Flash2BackwardConfig(64, 32, 4, warp_split=WarpSplit.QUERIES)
DTYPES = (Dtype.FP16, Dtype.BF16)
SPECIAL = {"huge": HUGE, "coarse": COARSE, "far": FAR, "long": LONG}
T = TypeVar("T")


def spec_of(dtype: Dtype, mask: Mask) -> KernelSpec:
    return KernelSpec(FAMILY, problem_of(mask, dtype), CONFIG, SM_90)


def listed(cases: Iterable[T], name: Callable[[T], str]) -> list[object]:
    """As parameters, all of them slow."""
    return planned(cases, 0, family=lambda one: FAMILY.name, kinds=lambda one: (one,), name=name, seconds=lambda one: 6.0)


@pytest.mark.parametrize(("dtype", "mask"), listed(itertools.product(DTYPES, Mask), lambda one: f"{one[0].value}-{one[1].value}"))
def test_right_in_every_order(dtype: Dtype, mask: Mask) -> None:
    """Warps add up dK and dV in one order, and dQ of a query tile is a sum over blocks in whatever order."""
    spec, found = spec_of(dtype, mask), []
    tensors = tensors_of(spec.problem, Workload(1, 4, 2, 150, 100)).apart()
    for order in (*ORDERS, EmulationOrder(Schedule.RANDOM, late_copies=True, seed=1)):
        require_right(spec, tensors, order)
        found.append((tensors["d_k"].clone(), tensors["d_v"].clone()))
    assert all(torch.equal(one, other) for some in found for one, other in zip(some, found[0], strict=True))


@pytest.mark.parametrize(("dtype", "mask"), listed(itertools.product(DTYPES, Mask), lambda one: f"{one[0].value}-{one[1].value}"))
def test_lengths(dtype: Dtype, mask: Mask) -> None:
    spec = spec_of(dtype, mask)
    for index, lengths in enumerate(LENGTHS):
        tensors = tensors_of(spec.problem, Workload(2, 2, 1, *lengths))
        require_right(spec, tensors.apart() if index % 2 else tensors.without_optional_inputs())


@pytest.mark.parametrize("name", listed(SPECIAL, str))
def test_special_cases(name: str) -> None:
    spec, case = spec_of(Dtype.BF16, Mask.CAUSAL), SPECIAL[name]
    (result,) = Screen(spec.problem, "cpu", (), special=(case,)).judge(loaded(spec))
    assert result.verdict.ok, result.verdict.message
