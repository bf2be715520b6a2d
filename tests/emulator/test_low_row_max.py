"""lse of rows whose scores fall from the first key on, to which the kernel for Hopper comes last: there its row max is renewed."""

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


def accepted(dtype: Dtype, head_dim: int, magnitude: float, falls: tuple[float, ...], fault: tuple[str, str] = ("", "")) -> list[bool]:
    """Of inputs whose logits fall by so much, each with three seeds, whether results are accepted. fault: a text, and what it becomes."""
    family, target = find_family("attention_forward_sm90"), find_target("sm_90a")
    problem = Problem(dtype, head_dim, head_dim, Mask.FULL)
    spec = KernelSpec(family, problem, family.default(problem, target), target)
    source = emulated_text(spec)
    assert fault[0] in source.text
    kernel = emulated_kernel(spec, dataclasses.replace(source, text=source.text.replace(*fault)) if fault[0] else source)
    found = []
    for fall in falls:
        for seed in (11, 12, 13):
            case = Case("falling", problem, WORKLOAD, head_dim**-0.5, magnitude=magnitude, seed=seed, rising=-fall)
            tensors = case.make("cpu")
            tensors.k.copy_(tensors.k.flip(1))
            launch(kernel, case, tensors)
            found.append(not case.rejections(tensors))
    return found


@of_family("attention_forward_sm90", 6.0)
@pytest.mark.parametrize("magnitude", [0.25, 1.0, 2.0])  # beyond, sums of q k round most, and plain PyTorch's depend on the CPU
@pytest.mark.parametrize("head_dim", [64, 128, 144, 256])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_lse_is_within_the_rule(dtype: Dtype, head_dim: int, magnitude: float) -> None:
    assert all(accepted(dtype, head_dim, magnitude, (6.0, 10.0, 14.0, 20.0, 28.0, 44.0, 60.0, 100.0)))


@of_family("attention_forward_sm90", 6.0)
@pytest.mark.parametrize(
    ("dtype", "fault"),
    [
        (Dtype.BF16, ("return 0x1p15f", "return 0x1p72f")),
        (Dtype.BF16, ("            statistics.rows[i].settle();\n", "")),
        (Dtype.FP16, ("            statistics.rows[i].settle();\n", "")),
    ],
)
def test_it_is_not_without_what_keeps_it_there(dtype: Dtype, fault: tuple[str, str]) -> None:
    assert not all(accepted(dtype, 128, 0.25, (20.0, 36.0, 44.0, 60.0), fault))


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
