"""Gradients of captured tensors, and of scores that a score_mod bends, on a GPU: the numerics rule, CUDA graphs, values that change."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.gpu.driver import gpu
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation, loaded
from flashgen.verification.expected import Expected
from tests.support.learning import FUNCTIONS, learning_name

pytestmark = pytest.mark.gpu

WIDTHS = (64, 128, 256, 72, 96)
LENGTHS = ((16, 7), (90, 170), (90, 33), (1000, 1111), (700, 300))
OTHERS: tuple[tuple[str, ...], ...] = ((), ("bias",), ("window",), ("sinks",), ("dropout",))
Mod = Callable[..., Any]


def specs(family: str, functions: str) -> list[KernelSpec]:
    """One of each head dim that the family has with these functions; dtypes, masks and other modifiers by turns."""
    draw, found, target = random.Random(f"{family} {functions}"), [], gpu(0).device.target
    for width in WIDTHS:
        modifiers = (*draw.choice(OTHERS), learning_name(functions))
        problem = Problem(draw.choice((Dtype.BF16, Dtype.FP16)), width, width, draw.choice((*Mask,)), "backward", False, modifiers)
        if not find_family(family).refusals(problem, target):
            found.append(KernelSpec(find_family(family), problem, find_family(family).default(problem, target), target))
    return found


@pytest.mark.parametrize("functions", FUNCTIONS)
@pytest.mark.parametrize("family", ["attention_backward", "attention_backward_sm90"])
def test_they_keep_the_rule(family: str, functions: str) -> None:
    mine = specs(family, functions)
    if not mine:
        pytest.skip(f"{family} has no such kernels for this GPU")
    for _ in compile_many([(spec, partial(compilation.compile_spec, spec)) for spec in mine], 0):
        pass
    assert {spec.name: defects for spec in mine if (defects := compilation.compile_spec(spec).report.defects)} == {}
    faults = []
    for spec in mine:
        for len_q, len_kv in LENGTHS if functions != "branch" else LENGTHS[1:3]:
            ends = (60, 20) if "window" in spec.problem.modifiers else (OPEN, OPEN)
            workload = Workload(2, 4, 2, len_q, len_kv, *ends)
            tensors = Tensors.random(spec.problem, workload, torch.Generator("cuda").manual_seed(len_q))
            run_once(loaded.kernels.load(spec, gpu(0)), tensors)
            verdict = Expected.of(tensors).judge(tensors)
            faults += [] if verdict.ok else [f"{spec.problem.name} {workload}: {verdict.message}"]
    assert not faults, "\n".join(faults)


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def relative(table: torch.Tensor) -> Mod:
    return lambda score, b, h, q, k: score + table[h, q - k + 1000]


def gated(table: torch.Tensor) -> Mod:
    return lambda score, b, h, q, k: torch.where(q >= k, score * torch.sigmoid(table[h, q]), torch.tanh(score))


def plain(q: torch.Tensor, k: torch.Tensor, mod: Mod) -> torch.Tensor:
    queries, keys = q.transpose(1, 2), k.transpose(1, 2)
    scores = queries @ keys.mT * q.shape[3] ** -0.5
    at = torch.meshgrid(*(torch.arange(size, device="cuda") for size in scores.shape), indexing="ij")
    found: torch.Tensor = (mod(scores, *at).softmax(-1) @ keys).transpose(1, 2)
    return found


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("make", [relative, gated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_call_has_the_gradients_of_float64(head_dim: int, dtype: torch.dtype, make: Callable[[torch.Tensor], Mod]) -> None:
    q = drawn(2, 700, 4, head_dim).bfloat16().requires_grad_()
    k = drawn(2, 700, 4, head_dim, seed=1).bfloat16()  # q itself would have nearly all of each row's probability at one key
    tables = drawn(2, 4, 2000).to(dtype)[1].T.contiguous().T.requires_grad_()  # not dense
    doubles = [t.detach().double().requires_grad_() for t in (q, tables)]
    out, wanted = flashgen.attention(q, k, k, score_mod=make(tables)), plain(doubles[0], k.double(), make(doubles[1]))
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, (q, tables), into), torch.autograd.grad(wanted, doubles, into.double())
    assert [apart(*both) < 0.01 for both in zip(found, right, strict=True)] == [True, True]


@pytest.mark.parametrize("make", [relative, gated])
def test_a_graph_has_them_and_other_values_compile_nothing(make: Callable[[torch.Tensor], Mod], monkeypatch: pytest.MonkeyPatch) -> None:
    q, table = drawn(2, 700, 4, 64).bfloat16(), drawn(4, 2000).requires_grad_()

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad(flashgen.attention(q, q, q, score_mod=make(table)).float().square().sum(), table)
        return found

    gradient()

    def compiled(spec: KernelSpec) -> None:
        raise AssertionError(f"{spec.name} is compiled")

    monkeypatch.setattr(compilation, "compile_spec", compiled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient()
    for factor in (1.0, 2.0, -0.5):
        with torch.no_grad():
            table.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert apart(found, gradient().double()) < 1e-4
