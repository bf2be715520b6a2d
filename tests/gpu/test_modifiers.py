"""Modifiers on a GPU, alone and together: the numerics rule over seeded random cases of every family that has some, CUDA graphs, and values
that change without a compile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.build.gpu.driver import gpu
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch import seeds
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation, loaded
from flashgen.verification.expected import Expected
from tests.support.plan import to_run
from tests.support.sinks import put_near_scores

pytestmark = pytest.mark.gpu

CASES = 200  # of each family
KERNELS = 21  # of each family, at most
GROUPS = 8  # tests, each of so many of a family's cases
WIDTHS = ((64, 64), (128, 128), (192, 128), (72, 40), (256, 256), (96, 96))
MOST_SCORES = 2**23  # of a case, so that float64 references take no minutes
CAPS = (1.0, 15.0, 30.0, 50.0, 2.0**14)
HAVE_THEM = [family for family in families().values() if family.modifiers]


@dataclass(frozen=True)
class Case:
    """One call of a family's default kernel. magnitude: what q is multiplied by; slopes: what slopes are."""

    spec: KernelSpec
    workload: Workload
    magnitude: float
    apart: bool
    seed: int
    scalars: dict[str, float] = field(hash=False, default_factory=dict)
    slopes: float = 1.0

    def fault(self) -> str:
        """What the rule has against the kernel; empty if nothing."""
        tensors = Tensors.random(self.spec.problem, self.workload, torch.Generator("cuda").manual_seed(self.seed))
        tensors["q"].mul_(self.magnitude)
        if "alibi_slopes" in tensors:
            tensors["alibi_slopes"].mul_(self.slopes)
        if "sinks" in tensors:
            put_near_scores(tensors["sinks"], self.magnitude, "alibi_slopes" in tensors and self.slopes > 0)
        tensors.derive(self.scalars)
        tensors = tensors.apart() if self.apart else tensors.without_optional_inputs()
        run_once(loaded.kernels.load(self.spec, gpu(0)), tensors, self.scalars)
        verdict = Expected.of(tensors, self.scalars).judge(tensors)
        return "" if verdict.ok else f"{self}: {verdict.message}"


def end(draw: random.Random, longest: int) -> int:
    """Of a window: short, long, beyond all keys, negative or open."""
    most = draw.choice((3, 70, longest, 2 * longest))
    return draw.choice((OPEN, draw.randint(0, most), draw.randint(0, most), draw.randint(-most, most)))


def problems(family: Family, draw: random.Random) -> list[Problem]:
    """As many as there may be kernels, of every set of modifiers that the family has."""
    orders = (False, True) if family.operation == "backward" else (False,)
    sets = [kind for n in range(1, len(family.modifiers) + 1) for kind in itertools.combinations(family.modifiers, n)]
    sets = [kind for kind in sets if not any(alike <= {*kind} for alike in ({"bias", "bias_fp32"}, {"document_ids", "document_ids_int64"}))]
    every = itertools.product(Dtype, WIDTHS, Mask, orders, sets)
    drawn = [Problem(dtype, *width, mask, family.operation, ordered, kind) for dtype, width, mask, ordered, kind in every]
    possible = [problem for problem in drawn if not family.refusals(problem, gpu(0).device.target)]
    draw.shuffle(possible)
    found: list[Problem] = []
    for kind in itertools.cycle(sets):  # the same number of each set
        mine = next((problem for problem in possible if problem.modifiers == kind), None)
        if mine is None or len(found) == KERNELS:
            return found
        possible.remove(mine)
        found.append(mine)
    return found


def cases(family: Family) -> list[Case]:
    draw, target = random.Random(f"modifiers of {family.name}"), gpu(0).device.target
    mine, found = problems(family, draw), list[Case]()
    while mine and len(found) < CASES:
        problem = draw.choice(mine)
        batch, kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 2, 4))
        len_q, len_kv = draw.randint(1, 1500), draw.randint(1, 1500)
        if batch * kv_heads * group * len_q * len_kv > MOST_SCORES or len_q * kv_heads * group * batch < 64:
            continue
        ends = (end(draw, len_kv), end(draw, len_kv)) if "window" in problem.modifiers else (OPEN, OPEN)
        chunk = draw.choice((1, draw.randint(1, 200), draw.choice((64, 128, 256)), draw.randint(1, 2 * len_kv)))
        chunk = chunk if "chunk" in problem.modifiers else OPEN
        scalars = {"softcap": draw.choice(CAPS)} if "softcap" in problem.modifiers else {}
        caps = (*scalars.values(),)
        if "dropout" in problem.modifiers:
            scalars["dropout_p"] = draw.choice((0.1, 0.5, 0.97, 2.0**-9))
        # Logits of up to four times a cap. Gradients of such as are much higher are left of nearly equal numbers, with a cap and without.
        # Rows that one key shares with a sink are so from lower ones on: their delta comes from the rounded out.
        of_gradients = 4.0 if "sinks" in problem.modifiers else 16.0
        most = of_gradients if problem.operation == "backward" else 50.0
        magnitudes = (1.0, 1.0, 3.0, *(min(cap, most) for cap in caps))
        workload = Workload(batch, kv_heads * group, kv_heads, len_q, len_kv, *ends, chunk)
        spec = KernelSpec(family, problem, family.default(problem, target), target)
        slopes = draw.choice((1.0, 1.0, -0.1, 0.0))
        found.append(Case(spec, workload, draw.choice(magnitudes), draw.random() < 0.4, len(found), scalars, slopes))
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


