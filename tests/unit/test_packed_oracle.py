"""The oracle of packed sequences: each is as if it were alone, and what is in none has no value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics import forward
from flashgen.numerics.forward import exact_attention
from flashgen.numerics.link import links_of
from flashgen.numerics.oracle import oracle_of
from flashgen.numerics.sequences import drawn_sequences, equal_sequences, sequences_of
from flashgen.verification.expected import Expected

WORKLOAD = Workload(6, 4, 2, 100, 150, tokens_q=300, tokens_kv=401)


def packed(mask: Mask = Mask.CAUSAL, *modifiers: str, dtype: Dtype = Dtype.BF16) -> Problem:
    return Problem(dtype, 16, 24, mask, modifiers=modifiers, sequences=Sequences.PACKED)


def drawn(problem: Problem, workload: Workload = WORKLOAD) -> Tensors:
    return Tensors.random(problem, workload, torch.Generator().manual_seed(0))


def boundaries(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


SCALARS = {"scale": 0.3, "softcap": 2.0, "dropout_p": 0.3}


def test_elements_beyond_a_tensor_are_0_and_one_is_that_of_all() -> None:
    """Of tensors that have an element for each score, where sequences are longer."""
    problem = packed(Mask.FULL, "bias", "boolean_mask")
    tensors = drawn(problem, Workload(2, 4, 2, 10, 12, tokens_q=60, tokens_kv=80))
    tensors["mask"].fill_(True)
    found = oracle_of(problem).exact(problem, tensors, SCALARS)
    for one in sequences_of(tensors):
        lengths = one.queries.stop - one.queries.start, one.keys.stop - one.keys.start
        queries, keys = min(lengths[0], 10), min(lengths[1], 12)
        nothing = found["lse"][:, one.queries][:, queries:]
        assert (nothing == -math.inf).all(), "the mask hides what it has no element of"
        rows, seen = slice(one.queries.start, one.queries.start + queries), slice(one.keys.start, one.keys.start + keys)
        own = tensors["bias"][one.number, :, :queries, :keys].double()
        q, k = tensors["q"][rows].double().transpose(0, 1), tensors["k"][seen].double().transpose(0, 1).repeat_interleave(2, 0)
        torch.testing.assert_close(found["lse"][:, rows], (q @ k.mT * SCALARS["scale"] + own).logsumexp(-1))
    for_all = tensors.replacing(mask=torch.ones(2, 1, 1, 1, dtype=torch.bool).expand(2, 4, 1, 1))
    assert oracle_of(problem).exact(problem, for_all, SCALARS)["lse"][:, sequences_of(tensors)[0].queries].isfinite().all()


@pytest.mark.parametrize("modifiers", [(), ("softcap", "sinks"), ("alibi",), ("prefix_len",), ("dropout",), ("bias",)])
@pytest.mark.parametrize("mask", list(Mask))
def test_each_sequence_is_as_if_it_were_alone(mask: Mask, modifiers: tuple[str, ...]) -> None:
    problem = packed(mask, *modifiers)
    tensors = drawn(problem, Workload(6, 4, 2, 300, 401, tokens_q=300, tokens_kv=401))
    found = oracle_of(problem).exact(problem, tensors, SCALARS)
    inside = torch.zeros(300, dtype=torch.bool)
    for one in sequences_of(tensors):
        alone = {name: tensor[one.number :][:1] if name in ("alibi_slopes", "prefix_len") else tensor for name, tensor in tensors.items()}
        if "bias" in modifiers:
            lengths = (slice(one.queries.stop - one.queries.start), slice(one.keys.stop - one.keys.start))
            alone["bias"] = tensors["bias"][one.number :][:1, :, *lengths]
        # A dropout is that of the entry of the batch: it counts the heads before.
        number = one.number if "dropout" in modifiers else 0
        out, lse = exact_attention(
            *(tensors[name][tokens][None] for name, tokens in (("q", one.queries), ("k", one.keys), ("v", one.keys))),
            causal=mask is Mask.CAUSAL,
            scale=SCALARS["scale"],
            links=links_of(problem, alone, SCALARS),
            first_batch=number,
        )
        torch.testing.assert_close(found["out"][one.queries], out[0], rtol=0, atol=0)
        torch.testing.assert_close(found["lse"][:, one.queries], lse[0], rtol=0, atol=0)
        inside[one.queries] = True
    assert not inside.all()
    assert not found["out"][~inside].any()
    assert (found["lse"][:, ~inside] == -math.inf).all()


@pytest.mark.parametrize("method", ["exact", "plain"])
def test_a_sample_is_a_part_of_the_whole(method: str) -> None:
    problem = packed(Mask.CAUSAL, "alibi")
    tensors, oracle = drawn(problem), oracle_of(problem)
    sample = oracle.sample(problem, WORKLOAD, 200, seed=1)
    assert sample[:, 2].max() == 299
    assert (sample[:, 0] == 0).all()
    whole, part = (getattr(oracle, method)(problem, tensors, SCALARS, of) for of in (None, sample))
    for name, tensor in oracle.sampled(whole, sample).items():
        assert part[name].dtype == tensor.dtype
        torch.testing.assert_close(part[name], tensor, rtol=1e-2 if method == "plain" else 1e-12, atol=1e-12)


def test_rows_are_those_that_an_output_was_written_in() -> None:
    tensors = drawn(packed())
    touched = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in tensors.outputs.items()}
    touched["out"][7, 3, 1], touched["lse"][2, 5] = True, True
    assert oracle_of(packed()).rows_of(touched).tolist() == [[0, 2, 5], [0, 3, 7]]


def test_rows_outside_must_be_exactly_0() -> None:
    problem = packed()
    tensors = drawn(problem)
    expected = Expected.of(tensors)
    for name, tensor in tensors.outputs.items():
        tensor.copy_(expected.plain[name])
    assert expected.judge(tensors).ok
    used = sequences_of(tensors)[0].queries
    tensors["out"][used.stop, 0, 0] = 1e-30
    assert "not 0 in 1 rows" in expected.judge(tensors).message
    tensors["out"][used.stop, 0, 0] = 0
    tensors["lse"][0, used.stop] = -1e30
    assert "infinite in the wrong places" in expected.judge(tensors).message


@pytest.mark.parametrize(
    ("ends", "used", "slices"),
    [
        ((0, 2, 2, 5), None, [(0, 2), (2, 2), (2, 5)]),
        ((1, 2, 4, 4), None, [(1, 2), (2, 4), (4, 4)]),
        ((0, 2, 4, 5), (5, 0, -3), [(0, 2), (2, 2), (4, 4)]),
        ((3, 1, 4, 9), None, [(3, 3), (3, 4), (4, 5)]),
        ((-7, -1, 2**31 - 1, 0), None, [(0, 0), (0, 5), (5, 5)]),
    ],
)
def test_boundaries_are_taken_as_kernels_take_them(ends: Any, used: Any, slices: list[tuple[int, int]]) -> None:
    tensors = {"q": torch.empty(5, 1, 8), "k": torch.empty(5, 1, 8)}
    tensors |= {"cu_seqlens_q": boundaries(*ends), "cu_seqlens_kv": boundaries(0, 1, 2, 3)}
    if used is not None:
        tensors["seqused_q"] = boundaries(*used)
    assert [(one.queries.start, one.queries.stop) for one in sequences_of(tensors)] == slices


@pytest.mark.parametrize(("batch", "tokens_q", "tokens_kv"), [(0, 5, 5), (1, 7, 3), (2, 0, 4), (3, 1, 1), (9, 2, 300), (64, 4096, 4096)])
def test_drawn_boundaries_take_all_tokens(batch: int, tokens_q: int, tokens_kv: int) -> None:
    workload = Workload(batch, 1, 1, 1, 1, tokens_q=tokens_q, tokens_kv=tokens_kv)
    found = drawn_sequences(packed(), workload, torch.Generator().manual_seed(3))
    for side, tokens in (("q", tokens_q), ("kv", tokens_kv)):
        ends, used = found[f"cu_seqlens_{side}"], found[f"seqused_{side}"]
        assert ends.dtype == used.dtype == torch.int32
        assert ends[0] == 0
        assert (ends.diff() >= 0).all()
        assert not batch or ends[-1] == tokens
        assert len(used) == batch
        assert ((used >= 0) & (used <= ends.diff())).all()
    if batch == 64:
        assert torch.equal(found["cu_seqlens_q"], found["cu_seqlens_kv"]), "of as many tokens"
        lengths = found["cu_seqlens_q"].diff()
        assert (lengths[2::4] == 1).all()
        assert (lengths[3::4] == 0).all()
        assert lengths.max() > 8 * lengths[0::4].min()
    assert drawn_sequences(Problem(Dtype.BF16, 8), workload, torch.Generator()) == {}


def test_equal_sequences_are_a_dense_batch() -> None:
    workload = Workload(3, 4, 2, 5, 9, tokens_q=15, tokens_kv=27)
    tensors = drawn(packed(), workload)
    found = oracle_of(packed()).exact(packed(), {**tensors.without_optional_inputs(), **equal_sequences(tensors, workload)}, SCALARS)
    q, k, v = (tensors[name].unflatten(0, (3, -1)) for name in "qkv")
    out, lse = forward.exact_attention(q, k, v, causal=True, scale=SCALARS["scale"])
    torch.testing.assert_close(found["out"], out.flatten(0, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["lse"], lse.transpose(0, 1).flatten(1), rtol=1e-12, atol=1e-12)


def test_tensors_lie_apart_and_far() -> None:
    tensors = drawn(packed(), Workload(2, 4, 2, 5, 9, tokens_q=10, tokens_kv=18))
    for laid in (tensors.apart(), tensors.far()):
        steps = [step for name in ("q", "k", "v", "out") for step in laid[name].stride()[:2]]
        assert len(set(steps)) == len(steps)
        assert all(torch.equal(laid[name], tensors[name]) for name in ("q", "k", "v", "cu_seqlens_q"))
    assert min(steps) > 2**31
