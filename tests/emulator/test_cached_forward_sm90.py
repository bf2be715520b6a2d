"""Many queries of keys in pages of a cache, in the forward kernel for Hopper: by the numerics rule, with NaN in all that no sequence uses;
planted faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import torch

from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.families.attention_forward_sm90.family import FAMILY
from flashgen.codegen.problem import Dtype, Mask, Sequences
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from tests.emulator.test_cached_sm90 import CACHES, ORDERS, judged, poisoned
from tests.support.cached_cases import CachedCase, random_cached_cases
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_cases, planned_faults, why_caught
from tests.support.plan import few_of
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

TARGET = find_target("sm_90a")
SMS = 3  # so few that blocks have several work tiles
Config = partial(AttentionForwardSm90Config, scheduler=Scheduler.DYNAMIC)


def kernel_of(
    head_dim: int, mask: Mask, config: AttentionForwardSm90Config, dtype: Dtype = Dtype.FP16, modifiers: tuple[str, ...] = ()
) -> NamedKernel:
    return NamedKernel("attention_forward_sm90", head_dim, mask, False, modifiers, config, dtype, Sequences.CACHED)


KERNELS = {
    "two": kernel_of(64, Mask.CAUSAL, Config(2, 64, 2, 2, 1)),
    "one": kernel_of(72, Mask.FULL, Config(1, 48, 2, 1, 1, RowMax.EXACT, ping_pong=False), Dtype.BF16),
    "exact": kernel_of(64, Mask.CAUSAL, Config(2, 80, 2, 1, 1, RowMax.EXACT), Dtype.BF16),
    "packed": kernel_of(128, Mask.CAUSAL, Config(2, 64, 2, 1, 2, pack_gqa=4)),
    "modified": kernel_of(64, Mask.CAUSAL, Config(2, 64, 2, 2, 1), modifiers=("sinks", "softcap", "window")),
    "alibi": kernel_of(64, Mask.FULL, Config(2, 64, 2, 2, 1), modifiers=("alibi", "window")),
}
QUERIES = {"two": 150, "one": 70, "exact": 210, "packed": 40, "modified": 130, "alibi": 130}


def made(kernel: str, cache: str) -> Tensors:
    return CACHES[cache].of(KERNELS[kernel].spec().problem, QUERIES[kernel], (8, 2))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


def planned(cases: Iterable[tuple[str, ...]], seconds: float = 1.0) -> list[object]:
    return planned_cases(cases, KERNELS, seconds, ("attention_forward_sm90",))


@pytest.mark.parametrize("cache", few_of(CACHES, "small-pages", "pages", "one-page", "no-table"))
def test_each_sequence_has_its_own_keys(cache: str) -> None:
    spec = KERNELS["two"].spec()
    verdict = judged(spec, emulated_text(spec), made("two", cache), sm_count=SMS)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(("kernel", "cache"), planned(itertools.product(KERNELS, CACHES), 2.0))
def test_in_all_orders(kernel: str, cache: str) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), made(kernel, cache), ORDERS, SMS)
    assert verdict.ok, verdict.message


WRONG: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {  # lengths, padding, entries of the table
    "negative": ([480, -(2**31), 33, -1, 1], [-(2**31), -1, -3, 0, 0], [-1, 3, -(2**31)]),
    "far": ([2**31 - 1, 481, 33, 480, 1], [5, 2**31 - 1, 33, 481, 0], [2**31 - 1, 151, 150]),
}


@pytest.mark.parametrize(("kernel", "wrong"), planned((kernel, wrong) for kernel in ("two", "one") for wrong in WRONG))
def test_what_the_device_says_wrongly_touches_nothing_outside(kernel: str, wrong: str) -> None:
    """The emulator has pages that nobody may touch around every tensor."""
    spec, tensors = KERNELS[kernel].spec(), made(kernel, "small-pages")
    for name in ("k", "v"):
        tensors[name].nan_to_num_(0.25)
    lengths, padding, entries = WRONG[wrong]
    tensors["cache_seqlens"].copy_(torch.tensor(lengths))
    tensors = tensors.replacing(cache_leftpad=torch.tensor(padding, dtype=torch.int32))
    tensors["block_table"].view(-1, 3)[:] = torch.tensor(entries, dtype=torch.int32)
    verdict = judged(spec, emulated_text(spec), poisoned(tensors), sm_count=SMS)
    assert verdict.ok, verdict.message


def taken(case: CachedCase) -> bool:
    call = case.make("cpu").call({"scale": case.scale})
    return not FAMILY.refusals(case.problem, TARGET) and not FAMILY.call_refusals(call)


CASES = [case for case in random_cached_cases(16, seed=12, longest=250, pairs=2**18) if taken(case)]


@pytest.mark.parametrize("case", few_of(CASES, CASES[0]), ids=lambda case: case.name)
def test_random_cases(case: CachedCase) -> None:
    spec = KernelSpec(FAMILY, case.problem, FAMILY.default(case.problem, TARGET), TARGET)
    tensors = case.make("cpu")
    run_on_cpu(emulated_kernel(spec), tensors, {"scale": case.scale}, limits=LIMITS)
    assert case.rejections(tensors) == []


FAULTS = [
    ("small-pages", fault_of("entry-one-off", "table_row + at.page;", "table_row + max(0, at.page - 1);", "two")),
    ("small-pages", fault_of("pages-of-the-first", "*sequences.entry(batch, at)", "*sequences.entry(0, at)", "two")),
    ("no-table", fault_of("first-page-alone", "nullptr ? batch :", "nullptr ? 0 :", "two")),
    ("small-pages", fault_of("keys-of-the-block-before", "work.batch, k_block - 1);", "work.batch, k_block);", "two")),
    ("small-pages", fault_of("values-of-the-block-before", "work.batch, block - 1);", "work.batch, block);", "two")),
    ("small-pages", fault_of("one-box-again", "kBlockKv + lane_index() * p.box_keys;", "kBlockKv;", "two")),
    ("odd-pages", fault_of("row-of-one-box", "map, full, row, head, page);", "map, full, 0, head, page);", "two")),
    ("small-pages", fault_of("boxes-in-one-place", "first * 128, map, barrier", "0 * first, map, barrier", "two")),
    ("pages", fault_of("row-of-the-page-lost", "return {at.row, sequences", "return {0, sequences", "one")),
    ("small-pages", fault_of("length-of-the-neighbour", "TiledSpan::of(p, work.batch)}", "TiledSpan::of(p, 0)}", "two")),
    ("pages", fault_of("padding-read-as-keys", "padding == nullptr ? 0 :", "true ? 0 :", "two")),
    ("pages", fault_of("padding-not-hidden", "return {front, 0x7fffffff};", "return {0, 0x7fffffff};", "two")),
    ("pages", fault_of("padding-in-the-causal-offset", "(p.len_q, keys.end), keys)", "(p.len_q, keys.end - keys.front), keys)", "two")),
    ("large-pages", fault_of("padding-of-V-stays", "tile.clear_rows(0, front, lane_index(), 32);", "", "two")),
    ("pages", fault_of("stale-tail-of-V", "tile.clear_rows(end, kBlockKv, lane_index(), 32);", "", "two")),
    ("pages", fault_of("tail-one-short", "tile.clear_rows(end, kBlockKv", "tile.clear_rows(end + 1, kBlockKv", "two")),
    ("pages", fault_of("values-of-another-head", "p.v_map, full, head_kv);", "p.v_map, full, 0);", "two")),
    ("pages", fault_of("values-of-the-next-block", "box.load(p, tile,", "following.load(p, tile,", "two")),
]
# Each with what its check says.
RACES = [
    ("missing proxy fence", fault_of("zeros-without-a-fence", "                fence_proxy_async();\n", "", "two")),
    ("", fault_of("zeros-before-V-is-there", "                smem.landing.consumer_wait(landed);\n", "", "two")),
    ("arrivals", fault_of("Q-not-released", "        smem.q_pipeline.consumer_release(q_state.stage, elected);\n", "", "two")),
]


def shows(kernel: str, planted: Fault, cache: str) -> str:
    """What rejects what a kernel with the fault does; empty if nothing does."""
    spec, tensors = KERNELS[kernel].spec(), made(kernel, cache)
    assert judged(spec, emulated_text(spec), tensors, ORDERS, SMS).ok
    return why_caught(KERNELS[kernel], planted, lambda text: judged(spec, text, tensors, ORDERS, SMS))


@pytest.mark.parametrize(("kernel", "planted"), planned_faults((of for _, of in FAULTS), KERNELS))
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    (cache,) = (cache for cache, (_, one) in FAULTS if one is planted)
    assert shows(kernel, planted, cache)


@pytest.mark.parametrize(("kernel", "planted"), planned_faults((of for _, of in RACES), KERNELS))
def test_a_race_is_caught_by_the_check_for_it(kernel: str, planted: Fault) -> None:
    (says,) = (says for says, (_, one) in RACES if one is planted)
    message = shows(kernel, planted, "pages")
    assert message
    assert says in message
