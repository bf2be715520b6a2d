"""The oracle of the backward pass, by what autograd in float64 says, and what it tells of samples and of rows that see no key."""

from __future__ import annotations

import pytest
import torch

from flashgen.cells import cells_of
from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operations import operation_names, operations_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics import backward
from flashgen.numerics.backward import ORACLE
from flashgen.numerics.rule import judge
from flashgen.verification.expected import Expected

SIZES = (Workload(2, 6, 3, 50, 37), Workload(1, 4, 4, 20, 60), Workload(3, 2, 1, 1, 1))


def drawn(mask: Mask, workload: Workload, dtype: Dtype = Dtype.BF16) -> Tensors:
    return Tensors.random(Problem(dtype, 64, 32, mask, "backward"), workload, torch.Generator().manual_seed(0))


def by_autograd(tensors: Tensors, scale: float) -> dict[str, torch.Tensor]:
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * scale
    if tensors.problem.mask is Mask.CAUSAL:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    sees = lse > -torch.inf
    out = torch.einsum("bhij,bjhd->bihd", torch.exp(scores - lse.masked_fill(~sees, 0.0)[..., None]), v.repeat_interleave(group, 2))
    d_lse = tensors["d_lse"].double() if "d_lse" in tensors else torch.zeros_like(lse)
    torch.autograd.backward([out, lse[sees]], [tensors["d_out"].double(), d_lse[sees]])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {"d_q": q.grad.nan_to_num(), "d_k": k.grad.nan_to_num(), "d_v": v.grad.nan_to_num()}


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("workload", SIZES, ids=lambda workload: workload.name)
@pytest.mark.parametrize("with_d_lse", [False, True])
def test_exact_gradients_are_those_of_autograd(mask: Mask, workload: Workload, with_d_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_SCORES_AT_ONCE", 500)  # in several parts
    tensors = drawn(mask, workload)
    tensors = tensors if with_d_lse else tensors.without_optional_inputs()
    found, wanted = Expected.of(tensors, {"scale": 0.2}).exact, by_autograd(tensors, 0.2)
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_plain_gradients_are_rounded_and_near(dtype: Dtype) -> None:
    tensors = drawn(Mask.CAUSAL, SIZES[0], dtype)
    expected = Expected.of(tensors)
    assert {gradient.dtype for gradient in expected.plain.values()} == {tensors["q"].dtype}
    assert judge(expected.plain, expected.exact, expected.plain).ok
    for name, gradient in expected.plain.items():
        off = (gradient.double() - expected.exact[name]).abs().max()
        assert 0 < float(off) <= 0.02 * float(expected.exact[name].abs().max())


@pytest.mark.parametrize("mask", Mask)
def test_a_sample_is_a_part_of_the_whole(mask: Mask) -> None:
    tensors = drawn(mask, SIZES[0])
    sample = ORACLE.sample(tensors.problem, tensors.workload, 20, seed=3)
    whole, part = Expected.of(tensors), Expected.of(tensors, sample=sample)
    for exact_or_plain in ("exact", "plain"):
        wanted = ORACLE.sampled(getattr(whole, exact_or_plain), sample)
        for name, gradient in getattr(part, exact_or_plain).items():
            assert len(gradient)
            assert torch.equal(gradient, wanted[name])
    assert {(b, h) for b, h, _ in sample.tolist()} == {(0, 0), (1, 5)}, "few heads: each needs the whole of its own"


def test_rows_past_the_shorter_length_are_those_of_the_longer() -> None:
    tensors = drawn(Mask.FULL, SIZES[1])
    sample = torch.tensor([[0, 0, 3], [0, 2, 19], [0, 3, 59]])
    found = ORACLE.sampled({name: tensors[name] for name in ("d_q", "d_k", "d_v")}, sample)
    assert [len(found[name]) for name in ("d_q", "d_k", "d_v")] == [2, 3, 3]


def test_touched_rows_are_those_of_queries_and_of_keys() -> None:
    tensors = drawn(Mask.FULL, SIZES[0])
    touched = {name: torch.zeros_like(tensors[name], dtype=torch.bool) for name in ("d_q", "d_k", "d_v")}
    touched["d_q"][1, 7, 4, 3] = touched["d_v"][0, 5, 2, 0] = True
    assert ORACLE.rows_of(touched).tolist() == [[0, 4, 5], [1, 4, 7]]


def test_queries_that_see_no_key_must_have_0() -> None:
    tensors = drawn(Mask.CAUSAL, SIZES[0])  # 50 queries, 37 keys: the first 13 see none
    expected = Expected.of(tensors)
    for name, gradient in expected.plain.items():
        tensors[name].copy_(gradient)
    assert expected.judge(tensors).ok
    tensors["d_q"][1, 12, 5, 0] = 1e-20
    assert "d_q is not 0 in 1 rows" in expected.judge(tensors).message
    sampled = Expected.of(tensors, sample=torch.tensor([[1, 5, 12], [1, 5, 13], [1, 5, 36]]))
    assert "d_q is not 0 in 1 rows" in sampled.judge(tensors).message


def test_derived_inputs_follow_the_scale() -> None:
    tensors = drawn(Mask.FULL, SIZES[0])
    before = tensors["lse"].clone()
    tensors.derive({"scale": 1.0})
    assert not torch.equal(tensors["lse"], before)
    tensors.derive()
    assert torch.equal(tensors["lse"], before)


def test_passes_by_name() -> None:
    assert [operations_of(name) for name in ("forward", "backward", "both")] == [("forward",), ("backward",), ("forward", "backward")]
    with pytest.raises(ArgumentError, match=rf"^pass must be one of {', '.join(operation_names())}, both; got 'sideways'$"):
        operations_of("sideways")
    found = cells_of(64, causal=True, seqlens=(512, 1024), passes="both")
    assert [cell.problem.operation for cell in found] == ["forward", "forward", "backward", "backward"]
    assert found[2].flops == 2.5 * found[0].flops
