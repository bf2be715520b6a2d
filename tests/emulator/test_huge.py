"""Huge logits on the CPU, by the cases of `tests/support/huge.py`."""

from __future__ import annotations

import pytest

from flashgen.codegen.target import find_target
from flashgen.launch import cpu
from tests.support.huge import VARIANTS, Variant, cases


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_huge_logits(variant: Variant, every: bool) -> None:
    found = []
    for spec in variant.specs(find_target("sm_90a"), every):
        kernel = cpu.load_emulated(spec)
        for case in cases(spec.problem, variant.workload, every):
            tensors = case.make("cpu")
            cpu.run_on_cpu(kernel, tensors, {"scale": case.scale})
            found += [f"{spec.name} {case.name}: {why}" for why in case.rejections(tensors)]
    assert not found, "\n".join(found)
