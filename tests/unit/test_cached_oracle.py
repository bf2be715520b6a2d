"""Keys in pages of a cache: what problems and workloads say of them, and what their oracle computes."""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload, equal_lengths
from flashgen.launch.tensors import Tensors
from flashgen.numerics.caches import cached_keys, poison_unused
from flashgen.numerics.forward import exact_attention
from flashgen.numerics.oracle import oracle_of
from flashgen.verification.cases import COARSE, SHAPES, as_dense, grouped_workload

WORKLOAD = Workload(5, 4, 2, 3, 48, pages=20, page_size=16, table_pages=3)
SCALARS = {"scale": 0.25}


def cached(mask: Mask = Mask.CAUSAL, *modifiers: str) -> Problem:
    return Problem(Dtype.BF16, 16, 24, mask, modifiers=modifiers, sequences=Sequences.CACHED)


def drawn(problem: Problem, workload: Workload = WORKLOAD) -> Tensors:
    return Tensors.random(problem, workload, torch.Generator().manual_seed(3))


def test_name() -> None:
    assert cached().name == "bf16_d16x24_causal_cached"
    assert WORKLOAD.name == "B5 H4/2 S3x48 P16"


def test_only_the_forward_pass_of_attention_has_caches() -> None:
    with pytest.raises(ArgumentError, match="caches have no gradients; got cached"):
        Problem(Dtype.BF16, 16, 16, operation="backward", sequences=Sequences.CACHED)
    with pytest.raises(ArgumentError, match="sequences must be dense for softmax"):
        Problem(Dtype.FP32, operation="softmax", sequences=Sequences.CACHED)


def test_keys_are_those_of_the_table() -> None:
    with pytest.raises(ArgumentError, match="len_kv must be table_pages \\* page_size"):
        Workload(5, 4, 2, 3, 47, pages=20, page_size=16, table_pages=3)


def test_bytes_are_those_of_all_keys_of_the_table() -> None:
    problem = cached()
    dense = Problem(Dtype.BF16, 16, 24, Mask.CAUSAL)
    of_dense = operation_of(dense).io_bytes(dense, equal_lengths(WORKLOAD))
    assert operation_of(problem).io_bytes(problem, WORKLOAD) == of_dense


@pytest.mark.parametrize("modifiers", [(), ("alibi", "window")])
@pytest.mark.parametrize("mask", Mask)
def test_each_sequence_is_attention_of_its_own_keys(mask: Mask, modifiers: tuple[str, ...]) -> None:
    problem = cached(mask, *modifiers)
    tensors = drawn(problem, with_sizes_to_verify(problem, WORKLOAD, 2))
    scalars = {**operation_of(problem).scalars(problem, tensors.workload), **SCALARS}
    poison_unused(tensors)
    found = oracle_of(problem).exact(problem, tensors, scalars)
    table, lengths, padding = (tensors[name].tolist() for name in ("block_table", "cache_seqlens", "cache_leftpad"))
    assert not found["out"].isnan().any()
    for b in range(WORKLOAD.batch):
        k, v = (tensors[name][table[b]].flatten(0, 1)[padding[b] : lengths[b]][None] for name in ("k", "v"))
        dense = Problem(Dtype.BF16, 16, 24, mask, modifiers=modifiers)
        own = {name: tensor[b : b + 1] if tensor.ndim > 1 else tensor for name, tensor in tensors.items() if name not in ("k", "v")}
        wanted = oracle_of(dense).exact(dense, {**own, "k": k, "v": v}, scalars)
        for name in ("out", "lse"):
            torch.testing.assert_close(found[name][b : b + 1], wanted[name])


def test_a_sample_is_of_the_whole() -> None:
    problem, tensors = cached(), drawn(cached())
    oracle = oracle_of(problem)
    rows = oracle.sample(problem, WORKLOAD, 13, seed=1)
    of_sample, whole = oracle.exact(problem, tensors, SCALARS, rows), oracle.sampled(oracle.exact(problem, tensors, SCALARS), rows)
    for name in ("out", "lse"):
        torch.testing.assert_close(of_sample[name], whole[name])


def test_without_table_a_sequence_has_its_own_page() -> None:
    tensors = drawn(cached()).without_optional_inputs()
    pages = [set(page.tolist()) for page, _ in cached_keys(tensors)]
    assert all(page <= {b} for b, page in enumerate(pages))
    assert pages[0] == {0}


def test_wrong_values_reach_nothing_outside() -> None:
    tensors = drawn(cached())
    tensors["cache_seqlens"][:] = torch.tensor([2**31 - 1, -5, 3, 7, 48], dtype=torch.int32)
    tensors["cache_leftpad"][:] = torch.tensor([-(2**31), 4, 9, 2, 47], dtype=torch.int32)
    tensors["block_table"][:] = torch.tensor([-1, 2**31 - 1, 20], dtype=torch.int32)
    keys = cached_keys(tensors)
    assert [len(page) for page, _ in keys] == [48, 0, 0, 5, 1]
    assert all(((page >= 0) & (page < 20)).all() for page, _ in keys)


def test_cases_that_are_made_for_dense_tensors_have_all_keys() -> None:
    problem = cached()
    tensors = drawn(problem, grouped_workload(COARSE, 1, Sequences.CACHED))
    equal, dense = as_dense(tensors)
    found = oracle_of(problem).exact(problem, equal, SCALARS)
    out, lse = exact_attention(dense["q"], dense["k"], dense["v"], causal=True, scale=0.25)
    torch.testing.assert_close(found["out"], out)
    torch.testing.assert_close(found["lse"], lse)


@pytest.mark.parametrize("shape", SHAPES)
def test_workloads_to_verify_have_their_keys(shape: tuple[int, int, int, int, int]) -> None:
    for more in (0, 2):
        workload = grouped_workload(shape, 1, Sequences.CACHED, more)
        assert workload.len_kv >= shape[4]
        assert workload.pages > workload.batch
