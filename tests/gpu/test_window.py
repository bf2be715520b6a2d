"""Sliding windows on a GPU: the numerics rule over seeded random cases of every family that has them, and calls in a CUDA graph."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import flashgen
from flashgen.build.gpu.driver import gpu
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation, loaded
from flashgen.verification.expected import Expected
from tests.support.plan import to_run

pytestmark = pytest.mark.gpu

CASES = 200  # of each family
GROUPS = 8  # tests, each of so many of a family's cases
WIDTHS = ((64, 64), (128, 128), (192, 128), (72, 40), (256, 256))
MOST_SCORES = 2**23  # of a case, so that float64 references take no minutes
HAVE_THEM = [family for family in families().values() if "window" in family.modifiers]


@dataclass(frozen=True)
class Case:
    """One call of a family's default kernel."""

    spec: KernelSpec
    workload: Workload
    magnitude: float
    apart: bool
    seed: int

    def fault(self) -> str:
        """What the rule has against the kernel; empty if nothing."""
        tensors = Tensors.random(self.spec.problem, self.workload, torch.Generator("cuda").manual_seed(self.seed))
        tensors["q"].mul_(self.magnitude)
        tensors.derive()
        tensors = tensors.apart() if self.apart else tensors.without_optional_inputs()
        run_once(loaded.kernels.load(self.spec, gpu(0)), tensors)
        verdict = Expected.of(tensors).judge(tensors)
        return "" if verdict.ok else f"{self}: {verdict.message}"


def end(draw: random.Random, longest: int) -> int:
    """Of a window: short, long, beyond all keys, negative or open."""
    most = draw.choice((3, 70, longest, 2 * longest))
    return draw.choice((OPEN, draw.randint(0, most), draw.randint(0, most), draw.randint(-most, most)))


def cases(family: Family) -> list[Case]:
    draw, target = random.Random(f"windows of {family.name}"), gpu(0).device.target
    orders = (False, True) if family.operation == "backward" else (False,)
    every = itertools.product(Dtype, WIDTHS, orders)
    drawn = (Problem(dtype, *width, Mask.FULL, family.operation, ordered, ("window",)) for dtype, width, ordered in every)
    problems = [problem for problem in drawn if not family.refusals(problem, target)]
    found: list[Case] = []
    while problems and len(found) < CASES:
        problem = draw.choice(problems)
        batch, kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 2, 4))
        len_q, len_kv = draw.randint(1, 1500), draw.randint(1, 1500)
        if batch * kv_heads * group * len_q * len_kv > MOST_SCORES or len_q * kv_heads * group * batch < 64:
            continue
        ends = end(draw, len_kv), end(draw, len_kv)
        workload = Workload(batch, kv_heads * group, kv_heads, len_q, len_kv, *ends)
        spec = KernelSpec(family, problem, family.default(problem, target), target)
        found.append(Case(spec, workload, draw.choice((1.0, 1.0, 3.0)), draw.random() < 0.4, len(found)))
    return found


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest) -> dict[str, list[Case]]:
    """The cases of every family that is asked for, whose kernels are compiled on all cores."""
    asked = {params["family"].name for params in to_run(request) if "family" in params}
    found = {family.name: cases(family) for family in HAVE_THEM if family.name in asked}
    specs = {case.spec for some in found.values() for case in some}
    for _ in compile_many([(spec, partial(compilation.compile_spec, spec)) for spec in specs], 0):
        pass
    return found


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("family", HAVE_THEM, ids=lambda family: family.name)
def test_random_cases_keep_the_rule(family: Family, group: int, drawn: dict[str, list[Case]]) -> None:
    mine = drawn[family.name][group::GROUPS]
    if not mine:
        pytest.skip(f"{family.name} has no kernels for this GPU")
    faults = [fault for case in mine if (fault := case.fault())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("family", HAVE_THEM, ids=lambda family: family.name)
def test_no_kernel_spills(family: Family, drawn: dict[str, list[Case]]) -> None:
    specs = {case.spec for case in drawn[family.name]}
    assert {spec.name: defects for spec in specs if (defects := compilation.compile_spec(spec).report.defects)} == {}


def test_a_window_in_a_graph_is_that_of_an_eager_call() -> None:
    q = torch.randn(2, 1000, 4, 64, device="cuda", dtype=torch.bfloat16)
    wanted = [flashgen.attention(q, q, q, window=(left, 0)) for left in (10, 300)]
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        found = [flashgen.attention(q, q, q, window=(left, 0)) for left in (10, 300)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_another_window_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2000, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    flashgen.attention(q, q, q, window=(1000, 0)).sum().backward()

    def compiled(spec: KernelSpec) -> None:
        raise AssertionError(f"{spec.name} is compiled")

    monkeypatch.setattr(compilation, "compile_spec", compiled)
    for window in ((999, 0), (70, None), (-5, 300)):
        flashgen.attention(q, q, q, window=window).sum().backward()
