"""Huge logits on the CPU, by the cases of `tests/support/huge.py`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from flashgen.codegen.target import find_target
from flashgen.launch import cpu
from tests.support.huge import VARIANTS, Variant, cases
from tests.support.plan import planned

QUICK = {"attention_forward_sm90": 1}  # variants of a family for every run; --slow has all, and every case


def listed(every: bool, each: Mapping[str, int]) -> list[object]:
    """As parameters, of which every run has `each` of a family."""
    return planned(
        itertools.product(VARIANTS, [every]),
        lambda family: each.get(family, 0),
        family=lambda one: one[0].family,
        kinds=lambda one: one,
        name=lambda one: f"{one[0]}-{'every' if one[1] else 'some'}",
        seconds=lambda one: 20.0 if one[1] else 3.0,
    )


@pytest.mark.parametrize(("variant", "every"), [*listed(False, QUICK), *listed(True, {})])
def test_huge_logits(variant: Variant, every: bool) -> None:
    found = []
    for spec in variant.specs(find_target("sm_90a"), every):
        kernel = cpu.load_emulated(spec)
        for case in cases(spec.problem, variant.workload, every):
            tensors = case.make("cpu")
            cpu.run_on_cpu(kernel, tensors, {"scale": case.scale})
            found += [f"{spec.name} {case.name}: {why}" for why in case.rejections(tensors)]
    assert not found, "\n".join(found)
