"""Keys that ALiBi makes negligible on a GPU, forward and backward: the numerics rule over seeded random cases that are long enough for some
to be left out."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import flashgen
from flashgen.build.gpu.driver import gpu
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation, loaded
from flashgen.verification.expected import Expected

pytestmark = pytest.mark.gpu

FAMILY = find_family("attention_forward_sm90")
WIDTHS = ((64, 64), (128, 128), (192, 128), (72, 40), (256, 256), (96, 96))
LENGTHS = ((2048, 2048), (2100, 2100), (2048, 3000), (3001, 2049), (2500, 2500), (4096, 4096))
CASES = 48


def spec_of(seed: int) -> KernelSpec:
    """Of each head dim the default kernel in one dtype, and another one in the other."""
    target = gpu(0).device.target
    width, other = WIDTHS[seed % len(WIDTHS)], seed // len(WIDTHS) % 2 == 1
    problem = Problem(Dtype.FP16 if other else Dtype.BF16, *width, Mask.CAUSAL, modifiers=("alibi",))
    legal = [one for one in FAMILY.legal_configs(problem, target) if isinstance(one, AttentionForwardSm90Config) and one.pack_gqa == 1]
    return KernelSpec(FAMILY, problem, legal[len(legal) // 3] if other else FAMILY.default(problem, target), target)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    if gpu(0).device.target.name != "sm_90a":
        pytest.skip(f"attention_forward_sm90 is for sm_90a; got {gpu(0).device.target.name}")
    specs = {spec_of(seed) for seed in range(2 * len(WIDTHS))}
    for _ in compile_many([(spec, partial(compilation.compile_spec, spec)) for spec in specs], 0):
        pass


@pytest.mark.parametrize("seed", range(CASES))
def test_results_are_right(seed: int) -> None:
    draw, spec = random.Random(seed), spec_of(seed)
    lengths, heads_kv, group = draw.choice(LENGTHS), draw.choice([1, 2]), draw.choice([1, 1, 2])
    workload = Workload(draw.choice([1, 2]), heads_kv * group, heads_kv, *lengths)
    tensors = Tensors.random(spec.problem, workload, torch.Generator("cuda").manual_seed(seed))
    tensors["q"].mul_(draw.choice([0.02, 1.0, 1.0, 5.0, 50.0]))
    tensors["alibi_slopes"].mul_(draw.choice([1.0, 1.0, 0.2, 8.0, -0.05]))
    if draw.random() < 0.4:  # keys are the longer the farther they are away
        distance = torch.arange(lengths[1], 0, -1, device="cuda") / lengths[1]
        tensors["k"].mul_((0.1 + draw.choice([1.0, 10.0]) * distance)[None, :, None, None].to(tensors["k"].dtype))
    tensors.derive({})
    tensors = tensors.apart() if draw.random() < 0.3 else tensors
    run_once(loaded.kernels.load(spec, gpu(0)), tensors, {})
    verdict = Expected.of(tensors, {}).judge(tensors)
    assert verdict.ok, verdict.message


def test_values_of_far_keys_are_not_read_by_a_call_or_its_graph() -> None:
    q, k, v = (torch.randn(2, 4096, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0], device="cuda")
    v[:, :1024] = float("nan")
    expected = flashgen.attention(q, k, v, causal=True, alibi_slopes=slopes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, causal=True, alibi_slopes=slopes)
    graph.replay()
    for found in (expected, out):
        assert found[:, 3000:, :3].isfinite().all()
        assert not found[:, :, 3].isfinite().any()
    slopes.zero_()  # read anew at each replay
    graph.replay()
    assert not out.isfinite().any()


GRADIENT_FAMILIES = {
    "attention_backward_sm90": ((64, 64), (128, 128), (72, 40)),
    "attention_backward_persistent_sm90": ((64, 64), (128, 128), (96, 96)),
    "attention_backward_wide_sm90": ((256, 256), (192, 128)),
}


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", GRADIENT_FAMILIES)
def test_gradients_are_right(name: str, seed: int) -> None:
    draw, family, widths = random.Random(seed), find_family(name), GRADIENT_FAMILIES[name]
    dtype = Dtype.FP16 if seed % 2 else Dtype.BF16
    problem = Problem(dtype, *widths[seed // 2 % len(widths)], Mask.CAUSAL, operation="backward", modifiers=("alibi",))
    spec = KernelSpec(family, problem, family.default(problem, gpu(0).device.target), gpu(0).device.target)
    heads_kv, group = draw.choice([1, 2]), draw.choice([1, 1, 2])
    workload = Workload(draw.choice([1, 2]), heads_kv * group, heads_kv, *draw.choice(LENGTHS[:5]))
    tensors = Tensors.random(problem, workload, torch.Generator("cuda").manual_seed(seed))
    tensors["q"].mul_(draw.choice([0.02, 1.0, 1.0, 3.0]))
    tensors["alibi_slopes"].mul_(draw.choice([1.0, 1.0, 0.2, 8.0]))
    tensors.derive({})
    run_once(loaded.kernels.load(spec, gpu(0)), tensors, {})
    verdict = Expected.of(tensors, {}).judge(tensors)
    assert verdict.ok, verdict.message
