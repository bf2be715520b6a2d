"""KV caches on a GPU: random calls of `flashgen.attention_with_kvcache`, in streams, graphs and compiled, and a generation beside SDPA."""

from __future__ import annotations

import ctypes
import logging
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.build.artifact import CompileError
from flashgen.build.gpu.driver import check, driver, gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_many, compile_source
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import automatic_families, find_family
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import targets
from flashgen.codegen.workload import Workload
from flashgen.launch import packed_arguments
from flashgen.launch.gpu import CaptureError
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.numerics.append import rotated
from flashgen.records.choice import bucket
from flashgen.selection import compilation, loaded
from flashgen.selection.families import default_spec, families_for
from flashgen.verification.expected import Expected
from tests.support.appended_cases import AppendedCase, call_of, names_of, random_appended_cases, usual_tables, with_own_cache
from tests.support.cached_cases import PROBLEMS, CachedCase, random_cached_cases, with_wrong_values

pytestmark = pytest.mark.gpu

CALLS = random_appended_cases(480, seed=30)
CASES = random_cached_cases(160, seed=31)  # by kernels of each family: 320
FAMILIES = [
    family.name
    for family in automatic_families(PROBLEMS[0])
    if not all(family.refusals(problem, target) for problem in PROBLEMS for target in targets().values())
]
MOST_KERNELS = 150
KernelOf = Callable[[str, Problem], Kernel]
APPENDING = [replace(problem, mask=Mask.FULL, operation="append", modifiers=()) for problem in PROBLEMS]


@pytest.fixture(scope="module")
def kernel_of() -> KernelOf:
    """The default kernel of each family and problem, all of them compiled at once."""
    on = gpu(0)
    specs: dict[tuple[str, Problem], KernelSpec] = {}
    for name in FAMILIES:
        family = find_family(name)
        for problem in PROBLEMS:
            with suppress(ArgumentError):
                families_for(problem, on.device.target, name)
                specs[name, problem] = KernelSpec(family, problem, family.default(problem, on.device.target), on.device.target)
    specs |= {("", problem): default_spec(problem, on.device.target) for problem in APPENDING}
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


def launch(kernel: Kernel, case: CachedCase, tensors: Tensors) -> None:
    if refused := kernel.spec.family.call_refusals(tensors.call({"scale": case.scale}), kernel.spec.config):
        pytest.skip("; ".join(refused))
    run_once(kernel, tensors, {"scale": case.scale})


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random(family: str, case: CachedCase, kernel_of: KernelOf) -> None:
    tensors = case.make("cuda")
    launch(kernel_of(family, case.problem), case, tensors)
    assert case.rejections(tensors) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES[:60], ids=lambda case: case.name)
def test_wrong_lengths_and_pages_reach_nothing_outside(family: str, case: CachedCase, kernel_of: KernelOf) -> None:
    """They are taken as the oracle takes them, so that what comes of them can be judged, too."""
    tensors = with_wrong_values(case.make("cuda"), case.seed)
    launch(kernel_of(family, case.problem), case, tensors)
    assert case.rejections(tensors) == []


