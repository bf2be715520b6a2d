"""Calls with document ids, of int32 and of int64, in the emulator: what they mean, in PyTorch's ways of asking, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.errors import ArgumentError
from tests.emulator.test_modifier_calls import close, exact, gradient_of, stacked
from tests.support.plan import few_of

DTYPES = (torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def ids(dtype: torch.dtype, *ends: int, length: int = 40) -> torch.Tensor:
    """Documents that end there. Those of int64 differ in their upper 32 bits alone."""
    return ((torch.arange(length)[:, None] >= torch.tensor(ends)).sum(-1) * (2**32 if dtype is torch.int64 else 1)).to(dtype)


def same(of_queries: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
    """The mask that they stand for: [batch, 1, len_q, len_kv]."""
    return of_queries[..., None, :, None] == of_keys[..., None, None, :]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"causal": True, "window": (9, 3)}, marks=pytest.mark.slow), pytest.param({"softcap": 2.0}, marks=pytest.mark.slow)],
    ids=["alone", "window", "softcap"],
)
def test_results_and_gradients_are_those_of_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    of_keys = torch.stack((ids(dtype, 11, 12, 30), ids(dtype, 20)))
    pair = of_keys[:, 7:], of_keys  # views
    leaves = [t.requires_grad_() for t in (stacked(2, 33, 4, 16), stacked(2, 40, 2, 16, seed=1), stacked(2, 40, 2, 16, seed=2))]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    out = flashgen.attention(leaves[0], leaves[1], leaves[2], document_ids=pair, **options)
    wanted = exact(doubles[0], doubles[1], doubles[2], mask=same(*pair), **options)
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, leaves, into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True] * 3


@pytest.mark.parametrize("dtype", few_of(DTYPES, torch.int32), ids=str)
def test_ids_may_be_alike_in_the_batch_and_need_not_be_in_order(dtype: torch.dtype) -> None:
    q, one = stacked(2, 40, 2, 16), ids(dtype, 5, 21).flip(0)
    wanted = flashgen.attention(q, q, q, mask=same(one, one)[None])
    every_other = torch.stack((one, one))[:, :, None].expand(2, 40, 2).flatten(1)[:, ::2]
    for given in (one, one[None], one.expand(2, -1), (one, one[None])):
        assert close(flashgen.attention(q, q, q, document_ids=given), wanted)
    with pytest.raises(ArgumentError, match=r"document_ids_q must be contiguous in its last dimension \(stride 1\); got stride 2"):
        flashgen.attention(q, q, q, document_ids=every_other)
    nothing = stacked(2, 0, 2, 16)
    assert not flashgen.attention(q, nothing, nothing, document_ids=(one, one[:0])).any()


def test_ids_of_int64_are_those_of_int32_to_the_bit() -> None:
    q, of_int32 = stacked(2, 40, 4, 16), torch.stack((ids(torch.int32, 11, 30), ids(torch.int32, 20)))
    wide = of_int32.long() - 2**40
    assert torch.equal(flashgen.attention(q, q, q, document_ids=wide), flashgen.attention(q, q, q, document_ids=of_int32))
    assert torch.equal(gradient_of(q, document_ids=wide), gradient_of(q, document_ids=of_int32))
    counted = (torch.arange(40) % 13 == 0).cumsum(0)  # as users make them
    assert counted.dtype == torch.int64
    assert torch.equal(flashgen.attention(q, q, q, document_ids=counted), flashgen.attention(q, q, q, document_ids=counted.int()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorchs_ways_to_ask_for_it(dtype: torch.dtype) -> None:
    q, own = stacked(2, 40, 4, 16), torch.stack((ids(dtype, 11, 30), ids(dtype, 20)))

    def call(q: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, causal=True, document_ids=own)

    plain, gradient = call(q, own), gradient_of(q, causal=True, document_ids=own)
    compiled, leaf = torch.compile(call, fullgraph=True, backend="aot_eager"), q.clone().requires_grad_()
    found = compiled(leaf, own)
    found.float().sum().backward()
    assert torch.equal(found, plain)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)
    assert torch.equal(torch.func.grad(lambda q: call(q, own).float().sum())(q), gradient)
    assert torch.equal(torch.vmap(lambda q: call(q, own))(q[None])[0], plain)
    with pytest.raises(ArgumentError, match=r"^tensors of modifiers must not be mapped by torch\.vmap"):
        torch.vmap(call)(q[:, None], own[:, None])
    ordered = torch.are_deterministic_algorithms_enabled()
    assert not ordered
    assert close(gradient_of(q, causal=True, document_ids=own, deterministic=True), gradient)
    own.zero_()
    assert torch.equal(call(q, own), call(q, torch.zeros_like(own))), "ids are read in each call"


@pytest.mark.slow
def test_dropout_finds_its_seed_beside_ids_of_int64() -> None:
    q, own = stacked(1, 40, 2, 16), ids(torch.int64, 20)
    torch.manual_seed(0)
    out, kept = flashgen.attention(q, q, q, document_ids=own, dropout_p=0.5, return_dropout_mask=True)
    torch.manual_seed(0)
    assert torch.equal(flashgen.attention(q, q, q, mask=same(own, own), dropout_p=0.5, return_dropout_mask=True)[1], kept)
    assert 0.4 < float(kept.float().mean()) < 0.6
    assert out.shape == q.shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ids(torch.int32, 5).float(), r"document_ids must be int32 or int64, those of queries and keys alike; got torch\.float32"),
        (ids(torch.int32, 5).short(), r"document_ids must be int32 or int64, .*; got torch\.int16"),
        ((ids(torch.int32, 5), ids(torch.int64, 5)), r"document_ids must be int32 or int64, .*; got torch\.int32 and torch\.int64"),
        ((ids(torch.int64, 5), ids(torch.int32, 5)), r"document_ids must be int32 or int64, .*; got torch\.int64 and torch\.int32"),
        (ids(torch.int64, 5, length=39), r"document_ids_q must have the shape \(batch, len_q\) = \(1, 40\), or one that .*; got \(39,\)"),
        (torch.tensor(5), r"document_ids_q must have the shape .*; got \(\)"),
        (ids(torch.int64, 5).to("meta"), "document_ids_q must be on q's device cpu; got meta"),
        ([1, 2], "document_ids must be a tensor or a pair of tensors, of queries and of keys; got"),
        ((ids(torch.int64, 5), 3), r"document_ids\[1\] must be of type Tensor; got 3"),
    ],
)
def test_what_are_no_ids_is_refused(given: Any, message: str) -> None:
    q = stacked(1, 40, 2, 16)
    with pytest.raises(ArgumentError, match=message):
        flashgen.attention(q, q, q, document_ids=given)
    with pytest.raises(ArgumentError, match="document_ids must be a pair of tensors, of queries and of keys, where len_q is not len_kv"):
        flashgen.attention(q, q[:, 1:], q[:, 1:], document_ids=ids(torch.int64, 5))
