"""`flashgen.attention_with_kvcache` of CPU tensors, by kernels in the emulator: what is appended, rotated and seen, whoever asks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.launch.tensors import Tensors
from flashgen.numerics.append import rotated
from tests.support.appended_cases import AppendedCase, call_of, names_of, random_appended_cases, usual_tables, with_own_cache
from tests.support.cached_cases import TRACED, CachedCase, with_wrong_values

# One kernel for all that a plain run computes.
PROBLEM = Problem(Dtype.BF16, 16, 16, Mask.CAUSAL, sequences=Sequences.CACHED)
_TABLE = ((5, 0, 9, -1), (7, -1, -1, 99), (2, 4, -1, -1), (5, 0, 3, 1))
_LENGTHS, _PADDING = (41, 3, 18, 64), (0, 0, 15, 7)
_SIZES = ((4, 2), 3, _LENGTHS, _PADDING, 16, _TABLE, 10)
PAGED = CachedCase("pages", PROBLEM, *_SIZES, "slices", 0.3, 1.0, 7)
DENSE = CachedCase("dense", PROBLEM, (4, 2), 3, _LENGTHS, None, 70, None, 5, "heads", 0.3, 1.0, 8)
BY_ENTRY = CachedCase("by entry", PROBLEM, (4, 2), 3, _LENGTHS, _PADDING, 70, ((3,), (1,), (0,), (4,)), 5, "rows", 0.3, 1.0, 9)
CASES = [
    AppendedCase(PAGED, 3, 12, True, True),
    AppendedCase(DENSE, 2, 16, False, False),
    AppendedCase(BY_ENTRY, 3, 0, False, False),
    AppendedCase(PAGED, 0, 0, False, False),
]
MODIFIED = [
    AppendedCase(replace(one, name=name, problem=replace(PROBLEM, modifiers=modifiers)), new, 0, True, True)
    for one, name, modifiers, new in (
        (PAGED, "tree mask", ("tree_mask",), 3),
        (BY_ENTRY, "mask and prefix", ("boolean_mask", "prefix_len"), 2),
        (DENSE, "bias and functions", ("bias", TRACED), 0),
    )
]
RANDOM = random_appended_cases(12, seed=22, longest=200, pairs=2**14)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


@pytest.mark.parametrize("case", CASES, ids=names_of(CASES))
def test_calls_are_right(case: AppendedCase) -> None:
    tensors, call = case.make("cpu")
    before = with_own_cache(call)
    found = call_of(call)
    assert case.rejections(tensors, before, found) == []
    assert flashgen.attention_with_kvcache(**before).equal(found[0])


@pytest.mark.parametrize(
    "case", [MODIFIED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in MODIFIED[1:])], ids=names_of(MODIFIED)
)
def test_calls_with_modifiers_are_right(case: AppendedCase) -> None:
    tensors, call = case.make("cpu")
    assert case.rejections(tensors, with_own_cache(call), call_of(call)) == []


@pytest.mark.parametrize("case", CASES[:1], ids=names_of(CASES[:1]))
def test_a_compiled_call_is_the_same(case: AppendedCase) -> None:
    _, call = case.make("cpu")
    other = with_own_cache(call)
    found = call_of(call)
    compiled: Any = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend="aot_eager", dynamic=True)
    for one, wanted in zip(compiled(**other, return_lse=True), found, strict=True):
        assert one.equal(wanted)
    assert other["k_cache"].nan_to_num().equal(call["k_cache"].nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("case", RANDOM, ids=names_of(RANDOM))
def test_random_calls_are_right(case: AppendedCase) -> None:
    tensors, call = case.make("cpu")
    before = with_own_cache(call)
    assert case.rejections(tensors, before, call_of(call)) == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.parametrize("case", CASES[:3], ids=names_of(CASES[:3]))
def test_wrong_lengths_and_pages_reach_nothing_outside(case: AppendedCase, seed: int) -> None:
    """The emulator ends at the first access outside of a tensor. All that is in the cache, and what is appended to it, is finite."""
    tensors, call = case.make("cpu")
    wrong = with_wrong_values(tensors, seed)
    call |= {"cache_seqlens": wrong["cache_seqlens"]} | ({"cache_leftpad": wrong["cache_leftpad"]} if "cache_leftpad" in wrong else {})
    for name in ("block_table", "cache_batch_idx"):
        if name in call:
            call[name] = wrong["block_table"] if name == "block_table" else wrong["block_table"][:, 0]
    for name in ("k_cache", "v_cache"):
        call[name].nan_to_num_(0.25)
    out, _ = call_of(call)
    assert out.isfinite().all()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence, by float64 PyTorch; [length, heads, width]."""
    offset = len(k) - len(q)
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(offset)
    q, k, v = (one.double().transpose(0, 1) for one in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("paged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_generation_is_that_of_plain_pytorch(paged: bool) -> None:
    """A prompt in two parts, then steps of one query: each sees all before it, wherever keys are kept."""
    generator = torch.Generator().manual_seed(1)
    tables = usual_tables(64, 16)
    if paged:
        caches = [torch.full((12, 8, 2, 16), math.nan, dtype=torch.bfloat16) for _ in "kv"]
        table = torch.randperm(12, generator=generator).view(2, 6).int()
    else:
        caches, table = [torch.full((2, 48, 2, 16), math.nan, dtype=torch.bfloat16) for _ in "kv"], None
    lengths = torch.zeros(2, dtype=torch.int32)
    all_k, all_v = [torch.empty(2, 0, 2, 16, dtype=torch.float64) for _ in "kv"]
    for count in (13, 8, 1, 1, 1):
        q, k, v = (torch.randn(2, count, heads, 16, generator=generator).to(torch.bfloat16) for heads in (4, 2, 2))
        out = flashgen.attention_with_kvcache(
            q, caches[0], caches[1], k, v, cache_seqlens=lengths, block_table=table, causal=True,
            rotary_cos=tables[0], rotary_sin=tables[1], rotary_interleaved=False,
        )  # fmt: skip
        positions = lengths.long()[:, None] + torch.arange(count)
        turned, new_k = (rotated(one.double(), positions, tables, False).to(torch.bfloat16) for one in (q, k))
        all_k, all_v = torch.cat([all_k, new_k], 1), torch.cat([all_v, v.double()], 1)
        for b in range(2):
            torch.testing.assert_close(out[b].double(), plain(turned[b], all_k[b], all_v[b]), atol=3e-2, rtol=3e-2)
        lengths += count


@pytest.mark.slow
def test_a_sequence_may_be_the_same_to_the_bit_in_any_batch() -> None:
    """Alone or with others, in pages or not."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, count, heads, 16, generator=generator).to(torch.bfloat16) for count, heads in ((2, 4), (2100, 2), (2100, 2)))
    lengths = torch.tensor([2100, 40, 1500], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "batch_invariant": True}
    out = flashgen.attention_with_kvcache(q, k, v, cache_seqlens=lengths, **options)
    pages = [one.reshape(-1, 50, 2, 16) for one in (k, v)]
    table = torch.arange(3 * 42, dtype=torch.int32).view(3, 42)
    assert flashgen.attention_with_kvcache(q, pages[0], pages[1], cache_seqlens=lengths, block_table=table, **options).equal(out)
    for b in range(3):
        one = slice(b, b + 1)
        assert flashgen.attention_with_kvcache(q[one], k[one], v[one], cache_seqlens=lengths[one], **options).equal(out[one])


def test_there_may_be_no_keys() -> None:
    q, cache = torch.ones(2, 3, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 0, 2, 16, dtype=torch.bfloat16)
    full = torch.full((2, 8, 2, 16), math.nan, dtype=torch.bfloat16)
    for k_cache, lengths in ((cache, None), (full, 0), (full, torch.tensor([-5, 0], dtype=torch.int32))):
        out, lse = flashgen.attention_with_kvcache(q, k_cache, k_cache, cache_seqlens=lengths, causal=True, return_lse=True)
        assert not out.any()
        assert (lse == -math.inf).all()


def test_a_case_that_is_wrong_is_rejected() -> None:
    """What the other tests rely on: keys that are not written, written twice or rotated in another way."""
    case = CASES[0]
    for change in ("k", "rotary_interleaved", "cache_seqlens"):
        tensors, call = case.make("cpu")
        before = with_own_cache(call)
        given: dict[str, Any] = {"k": call["k"].roll(1, 1), "rotary_interleaved": False, "cache_seqlens": call["cache_seqlens"] - 1}
        found = call_of({**call, change: given[change]})
        assert case.rejections(tensors, before, found) != [], change


def test_tensors_are_those_of_the_case() -> None:
    tensors, call = CASES[0].make("cpu")
    assert isinstance(tensors, Tensors)
    assert call["k"].shape == (4, 3, 2, 16)
    assert call["cache_seqlens"].tolist() == [38, 0, 15, 61]