@pytest.fixture
def few_kernels(kernel_of: KernelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is known of a call, its kernel is the default of a family, which is in the store."""

    def default_alone(problem: Problem, workload: Workload, device: Device, excluded: frozenset[str]) -> Iterator[KernelSpec]:
        yield default_spec(problem, device.target, excluded, None, bucket(workload))

    monkeypatch.setattr(loaded, "picks", lambda *_: iter(()))
    monkeypatch.setattr(loaded, "model_picks", default_alone)


@pytest.mark.usefixtures("few_kernels")
@pytest.mark.parametrize("case", CALLS, ids=names_of(CALLS))
def test_random_calls(case: AppendedCase) -> None:
    tensors, call = case.make("cuda")
    before = with_own_cache(call)
    assert case.rejections(tensors, before, call_of(call)) == []


def test_few_kernels_compute_all_of_these() -> None:
    """Those of the families, and what calls of this process have loaded beside them."""
    found = {(kernel.spec.name, kernel.spec.target.name) for kernel in loaded.kernels._loaded.values()}
    assert len(found) + (len(FAMILIES) + 1) * len(PROBLEMS) <= MOST_KERNELS


BATCH, HEADS, HEADS_KV, KEYS, PAGE = 6, 8, 2, 3000, 16
PROBLEM = Problem(Dtype.BF16, 128, 128, Mask.CAUSAL, sequences=Sequences.CACHED)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(seed))


def lengths_of(rng: random.Random, most: int = KEYS, batch: int = BATCH) -> Tensor:
    """Any; some are 0, 1 or all."""
    values = [rng.choice((0, 1, most, rng.randint(0, most), round(math.exp(rng.uniform(0, math.log(most)))))) for _ in range(batch)]
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def paged(len_q: int = 1, seed: int = 0) -> dict[str, Any]:
    """A call on pages."""
    rng, width = random.Random(seed), -(-KEYS // PAGE)
    pages = BATCH * width + 5
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: BATCH * width].view(BATCH, width)
    cache = drawn(pages, PAGE, HEADS_KV, 128, seed=seed + 1), drawn(pages, PAGE, HEADS_KV, 128, seed=seed + 2)
    given = {"q": drawn(BATCH, len_q, HEADS, 128, seed=seed), "k_cache": cache[0], "v_cache": cache[1]}
    return {**given, "cache_seqlens": lengths_of(rng), "block_table": table.int().cuda(), "causal": True}


def with_new_keys(call: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The same with as many new keys as queries, all of them rotated."""
    len_q = call["q"].shape[1]
    k, v = (drawn(BATCH, len_q, HEADS_KV, 128, seed=seed + i) for i in (7, 8))
    cosines, sines = usual_tables(call["block_table"].shape[1] * PAGE, 128, "cuda")
    call["cache_seqlens"].clamp_(max=KEYS - len_q)
    return {**call, "k": k, "v": v, "rotary_cos": cosines, "rotary_sin": sines, "rotary_interleaved": False}


def assert_right(found: tuple[Tensor, Tensor], call: dict[str, Any]) -> None:
    """Of a call without new keys."""
    (pages, page_size), width = call["k_cache"].shape[:2], call["block_table"].shape[1]
    of_pages = {"pages": pages, "page_size": page_size, "table_pages": width}
    workload = Workload(BATCH, HEADS, HEADS_KV, call["q"].shape[1], width * page_size, **of_pages)
    given = {"q": call["q"], "k": call["k_cache"], "v": call["v_cache"], "out": found[0], "lse": found[1]}
    tensors = Tensors(PROBLEM, workload, {**given, **{name: call[name] for name in ("cache_seqlens", "block_table")}})
    verdict = Expected.of(tensors).judge(tensors)
    assert verdict.ok, verdict.message


def test_nobody_waits_for_the_device() -> None:
    """Known signatures, other widths of the table, other lengths of queries and another batch."""
    sets: list[dict[str, Any]] = [paged(), with_new_keys(paged()), paged(4), with_new_keys(paged(4)), {**paged(), "cache_seqlens": 77}]
    for call in sets:  # which compiles
        call_of(call)
    narrow = [{**call, "block_table": call["block_table"][:, :-width]} for call in sets for width in (1, 9)]
    fewer = [{**call, "q": call["q"][:, :3]} for call in sets[2:3]]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in (*sets, *narrow, *fewer, *sets):
            call_of(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("len_q", [1, 5])
def test_a_graph_is_right_with_other_lengths_in_each_replay(len_q: int) -> None:
    """Lengths, pages and keys change on the device."""
    rng, call = random.Random(3), paged(len_q)
    call_of(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call_of(call)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        call["cache_seqlens"].copy_(lengths_of(rng))
        if turn % 3 == 0:
            call["block_table"].copy_(call["block_table"][torch.randperm(BATCH)])
        if turn % 7 == 0:
            call["k_cache"].normal_()
            call["v_cache"].normal_()
        graph.replay()
        again, again_lse = call_of(call)
        differences += (out.view(torch.int16) != again.view(torch.int16)).sum()
        differences += (lse.view(torch.int32) != again_lse.view(torch.int32)).sum()
        if turn % 50 == 0:
            assert_right((out, lse), call)
    assert int(differences) == 0


LATE = """
extern "C" __global__ void late(int* to, const int* values, int count, unsigned long long nanoseconds) {
    asm volatile("griddepcontrol.launch_dependents;");
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = values[i];
}
"""


@pytest.fixture(scope="module")
def write_late() -> Callable[[Tensor, Tensor], None]:
    """write_late(to, values): copies int32 in a launch that lets the next one begin at once, and writes 30 us later."""
    cu, arch = driver(), gpu(0).device.target.name
    if int(re.sub(r"\D", "", arch)) < 90:
        pytest.skip("launches overlap from sm_90 on")
    library = check(cu.cuLibraryLoadData(compile_source(Source("late", LATE), arch).cubin, [], [], 0, [], [], 0), "loading it")
    kernel = cu.CUfunction(int(check(cu.cuLibraryGetKernel(library, b"late"), "finding it")))

    def write(to: Tensor, values: Tensor) -> None:
        given = (ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(values.data_ptr()), ctypes.c_int(to.numel()), ctypes.c_uint64(30_000))
        arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(one) for one in given))
        shape = (kernel, 1, 1, 1, 128, 1, 1, 0)
        check(cu.cuLaunchKernel(*shape, torch.cuda.current_stream().cuda_stream, ctypes.addressof(arguments), 0), "launching it")

    return write


@pytest.mark.parametrize("late", ["cache_seqlens", "block_table"])
@pytest.mark.parametrize("len_q", [1, 5])
def test_what_the_launch_before_writes_at_its_very_end(late: str, len_q: int, write_late: Callable[[Tensor, Tensor], None]) -> None:
    """A block may look ahead at lengths, while that launch still runs; it must not go by what they were."""
    rng, call = random.Random(4), paged(len_q)
    call_of(call)
    for _ in range(20):
        values = lengths_of(rng) if late == "cache_seqlens" else call["block_table"][torch.randperm(BATCH)].contiguous()
        write_late(call[late], values)
        found = call_of(call)
        assert torch.equal(call[late], values)
        assert_right(found, call)


def test_a_graph_appends_in_each_replay() -> None:
    """As a generation does: lengths grow on the device, between replays."""
    call, other = with_new_keys(paged()), with_new_keys(paged())
    call_of({**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call_of(call)
    for turn in range(40):
        for name in ("q", "k", "v"):
            new = drawn(*call[name].shape, seed=100 * turn + ord(name))
            call[name].copy_(new)
            other[name].copy_(new)
        graph.replay()
        wanted = call_of(other)
        assert torch.equal(out, wanted[0])
        assert torch.equal(lse, wanted[1])
        assert torch.equal(call["k_cache"], other["k_cache"])
        assert torch.equal(call["v_cache"], other["v_cache"])
        for one in (call, other):
            one["cache_seqlens"].add_(1).clamp_(max=KEYS - 1)


def test_a_cold_capture_is_refused_and_nothing_is_appended() -> None:
    q, k = (torch.zeros(2, 1, 4, 40, device="cuda", dtype=torch.float16) for _ in "qk")
    cache = torch.ones(2, 99, 4, 40, device="cuda", dtype=torch.float16)
    lengths = torch.ones(2, device="cuda", dtype=torch.int32)
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flashgen.attention_with_kvcache(q, cache, cache.clone(), k, k.clone(), cache_seqlens=lengths)
    torch.cuda.synchronize()
    assert torch.equal(cache, torch.ones_like(cache))


def capture_in_vain(call: dict[str, Any]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call_of(call)
        raise ZeroDivisionError


def test_a_capture_may_be_the_first_call_after_warm() -> None:
    flashgen.warm(head_dim=56, causal=True, batch=2, heads=4, kv_heads=2, len_q=1, len_kv=640, page_size=64)
    q, k = (torch.randn(2, 1, heads, 56, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    caches = [torch.randn(20, 64, 2, 56, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    table, lengths = (torch.zeros(shape, device="cuda", dtype=torch.int32) for shape in ((2, 10), (2,)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention_with_kvcache(q, caches[0], caches[1], k, k, cache_seqlens=lengths, block_table=table, causal=True)
    table.copy_(torch.arange(20, device="cuda").view(2, 10))
    lengths.copy_(torch.tensor([3, 600]))
    graph.replay()
    wanted = flashgen.attention_with_kvcache(q, caches[0], caches[1], cache_seqlens=lengths + 1, block_table=table, causal=True)
    assert torch.equal(out, wanted)


def test_a_sequence_may_be_the_same_to_the_bit_in_any_batch() -> None:
    """Alone, with others, in pages or not."""
    call = paged(3)
    call |= {"batch_invariant": True, "cache_seqlens": torch.tensor([KEYS, 1, 0, 2048, 77, 1025], dtype=torch.int32, device="cuda")}
    out, lse = call_of(call)
    order = call["block_table"].long()
    dense = {name: call[name][order].flatten(1, 2) for name in ("k_cache", "v_cache")}
    forms = [call, {**{name: value for name, value in call.items() if name != "block_table"}, **dense}]
    for form in forms:
        for one in (slice(0, 1), slice(3, 4), slice(0, 3), slice(2, 6), slice(0, 6)):
            of_sequences = ("q", "cache_seqlens", "block_table") if "block_table" in form else ("q", "cache_seqlens", "k_cache", "v_cache")
            found = call_of({**form, **{name: form[name][one] for name in of_sequences}})
            assert torch.equal(found[0], out[one])
            assert torch.equal(found[1], lse[one])


def test_calls_are_right_after_a_capture_that_failed() -> None:
    """Its counters were never counted back by a kernel."""
    call = paged()
    wanted = call_of(call)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            capture_in_vain(call)
        for one, right in zip(call_of(call), wanted, strict=True):
            assert torch.equal(one, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call_of(call)
    graph.replay()
    for one, right in zip(found, wanted, strict=True):
        assert torch.equal(one, right)


def test_two_streams_and_two_graphs_at_once() -> None:
    sets = [paged(seed=10 * i) for i in range(2)]
    alone = [call_of(call) for call in sets]
    streams, graphs, captured = [torch.cuda.Stream() for _ in sets], [torch.cuda.CUDAGraph() for _ in sets], []
    torch.cuda.synchronize()
    for graph, call in zip(graphs, sets, strict=True):
        with torch.cuda.graph(graph):
            captured.append(call_of(call))
    for turn in range(60):
        found = []
        for stream, graph, call in zip(streams, graphs, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(call_of(call))
                graph.replay()
        torch.cuda.synchronize()
        for eager, replayed, wanted in zip(found, captured, alone, strict=True):
            for one in (eager, replayed):
                assert torch.equal(one[0], wanted[0]), f"turn {turn}"
                assert torch.equal(one[1], wanted[1])


@pytest.mark.parametrize("len_q", [1, 5])
def test_a_thousand_launches_are_bit_equal(len_q: int) -> None:
    call = with_new_keys(paged(len_q))
    first, first_lse = call_of(call)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = call_of(call)
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
        differences += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    """Caches are of one place, as those of a model are, so that a graph may change them."""
    torch.compiler.reset()
    call, other = with_new_keys(paged(2)), with_new_keys(paged(2))
    for name in ("k_cache", "v_cache", "cache_seqlens", "block_table"):
        torch._dynamo.mark_static_address(call[name])

    def step(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return flashgen.attention_with_kvcache(q, more.pop("k_cache"), more.pop("v_cache"), k, v, **more, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for turn in range(6):
        new = {name: drawn(*call[name].shape, seed=50 * turn + ord(name)) for name in ("q", "k", "v")}
        found = [one.clone() for one in compiled(**{**call, **new})]
        for one, wanted in zip(found, call_of({**other, **new}), strict=True):
            assert torch.equal(one, wanted), f"turn {turn}"
        assert torch.equal(call["k_cache"], other["k_cache"])
        assert torch.equal(call["v_cache"], other["v_cache"])
        for one in (call, other):
            one["cache_seqlens"].add_(2).clamp_(max=KEYS - 2)


def test_compiled_once_for_all_sizes() -> None:
    torch.compiler.reset()
    count = [0]

    def backend(module: Any, inputs: Any) -> Any:
        count[0] += 1
        return module

    compiled: Any = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend=backend, dynamic=True)
    for len_q, width in ((3, 187), (5, 160), (9, 31)):
        call = paged(len_q)
        call |= {"block_table": call["block_table"][:, :width].contiguous(), "return_lse": True}
        for one, wanted in zip(compiled(**call), flashgen.attention_with_kvcache(**call), strict=True):
            assert torch.equal(one, wanted)
    assert count[0] == 1


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("as_graph", [False, True])
def test_a_generation_is_that_of_sdpa(in_pages: bool, as_graph: bool) -> None:
    """A prompt in two parts, and 20 steps, of two layers that share lengths and a table, against exact keys from the outside."""
    prompts, layers, width = (64, 37), 2, 128
    tables = usual_tables(256, width, "cuda")
    lengths = torch.zeros(BATCH, device="cuda", dtype=torch.int32)
    shape = (BATCH * 16, 16) if in_pages else (BATCH, 256)
    caches = [[torch.full((*shape, HEADS_KV, width), math.nan, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(layers)]
    table = torch.randperm(BATCH * 16).view(BATCH, 16).int().cuda() if in_pages else None
    seen = [[torch.empty(BATCH, 0, HEADS_KV, width, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(layers)]
    rotary = {"rotary_cos": tables[0], "rotary_sin": tables[1], "rotary_interleaved": False}
    given = {name: drawn(BATCH, 1, heads, width) for name, heads in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV))}

    def of_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = caches[layer]
        more: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "causal": True, **rotary}
        out: Tensor = flashgen.attention_with_kvcache(q, cache[0], cache[1], k, v, **more)
        return out

    def step() -> list[Tensor]:
        return [of_layer(layer, given["q"] + layer, given["k"] + layer, given["v"]) for layer in range(layers)]

    graph: torch.cuda.CUDAGraph | None = None
    for turn in range(len(prompts) + 20):
        count = prompts[turn] if turn < len(prompts) else 1
        new = {name: drawn(BATCH, count, tensor.shape[2], width, seed=9 * turn + ord(name)) for name, tensor in given.items()}
        if turn < len(prompts):
            found = [of_layer(layer, new["q"] + layer, new["k"] + layer, new["v"]) for layer in range(layers)]
        else:
            for name, tensor in given.items():
                tensor.copy_(new[name])
            if as_graph and turn > len(prompts):
                if graph is None:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        replayed = step()
                graph.replay()
                found = replayed
            else:
                found = step()
        positions = lengths.long()[:, None] + torch.arange(count, device="cuda")
        for layer in range(layers):
            q, k = (rotated((new[name] + layer).double(), positions, tables, False).to(torch.bfloat16) for name in "qk")
            seen[layer] = [torch.cat([old, one], 1) for old, one in zip(seen[layer], (k, new["v"]), strict=True)]
            keys, values = (one.transpose(1, 2).double() for one in seen[layer])
            visible = torch.ones(count, keys.shape[2], dtype=torch.bool, device="cuda").tril(keys.shape[2] - count)
            wanted = scaled_dot_product_attention(q.transpose(1, 2).double(), keys, values, attn_mask=visible, enable_gqa=True)
            torch.testing.assert_close(found[layer].double(), wanted.transpose(1, 2), atol=3e-2, rtol=3e-2)
        lengths.add_(count)


def test_one_length_for_all_of_several_streams() -> None:
    """The lengths that a call makes of a number are kept for the stream that has filled them alone."""
    call = paged()
    cache = [one[: BATCH * 180].view(BATCH, -1, HEADS_KV, 128) for one in (call["k_cache"], call["v_cache"])]
    wanted = {}
    for length in (7, 2000, None):
        tensor = torch.full((BATCH,), cache[0].shape[1] if length is None else length, device="cuda", dtype=torch.int32)
        wanted[length] = flashgen.attention_with_kvcache(call["q"], cache[0], cache[1], cache_seqlens=tensor, causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(30):
        found = []
        for i, stream in enumerate(streams):
            length = (7, 2000, None)[(turn + i) % 3]
            with torch.cuda.stream(stream):
                found.append((length, flashgen.attention_with_kvcache(call["q"], *cache, cache_seqlens=length, causal=True)))
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted[length]) for length, out in found)


def test_wrong_lengths_are_told_where_somebody_asks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    call = paged()
    call["cache_seqlens"][2] = KEYS + PAGE
    call_of(call)
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    with pytest.raises(
        ArgumentError, match=r"^cache_seqlens must be from 0 to the keys that a sequence may have, 3008; got 3016 in entry 2"
    ):
        call_of(call)
    packed_arguments.tell_of_capture.cache_clear()
    with caplog.at_level(logging.WARNING, "flashgen"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call_of(call)
    assert "nothing is checked while a CUDA graph is being captured" in caplog.text


def by_dense_masks(call: dict[str, Any]) -> Tensor:
    """What `call` computes, without a causal mask: of each sequence by SDPA in float64, with a mask that says the same."""
    q, found = call["q"].double(), []
    dense = [call[name][call["block_table"].long()].flatten(1, 2).double() for name in ("k_cache", "v_cache")]
    len_q, room = q.shape[1], dense[0].shape[1]
    for b, length in enumerate(call["cache_seqlens"].tolist()):
        mask = call["mask"].expand(BATCH, HEADS, len_q, room)[b, ..., :length].clone()
        last = min(len_q, length)
        mask[..., length - last :] &= call["tree_mask"].expand(BATCH, HEADS, len_q, len_q)[b, ..., len_q - last :]
        k, v = (one[b, :length].repeat_interleave(HEADS // HEADS_KV, 1).transpose(0, 1) for one in dense)
        found.append(scaled_dot_product_attention(q[b].transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1).nan_to_num(0.0))
    return torch.stack(found)


def with_masks(len_q: int, seed: int = 0) -> dict[str, Any]:
    call, generator = {**paged(len_q), "causal": False}, torch.Generator("cuda").manual_seed(seed)
    room = call["block_table"].shape[1] * PAGE
    sizes = {"mask": (BATCH, 1, len_q, room), "tree_mask": (BATCH, HEADS, len_q, len_q)}
    return call | {name: torch.rand(size, device="cuda", generator=generator) < 0.6 for name, size in sizes.items()}


def test_a_graph_is_right_with_other_masks_in_each_replay() -> None:
    call, rng = with_masks(7), random.Random(5)
    flashgen.attention_with_kvcache(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention_with_kvcache(**call)
    for turn in range(8):
        other = with_masks(7, seed=turn + 1)
        for name in ("mask", "tree_mask"):
            call[name].copy_(other[name])
        call["cache_seqlens"].copy_(lengths_of(rng))
        graph.replay()
        torch.testing.assert_close(out.double(), by_dense_masks(call), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_with_functions(mode: str) -> None:
    torch.compiler.reset()
    call = paged(3)
    table, lengths = torch.randn(HEADS, 2 * KEYS, device="cuda"), call["cache_seqlens"]

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + table[head, query - key + KEYS]

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query + lengths[batch] - 3) & (key % 5 != 0)

    def step(q: Tensor, **more: Any) -> Any:
        return flashgen.attention_with_kvcache(q, more.pop("k_cache"), more.pop("v_cache"), **more, score_mod=score_mod, mask_mod=mask_mod)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for turn in range(3):
        call["q"] = drawn(*call["q"].shape, seed=90 + turn)
        assert torch.equal(compiled(**call).clone(), step(**call))


@pytest.mark.parametrize("modifiers", [(), ("alibi",), ("softcap", "window"), ("tree_mask",), ("boolean_mask", "prefix_len")])
def test_verification(modifiers: tuple[str, ...]) -> None:
    problem = Problem(Dtype.BF16, 64, 64, Mask.CAUSAL, modifiers=modifiers, sequences=Sequences.CACHED)
    assert [result.verdict.message for result in flashgen.verify(problem) if not result.verdict.ok] == []
