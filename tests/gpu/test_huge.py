"""Huge logits on a GPU, by the cases of `huge.py`."""

from __future__ import annotations

import pytest

from flashgen.build.gpu.driver import gpu
from flashgen.launch.once import run_once
from flashgen.selection import loaded
from tests.support.huge import VARIANTS, Variant, cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_huge_logits(variant: Variant) -> None:
    on = gpu(0)
    if variant.refusals(on.device.target):
        pytest.skip(f"needs a GPU that {variant.family} can run on")
    found = []
    for spec in variant.specs(on.device.target, every=True):
        kernel = loaded.kernels.load(spec, on)
        for case in cases(spec.problem, variant.workload, every=True):
            tensors = case.make("cuda")
            run_once(kernel, tensors, {"scale": case.scale})
            found += [f"{spec.name} {case.name}: {why}" for why in case.rejections(tensors)]
    assert not found, "\n".join(found)
