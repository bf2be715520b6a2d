"""The block sizes of FlashAttention's first paper, and that its kernels tell them."""

from __future__ import annotations

import pytest

from flashgen.codegen.family import find_family
from flashgen.codegen.flash1 import paper_block_sizes
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target


@pytest.mark.parametrize(
    ("arch", "head_dim", "queries", "keys"),
    [("sm_80", 64, 64, 326), ("sm_86", 128, 99, 99), ("sm_90a", 32, 32, 908), ("sm_90a", 128, 128, 227)],
)
def test_a_step_of_the_paper_fills_the_shared_memory(arch: str, head_dim: int, queries: int, keys: int) -> None:
    problem, target = Problem(Dtype.FP16, head_dim), find_target(arch)
    assert paper_block_sizes(problem, target) == (queries, keys)
    elements = target.shared_memory_per_block // 2
    assert 4 * head_dim * (keys - 1) < elements <= 4 * head_dim * keys


@pytest.mark.parametrize("family", ["flash1_forward", "flash1_backward"])
def test_a_kernel_tells_them_beside_its_own(family: str) -> None:
    chosen, target = find_family(family), find_target("sm_90a")
    problem = Problem(Dtype.FP16, 64, operation=chosen.operation)
    config = chosen.default(problem, target)
    text = render(KernelSpec(chosen, problem, config, target)).text
    header = " ".join(line.removeprefix("// ") for line in text.splitlines()[:25])
    assert "Tiles by line 1: 64 queries, 454 keys." in header
    assert config.describe().partition(", stages")[0] in header