def slopes(heads: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.rand(heads, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def prefixes(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device="cuda")


OTHER_VALUES: dict[str, Callable[[int], dict[str, Any]]] = {
    "window": lambda i: {"window": ((900, 0), (899, 0), (70, None), (-5, 300))[i]},
    "chunk": lambda i: {"chunk": (256, 255, 3, 5000)[i], "causal": True},
    "chunk-window": lambda i: {"chunk": (700, 256, 3, 5000)[i], "window": (300 + i, 0)},
    "prefix": lambda i: {"prefix_len": prefixes(900 - 300 * i, 3), "causal": True},
    "prefix-window": lambda i: {"prefix_len": prefixes(700, 100 * i), "window": (300, 0)},
    "softcap": lambda i: {"softcap": (50.0, 30.0, 1.0, 1e4)[i]},
    "alibi": lambda i: {"alibi_slopes": slopes(seed=i)},
    "sinks": lambda i: {"sinks": slopes(seed=i).mul_(8).requires_grad_()},
    "bias": lambda i: {"bias": slopes(4, seed=i).bfloat16()[:, None, None].requires_grad_()},
    "bias-fp32": lambda i: {"bias": slopes(4, seed=i)[:, None, None].requires_grad_()},
    "mask": lambda i: {"mask": slopes(4, seed=i)[:, None, None] > 0.2},
    "dropout": lambda i: {"dropout_p": (0.1, 0.2, 0.5, 0.99)[i]},
    "all": lambda i: {"window": (900, i), "softcap": 20.0 + i, "alibi_slopes": slopes(seed=i), "sinks": slopes(seed=i)},
}


@pytest.mark.parametrize("kind", [kind for kind in OTHER_VALUES if kind != "dropout"])
def test_a_call_in_a_graph_is_the_eager_one(kind: str) -> None:
    q = torch.randn(2, 1000, 4, 64, device="cuda", dtype=torch.bfloat16)
    given = [OTHER_VALUES[kind](i) for i in (0, 1)]
    wanted = [flashgen.attention(q, q, q, **values) for values in given]
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        found = [flashgen.attention(q, q, q, **values) for values in given]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not torch.equal(*found)


@pytest.mark.parametrize("kind", OTHER_VALUES)
def test_another_value_compiles_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 2000, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    flashgen.attention(q, q, q, **OTHER_VALUES[kind](0)).sum().backward()

    def compiled(spec: KernelSpec) -> None:
        raise AssertionError(f"{spec.name} is compiled")

    monkeypatch.setattr(compilation, "compile_spec", compiled)
    for i in (1, 2, 3):
        flashgen.attention(q, q, q, **OTHER_VALUES[kind](i)).sum().backward()


def attention_with_mask(q: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    heads = q.float().transpose(1, 2)
    left = (heads @ heads.mT * q.shape[3] ** -0.5).softmax(-1) * kept / (1 - p)
    out: torch.Tensor = (left @ heads).transpose(1, 2)
    return out


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).detach().norm() / wanted.float().detach().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_dropout_mask_is_that_of_both_passes(head_dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(2, 700, 4, head_dim, device="cuda", dtype=dtype).requires_grad_()
    out, kept = flashgen.attention(q, q, q, dropout_p=0.2, return_dropout_mask=True)
    wanted = attention_with_mask(q, kept, 0.2)
    into = torch.randn_like(out)
    found, right = (torch.autograd.grad(one, q, into.to(one.dtype), retain_graph=True)[0] for one in (out, wanted))
    assert apart(out, wanted) < 0.01
    assert apart(found, right) < 0.01


def test_dropout_follows_the_state_of_pytorchs_generator() -> None:
    q = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def kept() -> torch.Tensor:
        return flashgen.attention(q, q, q, dropout_p=0.3, return_dropout_mask=True)[1]

    torch.manual_seed(5)
    first, second = kept(), kept()
    assert not torch.equal(first, second)
    drawn = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(kept(), first)
    state = torch.cuda.get_rng_state()
    assert torch.equal(kept(), second)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    torch.cuda.set_rng_state(state)
    assert torch.equal(kept(), second)
    many = {int(seeds.drawn_seed(q.device)) for _ in range(2500)}
    assert len(many) == 2500
    torch.manual_seed(5)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert torch.equal(kept(), first)
    torch.manual_seed(6)
    assert not torch.equal(kept(), first)


@torch.no_grad()
def test_a_seed_that_is_drawn_where_a_call_is_launched_is_that_of_any_other_call() -> None:
    q, own = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16), torch.randn(4, device="cuda")
    torch.manual_seed(5)
    wanted = [flashgen.attention(q, q, q, sinks=own, dropout_p=0.3, return_dropout_mask=True)[0] for _ in range(1100)]
    torch.manual_seed(5)
    found = [flashgen.attention(q, q, q, sinks=own, dropout_p=0.3) for _ in range(1100)]
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True)), "within a table and behind its end"
    torch.manual_seed(5)
    with torch.enable_grad():
        assert torch.equal(flashgen.attention(q.clone().requires_grad_(), q, q, sinks=own, dropout_p=0.3), wanted[0])
    torch.manual_seed(5)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert torch.equal(flashgen.attention(q, q, q, sinks=own, dropout_p=0.3), wanted[0])


