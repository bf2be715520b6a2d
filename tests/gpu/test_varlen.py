"""Packed sequences on a GPU: random cases by kernels of both families, and `flashgen.attention_varlen` in streams, graphs and compiled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.build.artifact import CompileError
from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import automatic_families, find_family
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import targets
from flashgen.codegen.workload import Workload
from flashgen.launch import packed_arguments
from flashgen.launch.gpu import CaptureError
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation
from flashgen.selection.families import families_for
from flashgen.verification.expected import Expected
from tests.support.packed_cases import PROBLEMS, PackedCase, random_packed_cases, with_wrong_values, written_outside

pytestmark = pytest.mark.gpu

CASES = random_packed_cases(160, seed=20)
GRADIENTS = [replace(case, problem=replace(case.problem, operation="backward")) for case in CASES[:80]]
FAMILIES = [family.name for family in automatic_families(PROBLEMS[0])]
BACKWARD = [
    family.name
    for family in automatic_families(GRADIENTS[0].problem)
    if not all(family.refusals(case.problem, target) for case in GRADIENTS for target in targets().values())
]
KernelOf = Callable[[str, Problem], Kernel]


@pytest.fixture(scope="module")
def kernel_of() -> KernelOf:
    """The default kernel of each family and problem, all of them compiled at once."""
    on = gpu(0)
    specs: dict[tuple[str, Problem], KernelSpec] = {}
    for name in (*FAMILIES, *BACKWARD):
        family = find_family(name)
        for problem in (*PROBLEMS, *(replace(problem, operation="backward") for problem in PROBLEMS)):
            with suppress(ArgumentError):
                families_for(problem, on.device.target, name)
                specs[name, problem] = KernelSpec(family, problem, family.default(problem, on.device.target), on.device.target)
    store = compilation.store()
    jobs = [(spec, partial(store.get_or_compile, render(spec), spec.target.name)) for spec in dict.fromkeys(specs.values())]
    artifacts = dict(compile_many(jobs))
    failed = [str(result) for result in artifacts.values() if isinstance(result, CompileError)]
    assert not failed, failed[0]
    kernels = {spec: Kernel(spec, artifact, on) for spec, artifact in artifacts.items()}  # type: ignore[arg-type]

    def find(family: str, problem: Problem) -> Kernel:
        if (family, problem) not in specs:
            pytest.skip(f"{family} has no kernel for {problem.name}")
        return kernels[specs[family, problem]]

    return find


def launch(kernel: Kernel, case: PackedCase, tensors: Tensors) -> None:
    if refused := kernel.spec.family.call_refusals(tensors.call({"scale": case.scale}), kernel.spec.config):
        pytest.skip("; ".join(refused))
    run_once(kernel, tensors, {"scale": case.scale})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random(family: str, case: PackedCase, kernel_of: KernelOf) -> None:
    tensors = case.make("cuda")
    launch(kernel_of(family, case.problem), case, tensors)
    assert case.rejections(tensors) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES[:48], ids=lambda case: case.name)
def test_wrong_boundaries_reach_nothing_outside(family: str, case: PackedCase, kernel_of: KernelOf) -> None:
    """They are taken as the oracle takes them, so that what comes of them can be judged, too."""
    tensors = with_wrong_values(case.make("cuda"), case.seed, case.scale)
    launch(kernel_of(family, case.problem), case, tensors)
    assert case.rejections(tensors) == []


@pytest.mark.parametrize("family", BACKWARD)
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.name)
@pytest.mark.parametrize("wrong", [False, True])
def test_random_gradients(family: str, case: PackedCase, wrong: bool, kernel_of: KernelOf) -> None:
    tensors = case.make("cuda")
    if wrong:
        tensors = with_wrong_values(tensors, case.seed, case.scale)
    launch(kernel_of(family, case.problem), case, tensors)
    assert case.rejections(tensors) == []


PROBLEM = Problem(Dtype.BF16, 128, 128, Mask.CAUSAL, sequences=Sequences.PACKED)
TOKENS, HEADS, HEADS_KV = 4096, 4, 2


def boundaries(rng: random.Random, batch: int = 9, tokens: int = TOKENS) -> Tensor:
    """Of any sequences of all tokens but a few; some are empty."""
    ends = sorted(rng.choice((0, 7, tokens, rng.randint(0, tokens), rng.randint(0, tokens))) for _ in range(batch + 1))
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def qkv(tokens: int = TOKENS, seed: int = 0, tokens_kv: int | None = None) -> tuple[Any, Any, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    of_k = (tokens if tokens_kv is None else tokens_kv, HEADS_KV, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in ((tokens, HEADS, 128), of_k, of_k))
    return q, k, v


def assert_right(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_kv: Tensor) -> None:
    workload = Workload(len(of_q) - 1, HEADS, HEADS_KV, len(q), len(k), tokens_q=len(q), tokens_kv=len(k))
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
    tensors = Tensors(PROBLEM, workload, given)
    verdict = Expected.of(tensors).judge(tensors)
    assert verdict.ok, verdict.message


def call(q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_kv: Tensor, **more: Any) -> Any:
    return flashgen.attention_varlen(q, k, v, cu_seqlens_q=of_q, cu_seqlens_kv=of_kv, causal=True, return_lse=True, **more)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("expected", [{}, {"max_seqlen_q": TOKENS, "max_seqlen_kv": TOKENS}, {"max_seqlen_q": 5, "max_seqlen_kv": 0}])
def test_expected_lengths_decide_nothing_but_speed(expected: dict[str, Any]) -> None:
    rng = random.Random(1)
    of_q, of_kv = boundaries(rng), boundaries(rng)
    out, lse = call(*qkv(), of_q, of_kv, **expected)
    assert out.is_contiguous()
    assert_right(out, lse, *qkv(), of_q, of_kv)
    alone = flashgen.attention_varlen(*qkv(), cu_seqlens_q=of_q, cu_seqlens_kv=of_kv, causal=True, **expected)
    assert torch.equal(alone, out)


@pytest.mark.parametrize(("tokens", "tokens_kv", "batch"), [(0, 0, 0), (0, 9, 2), (9, 0, 2), (9, 9, 0), (1, 1, 1)])
def test_empty_sizes(tokens: int, tokens_kv: int, batch: int) -> None:
    of_q, of_kv = (torch.tensor([0] * batch + [size * bool(batch)], dtype=torch.int32, device="cuda") for size in (tokens, tokens_kv))
    out, lse = call(*qkv(tokens, tokens_kv=tokens_kv), of_q, of_kv)
    assert out.shape == (tokens, HEADS, 128)
    assert lse.shape == (HEADS, tokens)
    if batch and tokens and tokens_kv:
        assert_right(out, lse, *qkv(tokens), of_q, of_kv)
    else:
        assert not out.any()
        assert (lse == -math.inf).all()


def test_nobody_waits_for_the_device() -> None:
    rng = random.Random(2)
    sets = [(*qkv(tokens), boundaries(rng, tokens=tokens), boundaries(rng, tokens=tokens)) for tokens in (TOKENS, TOKENS + 8, 3001)]
    for tensors in sets:  # which compiles
        call(*tensors)
    sets += [(*qkv(tokens), boundaries(rng, tokens=tokens), boundaries(rng, tokens=tokens)) for tokens in (TOKENS - 16, 3003)]
    used = torch.ones(9, dtype=torch.int32, device="cuda")
    nested = torch.nested.nested_tensor_from_jagged(qkv()[0], torch.tensor([0, 5, TOKENS], device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensors in sets:
            call(*tensors)
            call(*tensors, max_seqlen_q=99)
            call(*tensors, seqused_kv=used)
        flashgen.attention_varlen(nested, nested, nested)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_is_right_with_other_lengths_in_each_replay() -> None:
    rng = random.Random(3)
    tensors, (of_q, of_kv) = qkv(), (boundaries(rng), boundaries(rng))
    call(*tensors, of_q, of_kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(*tensors, of_q, of_kv)
    for turn in range(150):
        of_q.copy_(boundaries(rng))
        of_kv.copy_(boundaries(rng))
        if turn % 3 == 0:
            tensors[0].normal_()
        graph.replay()
        again, again_lse = call(*tensors, of_q, of_kv)
        assert torch.equal(out, again), f"turn {turn}: {of_q.tolist()}, {of_kv.tolist()}"
        assert torch.equal(lse, again_lse)
        if turn % 10 == 0:
            assert_right(out, lse, *tensors, of_q, of_kv)


def test_a_cold_capture_is_refused() -> None:
    q, k, v = (torch.zeros(77, 4, 40, device="cuda", dtype=torch.float16) for _ in range(3))
    ends = torch.tensor([0, 77], dtype=torch.int32, device="cuda")
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(q, k, v, ends, ends)


def test_two_streams_and_two_graphs_at_once() -> None:
    rng = random.Random(4)
    sets = [(*qkv(seed=i), boundaries(rng), boundaries(rng)) for i in range(2)]
    alone = [call(*tensors) for tensors in sets]
    streams, graphs, captured = [torch.cuda.Stream() for _ in sets], [torch.cuda.CUDAGraph() for _ in sets], []
    torch.cuda.synchronize()
    for graph, tensors in zip(graphs, sets, strict=True):
        with torch.cuda.graph(graph):
            captured.append(call(*tensors))
    for turn in range(60):
        found = []
        for stream, graph, tensors in zip(streams, graphs, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(*tensors))
                graph.replay()
        torch.cuda.synchronize()
        for eager, replayed, wanted in zip(found, captured, alone, strict=True):
            for one in (eager, replayed):
                assert torch.equal(one[0], wanted[0]), f"turn {turn}"
                assert torch.equal(one[1], wanted[1])


def test_a_thousand_launches_are_bit_equal() -> None:
    rng = random.Random(5)
    tensors = (*qkv(), boundaries(rng), boundaries(rng))
    first, first_lse = call(*tensors)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = call(*tensors)
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
        differences += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch.compiler.reset()
    rng = random.Random(6)
    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for tokens in (TOKENS, TOKENS, 3001, 3003, 2000) if mode == "default" else 4 * (TOKENS,):
        tensors = (*qkv(tokens), boundaries(rng, tokens=tokens), boundaries(rng, tokens=tokens))
        found = [one.clone() for one in compiled(*tensors)]
        for one, wanted in zip(found, call(*tensors), strict=True):
            assert torch.equal(one, wanted)


def test_gradients_are_those_of_the_operators() -> None:
    rng = random.Random(7)
    tensors, (of_q, of_kv) = qkv(), (boundaries(rng), boundaries(rng))
    q, k, v = leaves = tuple(tensor.requires_grad_() for tensor in tensors)
    into, step = torch.randn_like(q), torch.compile(call, fullgraph=True)
    with torch.enable_grad():
        out, lse = call(q, k, v, of_q, of_kv)
        found = torch.autograd.grad(out, leaves, into)
        again = torch.autograd.grad(step(q, k, v, of_q, of_kv)[0], leaves, into)
    problem = replace(PROBLEM, operation="backward")
    workload = Workload(9, HEADS, HEADS_KV, TOKENS, TOKENS, tokens_q=TOKENS, tokens_kv=TOKENS)
    by_name = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": into, "cu_seqlens_q": of_q}
    by_name |= {"cu_seqlens_kv": of_kv, "d_q": found[0], "d_k": found[1], "d_v": found[2]}
    given = Tensors(problem, workload, {name: tensor.detach() for name, tensor in by_name.items()})
    verdict = Expected.of(given).judge(given)
    assert verdict.ok, verdict.message
    for one, other in zip(found[1:], again[1:], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[0], again[0], atol=1e-2, rtol=1e-2)


def test_a_score_mod_gets_positions_within_the_sequence_and_its_number() -> None:
    """And what it captures has gradients, as sinks have: by one call for each sequence."""
    ends, scale = [0, 130, 130, 1500, TOKENS], 0.1
    of_tokens = torch.tensor(ends, dtype=torch.int32, device="cuda")
    table, of_sequence, sinks = (torch.randn(shape, device="cuda").requires_grad_() for shape in ((64, HEADS), (4,), (HEADS,)))
    leaves = [*(tensor.requires_grad_() for tensor in qkv()), table, of_sequence, sinks]
    q, k, v = leaves[:3]
    into = torch.randn_like(q)

    def score_mod_of(sequence: int | None) -> Callable[..., Any]:
        def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return score + table[(query - key) % 64, head] + of_sequence[batch if sequence is None else sequence] * (key % 2)

        return score_mod

    with torch.enable_grad():
        more: dict[str, Any] = {"causal": True, "scale": scale, "sinks": sinks}
        out = flashgen.attention_varlen(q, k, v, cu_seqlens_q=of_tokens, cu_seqlens_kv=of_tokens, score_mod=score_mod_of(None), **more)
        found = torch.autograd.grad(out, leaves, into)
        parts = []
        for number, (begin, end) in enumerate(pairwise(ends)):
            own = (tensor[None, begin:end] for tensor in (q, k, v))
            parts.append(flashgen.attention(*own, score_mod=score_mod_of(number), **more)[0])
        wanted = torch.autograd.grad(torch.cat(parts), leaves, into)
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-2, rtol=1e-2)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2 * float(other.abs().max()), rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_mod_gets_positions_within_the_sequence_and_its_number(head_dim: int) -> None:
    """By one call for each sequence, and the same in a graph that is replayed with other boundaries."""
    ends = [0, 130, 130, 1500, TOKENS]
    of_tokens, of_keys = (torch.tensor(ends, dtype=torch.int32, device="cuda") for _ in range(2))  # nobody knows that they are the same
    limits = torch.tensor([100, 5, 700, 900], dtype=torch.int32, device="cuda")
    q, k, v = leaves = [torch.randn(TOKENS, HEADS, head_dim, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)]
    into = torch.randn_like(q)

    def mask_mod_of(sequence: int | None) -> Callable[..., Any]:
        def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (query >= key) & ((key < limits[batch if sequence is None else sequence]) | (query - key < 50 + head * 10))

        return mask_mod

    with torch.enable_grad():
        boundaries: dict[str, Any] = {"cu_seqlens_q": of_tokens, "cu_seqlens_kv": of_keys}
        out = flashgen.attention_varlen(q, k, v, **boundaries, mask_mod=mask_mod_of(None))
        found = torch.autograd.grad(out, leaves, into)
        own = [[tensor[None, begin:end] for tensor in (q, k, v)] for begin, end in pairwise(ends)]
        parts = [flashgen.attention(*each, mask_mod=mask_mod_of(number))[0] for number, each in enumerate(own)]
        wanted = torch.autograd.grad(torch.cat(parts), leaves, into)
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-2, rtol=1e-2)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2 * float(other.abs().max()), rtol=2e-2)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = flashgen.attention_varlen(q, k, v, **boundaries, mask_mod=mask_mod_of(None))
        for tensor in (of_tokens, of_keys):
            tensor.copy_(torch.tensor([0, 1000, 1000, 1001, TOKENS]))
        graph.replay()
        assert torch.equal(replayed, flashgen.attention_varlen(q, k, v, **boundaries, mask_mod=mask_mod_of(None)))


@pytest.mark.parametrize(
    ("head_dim", "kind"),
    [(64, "mask"), (64, "bias"), (64, "key-bias"), (96, "both"), (128, "bias-fp32"), (128, "both"), (128, "mask"), (192, "bias")],
)
def test_a_bias_and_a_mask_are_of_each_sequence(head_dim: int, kind: str) -> None:
    """By one call for each sequence, with what that has of them. The longest is longer than they are, and gets 0 beyond."""
    ends, most = [0, 130, 130, 1500, TOKENS], 1400
    of_tokens = torch.tensor(ends, dtype=torch.int32, device="cuda")
    q, k, v = leaves = [torch.randn(TOKENS, HEADS, head_dim, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)]
    into, longest = torch.randn_like(q), max(end - begin for begin, end in pairwise(ends))
    mask, bias = None, None
    if kind in ("mask", "both"):
        mask = torch.rand(len(ends) - 1, HEADS, most, most, device="cuda") < 0.8
    if kind != "mask":
        sizes = (1, HEADS, 1, most) if kind == "key-bias" else (1 if kind == "both" else len(ends) - 1, HEADS, most, most)
        bias = torch.randn(sizes, dtype=torch.bfloat16 if kind in ("bias", "key-bias") else torch.float32, device="cuda").requires_grad_()
        leaves.append(bias)

    def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """With zeros beyond, as far as the longest sequence goes."""
        if tensor is None:
            return None
        queries = longest - most if tensor.shape[2] > 1 else 0
        return torch.nn.functional.pad(tensor, (0, longest - most, 0, queries))

    with torch.enable_grad():
        boundaries: dict[str, Any] = {"cu_seqlens_q": of_tokens, "cu_seqlens_kv": of_tokens}
        out = flashgen.attention_varlen(q, k, v, **boundaries, causal=True, mask=mask, bias=bias)
        found = torch.autograd.grad(out, leaves, into)
        parts, whole_mask, whole_bias = [], whole(mask), whole(bias)
        for number, (begin, end) in enumerate(pairwise(ends)):
            own = (tensor[None, begin:end] for tensor in (q, k, v))
            cut = [
                None if t is None else t[number if len(t) > 1 else 0][None, :, : end - begin, : end - begin]
                for t in (whole_mask, whole_bias)
            ]
            parts.append(flashgen.attention(*own, causal=True, mask=cut[0], bias=cut[1])[0])
        wanted = torch.autograd.grad(torch.cat(parts), leaves, into)
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-2, rtol=1e-2)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2 * float(other.abs().max()), rtol=2e-2)


def test_nested_tensors() -> None:
    offsets = torch.tensor([0, 100, 100, 3000, TOKENS], device="cuda")
    q, k, v = (torch.nested.nested_tensor_from_jagged(tensor, offsets) for tensor in qkv())
    out, lse = flashgen.attention_varlen(q, k, v, causal=True, return_lse=True)
    wanted = call(*qkv(), offsets.int(), offsets.int())
    assert torch.equal(out.values(), wanted[0])
    assert torch.equal(lse, wanted[1])


def test_wrong_boundaries_are_told_where_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, 900, 800, TOKENS], dtype=torch.int32, device="cuda")
    call(*qkv(), ends, ends)
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    with pytest.raises(ArgumentError, match=r"^cu_seqlens_q must not fall; got 900 in entry 1 and 800 in entry 2"):
        call(*qkv(), ends, ends)


@pytest.mark.parametrize("modifiers", [(), ("alibi",), ("window", "softcap")])
def test_verification(modifiers: tuple[str, ...]) -> None:
    problem = Problem(Dtype.BF16, 64, 64, Mask.CAUSAL, modifiers=modifiers, sequences=Sequences.PACKED)
    assert [result.verdict.message for result in flashgen.verify(problem) if not result.verdict.ok] == []


def test_what_lies_beside_is_found() -> None:
    tensors = CASES[0].make("cuda")
    assert written_outside(tensors["out"]) == 0
    buffer = torch.empty(0, dtype=torch.bfloat16, device="cuda").set_(tensors["out"].untyped_storage())
    buffer[0] = 1.0
    assert written_outside(tensors["out"]) == 1
