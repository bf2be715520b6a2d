"""Whole kernels in the emulator and on a GPU: the same spec, the same tensors, results that differ by rounding alone."""

from __future__ import annotations

import functools

import pytest
import torch

from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_many
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.selection.families import family_of
from tests.support.cases import Case, Layout
from tests.support.configs import CHOSEN, CHOSEN_SM90
from tests.support.examples import families_of
from tests.support.runs import compiled, emulated_kernel, launch

pytestmark = pytest.mark.gpu

OUT_ULPS = 2  # of the dtype, at the largest value of the row
LSE_ERROR = 1e-5
ULP_OF_ONE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
PADDED = (Layout.PADDED,) * 4


def chosen_cases() -> list[Case]:
    """Every chosen config, dtypes and masks in turn, at lengths that are no multiples of its tiles."""
    cases = []
    for i, (width, config) in enumerate((*CHOSEN, *CHOSEN_SM90)):
        problem = Problem(list(ELEMENTS)[i % 2], *width, list(Mask)[i // 2 % 2])
        name = f"{config.name}-{problem.name}"
        workload = Workload(1, max(4, 2 * family_of(config).group_unit(config)), 2, 77, 205)
        cases.append(Case(name, problem, workload, problem.head_dim**-0.5, chosen=config, seed=i))
    return cases


def default_cases() -> list[Case]:
    """The default config of each head dim: full with large logits, and causal with rows that see no key."""
    cases = []
    for width in (24, 40, 64, 80, 96, 128, 160, 192, 256):
        full, causal = Problem(Dtype.BF16, width, width), Problem(Dtype.FP16, width, width, Mask.CAUSAL)
        cases.append(Case(full.name, full, Workload(2, 2, 2, 130, 260), width**-0.5, magnitude=4.0, layouts=PADDED))
        cases.append(Case(causal.name, causal, Workload(1, 2, 1, 150, 90), width**-0.5, rising=40.0))
    return cases


PAIRS = [
    (family, case)
    for family in families_of()
    for case in (*chosen_cases(), *default_cases())
    if case.chosen is None or isinstance(case.chosen, family.config_type)
]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    """The emulated libraries on all cores: one after the other they would take most of the time."""
    target = gpu(0).device.target
    texts = dict.fromkeys(case.spec(family, target) for family, case in PAIRS if not case.refusals(family, target))
    list(compile_many((spec, functools.partial(compiled, render(spec, Atoms.EMULATED))) for spec in texts))


def spec_of(family: Family, case: Case) -> KernelSpec:
    target = gpu(0).device.target
    if reasons := case.refusals(family, target):
        pytest.skip("; ".join(reasons))
    return case.spec(family, target)


@pytest.mark.parametrize(("family", "case"), PAIRS, ids=[f"{family.name}-{case.name}" for family, case in PAIRS])
def test_agrees(family: Family, case: Case) -> None:
    spec = spec_of(family, case)
    here, there = case.make("cpu"), case.make("cuda")
    for mine, copy in ((here.q, there.q), (here.k, there.k), (here.v, there.v)):
        copy.copy_(mine)
    launch(emulated_kernel(spec), case, here)
    case.launch(Kernel(spec, ArtifactStore().get_or_compile(render(spec), spec.target.name), gpu(0)), there)

    out, expected = here.out.view.double(), there.out.view.cpu().double()
    ulp = torch.exp2(expected.abs().amax(-1, keepdim=True).log2().floor()) * ULP_OF_ONE[here.out.view.dtype]
    assert ((out - expected).abs() <= OUT_ULPS * ulp).all(), f"{((out - expected).abs() / ulp).nan_to_num().max():.1f} ulp in {spec.name}"

    lse, expected = here.lse.view.double(), there.lse.view.cpu().double()
    sees_keys = expected.isfinite()
    assert torch.equal(lse[~sees_keys], expected[~sees_keys]), "rows that see no key have -inf"
    error = (lse - expected)[sees_keys].abs() / expected[sees_keys].abs().clamp_min(1)
    assert error.max() <= LSE_ERROR, f"lse is {error.max():.1e} away in {spec.name}"
