"""Every way in which tensors of the GPU's cases lie in memory, on the CPU: a kernel gives what it gives for dense ones."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors, untouched
from flashgen.verification.expected import Expected
from tests.support.cases import Layout
from tests.support.examples import families_of, taken
from tests.support.plan import planned

PROBLEM, TARGET = Problem(Dtype.BF16, 64, 64, Mask.FULL), find_target("sm_90a")
QUICK = 2  # of each family for every run; --slow has all
ORDINARY, SINGLE = Workload(2, 2, 2, 70, 100), Workload(1, 1, 1, 70, 100)


@cache
def kernel_of(family: Family) -> EmulatedKernel:
    return cpu.load_emulated(KernelSpec(family, PROBLEM, family.default(PROBLEM, TARGET), TARGET))


@cache
def dense(family: Family, workload: Workload) -> Tensors:
    """With the results of the kernel, which are right."""
    tensors = Tensors.random(PROBLEM, workload, torch.Generator().manual_seed(2))
    cpu.run_on_cpu(kernel_of(family), tensors)
    assert Expected.of(tensors).judge(tensors).ok
    return tensors


def laid(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same values, in memory of which rows that lie far apart leave the rest untouched."""
    strides = layout.strides(tensor.shape)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
    memory = torch.frombuffer(untouched(span * tensor.element_size()), dtype=tensor.dtype)
    return memory.as_strided(tuple(tensor.shape), strides).copy_(tensor)


@pytest.mark.parametrize(
    ("family", "layout", "mixed"),
    planned(
        itertools.product(families_of(), Layout, (False, True)),
        QUICK,
        family=lambda one: one[0].name,
        kinds=lambda one: one[1:],
        name=lambda one: f"{one[0].name}-{one[1].value}-{'mixed' if one[2] else 'all'}",
        seconds=lambda one: 0.2,
    ),
)
def test_a_layout_gives_what_dense_tensors_give(family: Family, layout: Layout, mixed: bool) -> None:
    """All four tensors have it, or each has another one of those that follow."""
    workload = taken(family, PROBLEM, SINGLE if layout is Layout.SINGULAR else ORDINARY)
    expected, every = dense(family, workload), list(Layout)
    after = [every[(every.index(layout) + place * mixed) % len(every)] for place in range(4)]
    names = dict(zip(("q", "k", "v", "out"), after, strict=True))
    tensors = expected.replacing(lse=expected["lse"].clone(), **{name: laid(expected[name], of) for name, of in names.items()})
    assert not family.call_refusals(tensors.call(), kernel_of(family).spec.config)
    cpu.run_on_cpu(kernel_of(family), tensors)
    assert torch.equal(tensors["out"], expected["out"])
    assert torch.equal(tensors["lse"], expected["lse"])
