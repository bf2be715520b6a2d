"""lse of rows whose scores rise from the key that a kernel visits first to the one that it visits last: there its row max is renewed, or
hardly stale."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from tests.support.cases import Case
from tests.support.plan import of_family
from tests.support.runs import emulated_kernel, emulated_text, launch

pytestmark = pytest.mark.slow
WORKLOAD = Workload(1, 2, 1, 31, 640)
HOPPER, GENERIC, DECODE = "attention_forward_sm90", "attention_forward", "attention_decode"
SETTLES = {
    HOPPER: "settle(statistics.rows[i].row_max, statistics.rows[i].total);",
    GENERIC: "settle(own_origin.row_max, own_total);",
    DECODE: "settle(origin.row_max, total);",
}


def accepted(name: str, dtype: Dtype, head_dim: int, magnitude: float, rises: tuple[float, ...], *patches: tuple[str, str]) -> list[bool]:
    """Of inputs whose logits rise by so much on the kernel's way along the keys, each with three seeds, whether results are accepted.

    patches: what stands in the kernel's text, and what it becomes
    """
    family, target = find_family(name), find_target("sm_90a")
    problem = Problem(dtype, head_dim, head_dim, Mask.FULL)
    spec = KernelSpec(family, problem, family.default(problem, target), target)
    source = emulated_text(spec)
    text = source.text
    for patch in patches:
        assert text.count(patch[0]) == 1
        text = text.replace(*patch)
    kernel = emulated_kernel(spec, dataclasses.replace(source, text=text))
    found = []
    for rise in rises:
        for seed in (11, 12, 13):
            case = Case("rising", problem, WORKLOAD, head_dim**-0.5, magnitude=magnitude, seed=seed, rising=-rise)
            tensors = case.make("cpu")
            if name != DECODE:  # others visit the last key first
                tensors.k.copy_(tensors.k.flip(1))
            launch(kernel, case, tensors)
            found.append(not case.rejections(tensors))
    return found


RISES = (6.0, 10.0, 14.0, 20.0, 28.0, 44.0, 60.0, 100.0)
MAGNITUDES = pytest.mark.parametrize("magnitude", [0.25, 1.0, 2.0])  # beyond, sums of q k round most, and plain PyTorch's depend on the CPU
DTYPES = pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])


@of_family(HOPPER, 6.0)
@MAGNITUDES
@pytest.mark.parametrize("head_dim", [64, 128, 144, 256])
@DTYPES
def test_lse_is_within_the_rule(dtype: Dtype, head_dim: int, magnitude: float) -> None:
    assert all(accepted(HOPPER, dtype, head_dim, magnitude, RISES))


@of_family(GENERIC, 6.0)
@MAGNITUDES
@pytest.mark.parametrize("head_dim", [64, 128, 144])
@DTYPES
def test_lse_of_the_generic_kernel_is_within_the_rule(dtype: Dtype, head_dim: int, magnitude: float) -> None:
    assert all(accepted(GENERIC, dtype, head_dim, magnitude, RISES))


@of_family(DECODE, 6.0)
@pytest.mark.parametrize("magnitude", [0.25, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128, 144])
@DTYPES
def test_lse_of_the_generic_decode_kernel_is_within_the_rule(dtype: Dtype, head_dim: int, magnitude: float) -> None:
    assert all(accepted(DECODE, dtype, head_dim, magnitude, RISES))


@of_family(HOPPER, 6.0)
@pytest.mark.parametrize(
    ("dtype", "fault"),
    [
        (Dtype.BF16, ("return 0x1p15f", "return 0x1p72f")),
        (Dtype.BF16, (SETTLES[HOPPER], "{}")),
    ],
)
def test_it_is_not_without_what_keeps_it_there(dtype: Dtype, fault: tuple[str, str]) -> None:
    assert not all(accepted(HOPPER, dtype, 128, 0.25, (20.0, 36.0, 44.0, 60.0), fault))


@pytest.mark.parametrize(
    ("name", "head_dim"), [pytest.param(*case, marks=of_family(case[0], 6.0)) for case in ((GENERIC, 128), (DECODE, 144))]
)
def test_it_is_not_where_the_row_max_stays(name: str, head_dim: int) -> None:
    assert not all(accepted(name, Dtype.BF16, head_dim, 0.25, RISES, (SETTLES[name], "{}")))


@of_family("attention_forward_sm90", 3.0)
@pytest.mark.parametrize("lift", [0.0, 4.0])
def test_many_keys_far_below_the_highest_keep_their_weight_in_fp16(lift: float) -> None:
    """Of one key and 4095 others 2^21 times below it, which come behind it: their P is below what fp16 has in full."""
    family, target, problem = find_family("attention_forward_sm90"), find_target("sm_90a"), Problem(Dtype.FP16, 64, 64, Mask.FULL)
    spec = KernelSpec(family, problem, family.default(problem, target), target)
    source, given = emulated_text(spec), "row_lift<Fp16>() { return 0.0f; }"
    assert source.text.count(given) == 1
    kernel = emulated_kernel(spec, dataclasses.replace(source, text=source.text.replace(given, given.replace("0.0", str(lift)))))
    case = Case("flat", problem, Workload(1, 1, 1, 16, 4096), 0.125, seed=1)
    tensors = case.make("cpu")
    for tensor in (tensors.q, tensors.k):
        tensor.zero_()
    tensors.q[..., 0], tensors.k[:, 3900, :, 0] = 8.0, 14.5
    tensors.v.add_(4.0)[:, 3900] = 0.0
    launch(kernel, case, tensors)
    assert (not case.rejections(tensors)) == (lift == 0.0)
