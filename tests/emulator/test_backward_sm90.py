"""The Hopper backward families in the emulator: right by the numerics rule, and by its checks, in every order of threads and copies."""

from __future__ import annotations

import pytest
import torch

from flashgen.build.emulator.kernel import ORDERS
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Mask
from tests.support.backward_sm90 import NARROW, PERSISTENT, WIDE, BackwardCase
from tests.support.plan import planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text

FULL, CAUSAL = Mask
CASES = [
    BackwardCase((100, 300), (64, 64), CAUSAL, Dtype.FP16, (6, 3), 2, apart=True),
    BackwardCase((100, 300), (128, 128), CAUSAL, heads=(6, 3), batch=2, block_q=80, apart=True),
    BackwardCase((200, 260), (64, 64), FULL, heads=(4, 2)),
    BackwardCase((300, 100), (128, 128), CAUSAL),
    BackwardCase((130, 129), (128, 128), FULL, Dtype.FP16, apart=True),
    BackwardCase((150, 150), (96, 96), CAUSAL, Dtype.FP16),
    BackwardCase((130, 129), (80, 80), CAUSAL, apart=True),
    BackwardCase((100, 300), (72, 72), FULL),
    BackwardCase((100, 300), (8, 8), CAUSAL, apart=True),
    BackwardCase((150, 300), (64, 128), CAUSAL),
    BackwardCase((150, 300), (128, 64), FULL, apart=True),
    BackwardCase((150, 130), (120, 40), CAUSAL, Dtype.FP16),
    BackwardCase((100, 130), (32, 32), FULL, block_q=48),
    BackwardCase((1, 1), (64, 64), CAUSAL),
    BackwardCase((3, 400), (128, 128), CAUSAL, heads=(4, 1)),
    BackwardCase((170, 200), (192, 128), CAUSAL, Dtype.FP16, heads=(6, 3), batch=2, apart=True),
    BackwardCase((130, 300), (160, 160), FULL),
    BackwardCase((100, 150), (128, 192), CAUSAL, apart=True),
    BackwardCase((130, 150), (136, 72), FULL, Dtype.FP16, block_q=64),
    BackwardCase((100, 150), (256, 64), CAUSAL, block_q=32),
    BackwardCase((70, 150), (208, 40), FULL, block_q=48),
    BackwardCase((100, 150), (256, 256), CAUSAL, heads=(6, 3), batch=2, apart=True, family=WIDE),
    BackwardCase((170, 200), (192, 128), CAUSAL, Dtype.FP16, apart=True, family=WIDE),
    BackwardCase((130, 70), (192, 192), FULL, family=WIDE),
    BackwardCase((70, 190), (136, 200), CAUSAL, Dtype.FP16, family=WIDE),
    BackwardCase((100, 50), (160, 72), CAUSAL, family=WIDE),
    BackwardCase((1, 1), (256, 256), FULL, family=WIDE),
    BackwardCase((100, 500), (64, 64), CAUSAL, Dtype.FP16, (6, 3), 2, apart=True, family=PERSISTENT),
    BackwardCase((200, 300), (128, 128), FULL, heads=(3, 3), batch=2, block_q=64, family=PERSISTENT),
    BackwardCase((300, 100), (128, 128), CAUSAL, apart=True, family=PERSISTENT),
    BackwardCase((170, 300), (96, 96), CAUSAL, Dtype.FP16, heads=(4, 2), block_q=80, family=PERSISTENT),
    BackwardCase((130, 150), (40, 72), CAUSAL, heads=(4, 2), block_q=96, apart=True, family=PERSISTENT),
    BackwardCase((130, 280), (128, 64), FULL, Dtype.FP16, family=PERSISTENT),
    BackwardCase((1, 1), (8, 8), FULL, family=PERSISTENT),
]
IN_ALL_ORDERS = [
    BackwardCase((170, 300), (128, 128), CAUSAL, block_q=80),
    BackwardCase((290, 300), (64, 64), CAUSAL),
    BackwardCase((170, 300), (192, 128), CAUSAL),
    BackwardCase((170, 200), (192, 128), CAUSAL, family=WIDE),
    BackwardCase((170, 300), (128, 128), CAUSAL, heads=(4, 2), family=PERSISTENT),
    BackwardCase((290, 300), (64, 64), FULL, family=PERSISTENT),
]
QUICK = 1  # for every run; --slow has all


def listed(cases: list[BackwardCase], each: int, runs: int = 1) -> list[object]:
    """As parameters, of which every run has `each`."""
    return planned(
        cases,
        each,
        family=lambda case: case.family.name,
        kinds=lambda case: (case.mask, case.dtype, case.width),
        name=lambda case: case.name,
        seconds=lambda case: case.seconds * runs,
    )


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    cases = [params["case"] for params in to_run(request) if "case" in params]
    compile_ahead(emulated_text(case.spec()) for case in cases)


@pytest.mark.parametrize("case", listed(CASES, QUICK))
def test_gradients(case: BackwardCase) -> None:
    assert not case.why_rejected(emulated_kernel(case.spec()))


@pytest.mark.parametrize("case", listed(IN_ALL_ORDERS, 0, len(ORDERS)))
def test_in_all_orders_with_equal_d_k_and_d_v(case: BackwardCase) -> None:
    """dK and dV are the same to the bit whatever the order; dQ, whose additions come in any order, is not."""
    kernel, found = emulated_kernel(case.spec()), []
    for order in ORDERS:
        tensors = case.tensors()
        assert not case.why_rejected(kernel, order, tensors)
        found.append((tensors["d_k"].clone(), tensors["d_v"].clone()))
    assert all(torch.equal(a, b) for run in found[1:] for a, b in zip(found[0], run, strict=True))


def test_without_d_lse() -> None:
    case = BackwardCase((70, 90))
    assert not case.why_rejected(emulated_kernel(case.spec()), tensors=case.tensors().without_optional_inputs())


@pytest.mark.parametrize(("width", "family"), [(64, NARROW), pytest.param(256, WIDE, marks=pytest.mark.slow)])
def test_keys_past_the_end_of_scores_far_below_zero(width: int, family: Family) -> None:
    """Their scores are 0: relative to the others' log-sum-exp they would overflow, and 0 * inf is NaN."""
    case = BackwardCase((70, 90), (width, width), family=family)
    tensors = case.tensors()
    tensors["k"].fill_(2.0)
    tensors["q"].fill_(-8.0)
    tensors.derive()
    assert tensors["lse"].max() < -100
    assert not case.why_rejected(emulated_kernel(case.spec()), tensors=tensors)


@pytest.mark.parametrize(
    ("width", "family"), [(64, NARROW), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((192, WIDE), (64, PERSISTENT)))]
)
def test_huge_scores(width: int, family: Family) -> None:
    """So large that fp32 has lost what P needs of their log-sum-exp; those of other rows are as usual."""
    case = BackwardCase((131, 150), (width, width), CAUSAL, family=family)
    tensors = case.tensors()
    tensors["q"][:, ::3] *= 2.0**40
    tensors.derive()
    assert not case.why_rejected(emulated_kernel(case.spec()), tensors=tensors)