@torch.no_grad()
def test_each_replay_of_a_call_that_keeps_no_seed_drops_other_elements() -> None:
    q = torch.randn(1, 500, 4, 64, device="cuda", dtype=torch.bfloat16)
    plain = flashgen.attention(q, q, q, dropout_p=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, q, q, dropout_p=0.3)
        again = flashgen.attention(q, q, q, dropout_p=0.3)
    found = [plain]
    for _ in range(3):
        graph.replay()
        found += [out.clone(), again.clone()]
    assert all(not torch.equal(found[i], found[j]) for i in range(7) for j in range(i))


def test_checkpointing_drops_the_same_elements() -> None:
    q = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(5)
    (wanted,) = torch.autograd.grad(flashgen.attention(q, q, q, dropout_p=0.3).float().sum(), q)
    torch.manual_seed(5)
    again = checkpoint(lambda q: flashgen.attention(q, q, q, dropout_p=0.3), q, use_reentrant=False)
    assert apart(torch.autograd.grad(again.float().sum(), q)[0], wanted) < 0.01
    torch.manual_seed(5)
    own = q.detach().clone().requires_grad_()
    checkpoint(lambda q: flashgen.attention(q, q, q, dropout_p=0.3), own, use_reentrant=True).float().sum().backward()
    assert own.grad is not None
    assert apart(own.grad, wanted) < 0.01, "the first run has no gradients, and keeps no seed"


def test_each_replay_drops_other_elements() -> None:
    q = torch.randn(1, 500, 4, 64, device="cuda", dtype=torch.bfloat16)
    flashgen.attention(q, q, q, dropout_p=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, kept = flashgen.attention(q, q, q, dropout_p=0.3, return_dropout_mask=True)
    found = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert apart(out, attention_with_mask(q, kept, 0.3)) < 0.01
        found.append(kept.clone())
    assert len({int(mask.sum()) for mask in found}) > 1


@pytest.mark.parametrize("heads", [(4,), (2, 4)])
def test_slopes_that_change_in_memory_are_read_anew(heads: tuple[int, ...]) -> None:
    q, own = torch.randn(2, 500, 4, 64, device="cuda", dtype=torch.bfloat16), torch.rand(heads, device="cuda")
    before = flashgen.attention(q, q, q, alibi_slopes=own)
    own.mul_(2)
    assert not torch.equal(flashgen.attention(q, q, q, alibi_slopes=own), before)
    assert torch.equal(flashgen.attention(q, q, q, alibi_slopes=own / 2), before)


def test_ids_of_int64_are_those_of_int32_and_read_anew_by_a_graph() -> None:
    q = torch.randn(2, 1000, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    first, second = ((torch.rand(2, 1000, device="cuda") < 0.01).cumsum(1) for _ in range(2))

    def gradient(ids: torch.Tensor) -> torch.Tensor:
        out = flashgen.attention(q, q, q, causal=True, document_ids=ids, deterministic=True)
        return torch.autograd.grad(out.float().square().sum(), q)[0]

    ids = first << 32  # alike in their lower 32 bits
    assert torch.equal(gradient(ids), gradient(first.int()))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = flashgen.attention(q, q, q, causal=True, document_ids=ids)
    for other in (first, second):
        ids.copy_(other << 32)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, flashgen.attention(q, q, q, causal=True, document_ids=other.int()).detach())
