"""Gradients on a GPU: the numerics rule over seeded random cases, and `flashgen.attention` in the ways in which models are trained."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.gpu.driver import check, driver, gpu
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.gradients import GradientPlan
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.operators import gradient_plans
from flashgen.operators.gradient_plans import gradient_plan_for
from flashgen.selection import compilation, loaded
from flashgen.selection.families import default_spec
from flashgen.verification.expected import Expected
from tests.support.examples import families_of
from tests.support.plan import to_run

pytestmark = pytest.mark.gpu

CASES = 500  # of each family
RUNS = 1000  # whose gradients must have the same bits
GROUPS = 20  # tests, each of so many of a family's cases
WIDTHS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (8, 8), (72, 40), (160, 224), (136, 72), (104, 104))
MOST_SCORES = 2**24  # of a case, so that float64 references take no minutes


@dataclass(frozen=True)
class Case:
    """One call of a family's default kernel."""

    spec: KernelSpec
    workload: Workload
    magnitude: float
    scale: float
    apart: bool
    with_d_lse: bool
    seed: int

    def fault(self) -> str:
        """What the rule has against the kernel; empty if nothing."""
        problem, scalars = self.spec.problem, {"scale": self.scale}
        tensors = Tensors.random(problem, self.workload, torch.Generator("cuda").manual_seed(self.seed))
        tensors["q"].mul_(self.magnitude)
        tensors.derive(scalars)
        tensors = tensors.apart() if self.apart else tensors
        tensors = tensors if self.with_d_lse else tensors.without_optional_inputs()
        if self.spec.family.call_refusals(tensors.call(scalars), self.spec.config):
            return ""
        run_once(loaded.kernels.load(self.spec, gpu(0)), tensors, scalars)
        verdict = Expected.of(tensors, scalars).judge(tensors)
        return "" if verdict.ok else f"{self}: {verdict.message}"


def length(draw: random.Random) -> int:
    """From 1 to 4096, log-uniform."""
    return round(math.exp(draw.uniform(0, math.log(4096))))


def cases(family: Family) -> list[Case]:
    """Over head dims, dtypes, masks, lengths, groups, strides, scales and logit magnitudes. A fifth and more cross eight tiles."""
    draw, target = random.Random(f"gradients of {family.name}"), gpu(0).device.target
    every = itertools.product(WIDTHS, Dtype, Mask, (False, False, True))
    drawn = (Problem(dtype, *width, mask, family.operation, deterministic) for width, dtype, mask, deterministic in every)
    problems = [problem for problem in drawn if not family.refusals(problem, target)]
    found: list[Case] = []
    while problems and len(found) < CASES:
        problem = draw.choice(problems)
        kv_heads, group = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 4))
        len_q, len_kv = length(draw), length(draw)
        if draw.random() < 0.4:
            len_q, len_kv = draw.randint(512, 2048), draw.randint(1024, 2048)
        batch = draw.choice((1, 2, 3))
        if batch * kv_heads * group * len_q * len_kv > MOST_SCORES or len_q * kv_heads * group * batch < 64:
            continue
        workload = Workload(batch, kv_heads * group, kv_heads, len_q, len_kv)
        spec = KernelSpec(family, problem, family.default(problem, target), target)
        scale = draw.choice((problem.head_dim**-0.5, problem.head_dim**-0.5, 0.02, 0.3))
        found.append(Case(spec, workload, draw.choice((1.0, 1.0, 0.1, 3.0)), scale, draw.random() < 0.3, draw.random() < 0.5, len(found)))
    return found


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest) -> dict[str, list[Case]]:
    """The cases of every family that is asked for, whose kernels are compiled on all cores."""
    asked = {params["family"].name for params in to_run(request) if params.get("group") is not None}
    found = {family.name: cases(family) for family in families_of("backward") if family.name in asked}
    specs = {case.spec for some in found.values() for case in some}
    for _ in compile_many([(spec, partial(compilation.compile_spec, spec)) for spec in specs], 0):
        pass
    return found


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("family", families_of("backward"), ids=lambda family: family.name)
def test_random_cases_keep_the_rule(family: Family, group: int, drawn: dict[str, list[Case]]) -> None:
    mine = drawn[family.name][group::GROUPS]
    if not mine:
        pytest.skip(f"{family.name} has no kernels for this GPU")
    faults = [fault for case in mine if (fault := case.fault())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, operation="backward"),
        Problem(Dtype.FP16, 64, operation="backward"),
        Problem(Dtype.BF16, 128, operation="backward"),
        Problem(Dtype.FP16, 128, mask=Mask.CAUSAL, operation="backward"),
        Problem(Dtype.BF16, 256, mask=Mask.CAUSAL, operation="backward"),
        Problem(Dtype.BF16, 192, 128, Mask.CAUSAL, "backward"),
        Problem(Dtype.FP16, 40, 72, Mask.CAUSAL, "backward"),
        Problem(Dtype.BF16, 128, mask=Mask.CAUSAL, operation="backward", deterministic=True),
        Problem(Dtype.BF16, 256, operation="backward", deterministic=True),
    ],
    ids=lambda problem: problem.name,
)
@pytest.mark.parametrize("family", [None, "attention_backward"], ids=["preferred", "generic"])
def test_verify(problem: Problem, family: str | None) -> None:
    results = flashgen.verify(problem, default_spec(problem, gpu(0).device.target, family=family).config)
    assert len(results) > 20
    wrong = [f"{case.workload.name} x {case.magnitude:g}: {case.verdict.message}" for case in results if not case.verdict.ok]
    assert not wrong, "\n".join(wrong)


def leaves(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((2, 300, 8, 128), (2, 400, 2, 128), (2, 400, 2, 128))
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def gradients(tensors: list[Any], d_out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    out = flashgen.attention(*tensors, causal=True)
    return torch.autograd.grad(out, tensors, torch.ones_like(out) if d_out is None else d_out)


def close(found: Iterator[torch.Tensor] | tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    """dQ is summed up in any order: by rounding alone."""
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 2**-7 * float(other.abs().max())


def test_agreement_with_sdpa() -> None:
    q, k, v = (torch.randn(2, 8, 500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    d_out = torch.randn_like(q)
    ours = torch.autograd.grad(flashgen.attention(q, k, v, causal=True, layout="bhsd"), (q, k, v), d_out)
    theirs = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), d_out)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= 2**-6 * float(other.abs().max())


def test_gradients_of_keys_and_values_are_bit_equal_over_runs() -> None:
    tensors = leaves()
    first = gradients(tensors)
    for _ in range(100):
        _, d_k, d_v = gradients(tensors)
        assert torch.equal(d_k, first[1])
        assert torch.equal(d_v, first[2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", [None, "attention_backward"], ids=["preferred", "generic"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_are_bit_equal_over_runs(head_dim: int, family: str | None, causal: bool) -> None:
    """Of 16 and more key tiles a head, more blocks than fit at once, and two query heads a key/value head."""
    problem = Problem(Dtype.BF16, head_dim, mask=Mask.CAUSAL if causal else Mask.FULL, operation="backward", deterministic=True)
    kernel = loaded.kernels.load(default_spec(problem, gpu(0).device.target, family=family), gpu(0))
    tensors = Tensors.random(problem, Workload(4, 8, 4, 2048, 2048), torch.Generator("cuda").manual_seed(0))
    run_once(kernel, tensors)
    verdict = Expected.of(tensors).judge(tensors)
    assert verdict.ok, verdict.message
    first = {name: tensors[name].clone() for name in ("d_q", "d_k", "d_v")}
    for _ in range(RUNS):
        run_once(kernel, tensors)
        assert all(torch.equal(tensors[name], wanted) for name, wanted in first.items())


def test_two_streams_take_their_turns_at_once() -> None:
    """Blocks of both launches wait for others of their own while they share the GPU."""
    tensors, streams = leaves(), [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    out = flashgen.attention(*tensors, causal=True, deterministic=True)
    wanted = torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    torch.cuda.synchronize()
    found = []
    for stream in 50 * streams:
        with torch.cuda.stream(stream):
            found.append(backward(tensors, out))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for some in found for one, other in zip(some, wanted, strict=True))


def backward(tensors: list[Any], out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Deterministic gradients of a call that was made, in the current stream: autograd would take that of the forward pass."""
    q, k, v = (tensor.detach() for tensor in tensors)
    _, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    given = (q, k, v, out.detach(), lse, torch.ones_like(out), None, True, None, "bshd", True)
    found: tuple[torch.Tensor, ...] = torch.ops.flashgen.attention_backward(*given)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_setting_makes_gradients_deterministic(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[bool] = []

    def noted(*arguments: Any) -> Any:
        settings.append(signature(GradientPlan).bind(*arguments).arguments["deterministic"])
        return GradientPlan(*arguments)

    monkeypatch.setattr(gradient_plans, "GradientPlan", noted)
    length = 333 + compiled  # of no other call, so that plans are made
    q = torch.randn(1, length, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    attention = torch.compile(flashgen.attention) if compiled else flashgen.attention
    for setting in (True, False):
        try:
            torch.use_deterministic_algorithms(setting and compiled)  # compiled code wants one setting for both passes
            loss = attention(q, q, q).float().sum()
            torch.use_deterministic_algorithms(setting)
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert settings == [True, False]


def test_graphed_callables_hold_both_passes() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flashgen.attention(q, k, v, causal=True)

    tensors, others = leaves(), leaves(seed=1)
    graphed: Any = torch.cuda.make_graphed_callables(Block(), tuple(tensors))
    for some in (tensors, others):
        found = torch.autograd.grad(graphed(*some).float().sum(), some)
        close(found, gradients(some))


def test_a_captured_pass_keeps_its_overlaps() -> None:
    if gpu(0).device.target.name != "sm_90a":
        pytest.skip("needs kernels that overlap: those of sm_90a")
    tensors = leaves()
    wanted = gradients(tensors)
    graph, cu = torch.cuda.CUDAGraph(keep_graph=True), driver()
    with torch.cuda.graph(graph):
        found = gradients(tensors)
    *_, count = check(cu.cuGraphGetEdges(graph.raw_cuda_graph()), "counting the graph's edges")
    _, _, edges, _ = check(cu.cuGraphGetEdges(graph.raw_cuda_graph(), count), "reading the graph's edges")
    kinds = [int(edge.type) for edge in edges]
    out, lse = flashgen.attention(*tensors, causal=True, return_lse=True)
    plan = gradient_plan_for(*tensors, out, lse, torch.ones_like(out), None, True, None, "bshd", False)
    assert plan.bound is not None
    overlapping = len(plan.bound.launch.kernel.spec.kernels) - 1  # all but the first
    assert kinds.count(int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)) == overlapping, kinds
    for _ in range(3):
        for gradient in found:
            gradient.fill_(torch.nan)
        graph.replay()
        close(found, wanted)


def test_a_side_stream_and_another_thread() -> None:
    tensors = leaves()
    wanted = gradients(tensors)
    found: list[tuple[torch.Tensor, ...]] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                found.append(gradients(tensors))
        stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for some in found:
        close(some, wanted)


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    there = [t.detach().to("cuda:1").requires_grad_() for t in leaves()]
    found = gradients(there)
    assert torch.cuda.current_device() == 0
    assert {gradient.device for gradient in found} == {torch.device("cuda:1")}
    close(tuple(gradient.to("cuda:0") for gradient in found), gradients(leaves()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_training_step_learns_as_an_eager_one(fullgraph: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.into = torch.nn.Linear(256, 3 * 256, device="cuda", dtype=torch.bfloat16)
            self.out = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.into(x).unflatten(2, (3, 4, 64)).unbind(2)
            given: torch.Tensor = self.out(flashgen.attention(q, k, v, causal=True).flatten(2))
            return given

    def losses(compiled: bool) -> list[float]:
        model = Model()
        run = torch.compile(model, fullgraph=fullgraph) if compiled else model
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
        found = []
        for _ in range(10):
            loss = (run(x).float() - x.roll(1, 1).float()).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    eager, compiled = losses(False), losses(True)
    assert eager[-1] < eager[0]
    assert compiled == pytest.approx(eager, rel=0.02)


def test_memory_does_not_grow_with_the_scores() -> None:
    """Beside the gradients: a sum of dQ in fp32, and three numbers a row."""
    q, k, v = (torch.randn(1, 8192, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = flashgen.attention(q, k, v)
    d_out = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 1.1 * (3 * q.numel() * 2 + q.numel() * 4)
