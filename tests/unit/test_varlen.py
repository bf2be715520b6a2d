"""Calls of packed sequences on machines without a GPU: what is refused, what tracing sees, and nested tensors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flashgen
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch import packed_arguments
from flashgen.launch.packed_arguments import PackedTokens
from flashgen.launch.tensors import Tensors
from tests.support.plain_kernels import plain_in_place_of_kernels
from tests.unit.test_odd_arguments import ODD, TENSORS

ENDS_Q, ENDS_KV = (0, 5, 5, 20), (0, 9, 10, 30)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors(tokens_q: int = 20, tokens_kv: int = 30) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (tokens_q, 4, 16), "k": (tokens_kv, 2, 16), "v": (tokens_kv, 2, 24)}
    made: dict[str, Any] = {
        name: torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16) for name, shape in shapes.items()
    }
    return {**made, "cu_seqlens_q": ends(*ENDS_Q[:-1], tokens_q), "cu_seqlens_kv": ends(*ENDS_KV[:-1], tokens_kv)}


def jagged(heads: int, width: int, *lengths: int) -> torch.Tensor:
    parts = [torch.randn(length, heads, width).to(torch.bfloat16) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    return plain_in_place_of_kernels(monkeypatch)


REFUSED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda a: a.update(q=None), r"^q must be of type Tensor; got None"),
    (lambda a: a.update(v=[a["v"]]), r"^v must be of type Tensor; got "),
    (lambda a: a.pop("cu_seqlens_q"), r"^cu_seqlens_q must be of type Tensor; got None"),
    (lambda a: a.update(cu_seqlens_kv=[0, 30]), r"^cu_seqlens_kv must be of type Tensor; got \[0, 30\]"),
    (lambda a: a.update(seqused_q=[1]), r"^seqused_q must be of type Tensor or None; got \[1\]"),
    (lambda a: a.update(max_seqlen_q=5.0), r"^max_seqlen_q must be of type int or None; got 5\.0"),
    (lambda a: a.update(max_seqlen_kv=True), r"^max_seqlen_kv must be of type int or None; got True"),
    (lambda a: a.update(max_seqlen_kv=ends(3)[0]), r"^max_seqlen_kv must be of type int or None; got a value of type torch\.Tensor"),
    (lambda a: a.update(max_seqlen_q=-1), r"^max_seqlen_q must be an integer from 0 to 2147483647; got -1"),
    (lambda a: a.update(max_seqlen_kv=2**31), r"^max_seqlen_kv must be an integer from 0 to 2147483647; got 2147483648"),
    (lambda a: a.update(causal="top_left"), r"^causal must be True or False for packed sequences, .*; got 'top_left'"),
    (lambda a: a.update(causal="top_left", softcap=3.0), r"^causal must be True or False for packed sequences, .*; got 'top_left'"),
    (lambda a: a.update(causal=1), r"^causal must be of type bool; got 1"),
    (lambda a: a.update(scale="0.5"), r"^scale must be of type float or None; got '0\.5'"),
    (lambda a: a.update(scale=-1.0), r"^scale must be from .*; got -1\.0"),
    (lambda a: a.update(return_lse=1), r"^return_lse must be of type bool; got 1"),
    (lambda a: a.update(softcap=-1.0), r"^softcap must be .*; got -1\.0"),
    (lambda a: a.update(window=(1, 2, 3)), r"^window must be .*; got "),
    (lambda a: a.update(q=a["q"][None]), r"^q must have 3 dimensions \(tokens, heads, head_dim\); got 4"),
    (
        lambda a: a.update(v=a["v"][None]),
        r"^v must have 3 dimensions .*; got 4; with a batch of 1 in front, all of ",
    ),
    (
        lambda a: a.update(q=a["q"][None], k=a["k"].view(2, 15, 2, 16), v=a["v"][None]),
        r"^q must have 3 dimensions \(tokens, heads, head_dim\); got 4",
    ),
    (lambda a: a.update(k=a["k"][:, 0]), r"^k must have 3 dimensions \(tokens, heads, head_dim\); got 2"),
    (lambda a: a.update(q=a["q"].float()), r"^q must be torch\.bfloat16 or torch\.float16; got torch\.float32"),
    (lambda a: a.update(v=a["v"].half()), r"^v must have q's dtype torch\.bfloat16; got torch\.float16"),
    (lambda a: a.update(k=a["k"].to("meta")), r"^k must be on q's device cpu; got meta"),
    (lambda a: a.update(k=a["k"][..., :8]), r"^k must have q's head_dim 16; got 8"),
    (lambda a: a.update(v=a["v"][:29]), r"^v must have k's tokens 30; got 29"),
    (lambda a: a.update(v=a["v"][:, :1]), r"^v must have k's number of heads 2; got 1"),
    (lambda a: a.update(q=a["q"][:, :3]), r"^q must have a number of heads that is a multiple of k's 2; got 3"),
    (lambda a: a.update(q=a["q"].mT.contiguous().mT), r"^q must be contiguous in its last dimension \(stride 1\); got stride 4"),
    (
        lambda a: a.update(k=torch.empty(30, 2, 20).to(a["k"])[..., :16]),
        r"^k must have rows aligned to 16 bytes .*; got stride 20 in dim.* 1",
    ),
    (lambda a: a.update(k=a["k"].to_sparse()), r"^k must be dense \(torch\.strided\); got torch\.sparse_coo"),
    (lambda a: a.update(cu_seqlens_q=ends(*ENDS_Q)[None]), r"^cu_seqlens_q must have 1 dimension; got 2"),
    (lambda a: a.update(cu_seqlens_kv=ends(*ENDS_KV).long()), r"^cu_seqlens_kv must be torch\.int32; got torch\.int64"),
    (lambda a: a.update(cu_seqlens_q=ends(*ENDS_Q).to("meta")), r"^cu_seqlens_q must be on q's device cpu; got meta"),
    (lambda a: a.update(cu_seqlens_q=ends(*range(8))[::2]), r"^cu_seqlens_q must be contiguous; got stride 2"),
    (lambda a: a.update(cu_seqlens_q=ends()), r"^cu_seqlens_q must have an entry more than there are sequences; got none"),
    (lambda a: a.update(cu_seqlens_kv=ends(0, 30)), r"^cu_seqlens_kv must have as many entries as cu_seqlens_q, 4; got 2"),
    (lambda a: a.update(seqused_q=ends(1, 2)), r"^seqused_q must have an entry for each of 3 sequences; got 2"),
    (lambda a: a.update(seqused_kv=ends(1, 2, 3).float()), r"^seqused_kv must be torch\.int32; got torch\.float32"),
    (lambda a: a.update(alibi_slopes=torch.ones(2, 4)), r"^alibi_slopes must have the shape .*; got \(2, 4\)"),
    (lambda a: a.update(score_mod=True), r"^score_mod must be a function of \(score, batch, head, query, key\); got True"),
    (lambda a: a.update(mask=torch.ones(3, 4, 9, 8)), r"^mask must be torch\.bool; got torch\.float32"),
    (lambda a: a.update(mask=torch.ones(2, 1, 9, 8) > 0), r"^mask must have the shape \(batch, heads_q, len_q, len_kv\) = \(3, 4, 9, 8\)"),
    (lambda a: a.update(mask=torch.ones(3, 1, 0, 8) > 0), r"^mask must have elements of at least one query; got the shape \(3, 1, 0, 8\)"),
    (lambda a: a.update(mask=[True]), r"^mask must be of type Tensor; got \[True\]"),
    (lambda a: a.update(bias=torch.ones(3, 4, 9, 8).to_sparse()), r"^bias must be dense \(torch\.strided\); got torch\.sparse_coo"),
    (lambda a: a.update(bias=torch.ones(3, 4, 9, 8).double()), r"^bias must be torch\.(bfloat16|float16); got torch\.float64"),
    (
        lambda a: a.update(bias=torch.ones(3, 1, 9, 8), mask=torch.ones(8, 8) > 0),
        r"^mask must have bias's elements of each query, 9, or one; got 8",
    ),
    (lambda a: a.update(return_dropout_mask=True), r"^max_seqlen_q must be given with return_dropout_mask=True"),
    (lambda a: a.update(return_dropout_mask=1, max_seqlen_q=8, max_seqlen_kv=8), r"^return_dropout_mask must be of type bool; got 1"),
    (lambda a: a.update(mask_mod=True), r"^mask_mod must be a function of \(batch, head, query, key\); got True"),
    (lambda a: a.update(sinks=torch.ones(3)), r"^sinks must have the shape .*; got \(3,\)"),
    (lambda a: a.update(k=jagged(2, 16, 3)), r"^k must be one dense tensor; got a nested one"),
    (lambda a: None, r"^q must be on a CUDA device; got cpu\. FLASHGEN_CPU=1 "),
    *(
        (lambda a, name=name: a.update({name: True}), rf"^{name} must be left out of flashgen\.attention_varlen: ")
        for name in ("layout", "document_ids", "key_padding_mask", "block_mask")
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("gradients", [False, True])
def test_bad_arguments_are_named(change: Callable[[dict[str, Any]], Any], message: str, gradients: bool) -> None:
    given = tensors()
    change(given)
    with pytest.raises(ArgumentError, match=message), torch.set_grad_enabled(gradients):
        flashgen.attention_varlen(given.pop("q"), given.pop("k"), given.pop("v"), **given)


REAL = ("sparse", "nested", "FLASHGEN_CPU", r"torch\.Tensor")  # what fake tensors have in another way


@pytest.mark.parametrize(("change", "message"), [case for case in REFUSED if not any(word in case[1] for word in REAL)])
def test_fake_tensors_are_checked_too(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with FakeTensorMode():
        given = tensors()
        change(given)
        with pytest.raises(ArgumentError, match=message):
            flashgen.attention_varlen(**given)


def test_what_is_no_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'cu_seqlens'"):
        flashgen.attention_varlen(**tensors(), cu_seqlens=None)
    meta = {name: tensor.to("meta") for name, tensor in tensors().items()}
    assert flashgen.attention_varlen(**meta, bias=None, score_mod=None).shape == (20, 4, 24), "as left out"


@pytest.mark.parametrize("return_lse", [False, True])
def test_fake_and_meta_tensors_get_the_shapes(return_lse: bool) -> None:
    with FakeTensorMode():
        found = flashgen.attention_varlen(**tensors(), return_lse=return_lse, causal=True, window=(4, None), softcap=2.0)
    out, *lse = found if return_lse else (found,)
    assert out.shape == (20, 4, 24)
    assert out.is_contiguous()
    assert out.dtype == torch.bfloat16
    assert [(one.shape, one.dtype) for one in lse] == [((4, 20), torch.float32)] * return_lse
    assert isinstance(found, tuple) is return_lse


@pytest.mark.usefixtures("on_cpu")
def test_each_sequence_is_a_call_of_its_own() -> None:
    given = {**tensors(), "seqused_kv": ends(7, 0, 20), "causal": True, "scale": 0.3, "max_seqlen_q": 4}
    slopes = torch.rand(3, 4)
    out, lse = flashgen.attention_varlen(**given, return_lse=True, alibi_slopes=slopes)
    assert flashgen.attention_varlen(**given, alibi_slopes=slopes).equal(out)
    assert lse.shape == (4, 20)
    q, k, v = (given[name] for name in "qkv")
    for b, (begin, end, first, used) in enumerate(((0, 5, 0, 7), (5, 5, 9, 0), (5, 20, 10, 20))):
        own = q[None, begin:end], k[None, first : first + used], v[None, first : first + used]
        one = flashgen.attention(*own, causal=True, scale=0.3, return_lse=True, alibi_slopes=slopes[b : b + 1]) if end > begin else None
        if one is not None:
            torch.testing.assert_close(out[begin:end], one[0][0])
            torch.testing.assert_close(lse[:, begin:end], one[1][0])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("compiled", [False, True])
def test_there_may_be_a_batch_of_one(compiled: bool) -> None:
    given: dict[str, Any] = {**tensors(), "causal": True, "max_seqlen_q": 15, "max_seqlen_kv": 20, "return_lse": True}
    within = {**given, **{name: given[name][None].requires_grad_() for name in "qkv"}}
    for name in "qkv":
        given[name].requires_grad_()
    call = torch.compile(flashgen.attention_varlen, fullgraph=True, backend="eager") if compiled else flashgen.attention_varlen
    out, lse = flashgen.attention_varlen(**given)
    found = call(**within)
    assert [one.shape for one in found] == [(1, 20, 4, 24), (1, 4, 20)]
    assert found[0].equal(out[None])
    assert found[1].equal(lse[None])
    wanted = torch.autograd.grad(out.float().sum(), [given[name] for name in "qkv"])
    for one, other in zip(torch.autograd.grad(found[0].float().sum(), [within[name] for name in "qkv"]), wanted, strict=True):
        assert one.equal(other[None])
    alone, mask = flashgen.attention_varlen(**{**within, "return_lse": False}, dropout_p=0.5, return_dropout_mask=True)
    assert alone.shape == (1, 20, 4, 24)
    assert mask.shape == (3, 4, 15, 20)


@pytest.mark.parametrize("operator", ["attention_varlen_output", "attention_varlen_forward"])
def test_operators_take_no_batch(operator: str) -> None:
    q, k, v, *where = (tensor[None] if name in "qkv" else tensor for name, tensor in tensors().items())
    with pytest.raises(ArgumentError, match=r"^q must have 3 dimensions"):
        getattr(torch.ops.flashgen, operator)(q, k, v, *where[:2], None, None, None, None, False, None)


def test_operands_have_their_names(on_cpu: list[Tensors]) -> None:
    given = {**tensors(), "seqused_q": ends(1, 0, 2), "max_seqlen_q": 7, "max_seqlen_kv": 100}
    flashgen.attention_varlen(**given, chunk=3, window=(4, 2))
    (found,) = on_cpu
    assert all(found[name].equal(given[name]) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q"))
    assert "seqused_kv" not in found
    w = found.workload
    assert (w.batch, w.heads_q, w.heads_kv, w.len_q, w.len_kv, w.tokens_q, w.tokens_kv) == (3, 4, 2, 7, 30, 20, 30)
    assert (w.chunk, w.window_left, w.window_right) == (3, 4, 2)
    assert found.problem.is_packed
    flashgen.attention_varlen(**tensors())
    assert (on_cpu[1].workload.len_q, on_cpu[1].workload.len_kv) == (20, 30), "all tokens"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("tokens_q", "tokens_kv", "batch"), [(0, 0, 0), (0, 3, 1), (3, 0, 2), (3, 3, 0), (1, 1, 1)])
def test_there_may_be_no_tokens_and_no_sequences(tokens_q: int, tokens_kv: int, batch: int) -> None:
    given = tensors(tokens_q, tokens_kv)
    given |= {"cu_seqlens_q": ends(*[0] * batch, tokens_q * bool(batch)), "cu_seqlens_kv": ends(*[0] * batch, tokens_kv * bool(batch))}
    out, lse = flashgen.attention_varlen(**given, return_lse=True)
    assert out.shape == (tokens_q, 4, 24)
    assert lse.shape == (4, tokens_q)
    if not (batch and tokens_kv):
        assert not out.any()
        assert (lse == -torch.inf).all()
    else:
        assert lse.isfinite().all()


def leaves_of(given: dict[str, Any]) -> list[torch.Tensor]:
    return [given[name].detach().clone().requires_grad_() for name in "qkv"]


def gradients(
    leaves: list[torch.Tensor], call: Callable[..., Any], into: torch.Tensor, into_lse: torch.Tensor | None
) -> list[torch.Tensor]:
    out, lse = call(*leaves)
    outputs, grads = (out, into), (lse, into_lse)
    used = [outputs] if into_lse is None else [outputs, grads]
    return [*torch.autograd.grad([one for one, _ in used], leaves, [one for _, one in used])]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_each_sequence(with_lse: bool, compiled: bool, on_cpu: list[Tensors]) -> None:
    torch.compiler.reset()
    given = {**tensors(), "seqused_kv": ends(7, 0, 20)}
    q, k, v = (given.pop(name) for name in "qkv")
    slopes, leaves = torch.rand(3, 4), leaves_of({"q": q, "k": k, "v": v})

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flashgen.attention_varlen(
            q, k, v, **given, causal=True, scale=0.3, alibi_slopes=slopes, return_lse=True, max_seqlen_q=4, deterministic=False
        )

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    into, into_lse = torch.randn(20, 4, 24).to(torch.bfloat16), torch.randn(4, 20) if with_lse else None
    found = gradients(leaves, run, into, into_lse)
    (backward,) = (tensors for tensors in on_cpu if tensors.problem.operation == "backward")
    assert ("d_lse" in backward) is (with_lse or compiled), "a compiled graph gives zeros"
    assert "seqused_q" not in backward
    assert (backward.workload.len_q, backward.workload.len_kv) == (4, 30)
    for b, (begin, end, first, used) in enumerate(((0, 5, 0, 7), (5, 20, 10, 20))):
        number = 2 * b
        own = leaves_of({"q": q[None, begin:end], "k": k[None, first : first + used], "v": v[None, first : first + used]})
        options: dict[str, Any] = {"causal": True, "scale": 0.3, "return_lse": True, "alibi_slopes": slopes[number : number + 1]}
        alone = partial(flashgen.attention, **options)
        wanted = gradients(own, alone, into[None, begin:end], None if into_lse is None else into_lse[None, :, begin:end])
        for gradient, tokens, right in zip(found, (slice(begin, end), *2 * [slice(first, first + used)]), wanted, strict=True):
            torch.testing.assert_close(gradient[tokens], right[0], atol=2e-2, rtol=2e-2)
    assert not found[1][7:10].any()
    assert not found[2][7:10].any()


@pytest.mark.usefixtures("on_cpu")
def test_lse_alone_may_have_a_gradient() -> None:
    given = tensors()
    leaves = leaves_of(given)
    more = {name: tensor for name, tensor in given.items() if name not in "qkv"}
    _, lse = flashgen.attention_varlen(leaves[0], leaves[1], leaves[2], **more, return_lse=True)
    d_q, d_k, d_v = torch.autograd.grad(lse.sum(), leaves, allow_unused=True)
    assert d_q.any()
    assert d_k.any()
    assert d_v is None or not d_v.any()


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_gradients_are_deterministic_where_somebody_says_so(deterministic: bool | None, on_cpu: list[Tensors]) -> None:
    given = tensors()
    for pytorch in (False, True):
        torch.use_deterministic_algorithms(pytorch)
        try:
            flashgen.attention_varlen(**{**given, "q": leaves_of(given)[0]}, deterministic=deterministic).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert on_cpu[-1].problem.deterministic is (pytorch if deterministic is None else deterministic)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("tokens_q", "tokens_kv", "batch"), [(0, 0, 0), (0, 3, 1), (3, 0, 2), (3, 3, 0)])
def test_gradients_of_nothing_are_0(tokens_q: int, tokens_kv: int, batch: int) -> None:
    given = tensors(tokens_q, tokens_kv)
    given |= {"cu_seqlens_q": ends(*[0] * batch, tokens_q * bool(batch)), "cu_seqlens_kv": ends(*[0] * batch, tokens_kv * bool(batch))}
    leaves = leaves_of(given)
    out = flashgen.attention_varlen(**{**given, **dict(zip("qkv", leaves, strict=True))})
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.usefixtures("on_cpu")
def test_derivatives_that_are_not_there_are_refused() -> None:
    given = tensors()
    leaf = given["q"].clone().requires_grad_()
    call = partial(flashgen.attention_varlen, **{name: tensor for name, tensor in given.items() if name != "q"})
    with pytest.raises(FlashgenError, match=r"^alibi_slopes must not require grad, as it has no gradient here"):
        call(leaf, alibi_slopes=torch.zeros(4, requires_grad=True))
    (gradient,) = torch.autograd.grad(call(leaf).float().sum(), leaf, create_graph=True)
    with pytest.raises(FlashgenError, match=r"^flashgen\.attention_varlen has no second derivative"):
        gradient.sum().backward()
    message = r"^flashgen\.attention_varlen has no forward-mode derivative, and no rules for the transforms of torch\.func"
    with pytest.raises(FlashgenError, match=message):
        torch.func.grad(lambda q: call(q).float().sum())(given["q"])
    with pytest.raises(FlashgenError, match=message):
        torch.vmap(call)(given["q"][None])
    with forward_ad.dual_level(), pytest.raises(FlashgenError, match=message):
        call(forward_ad.make_dual(given["q"], given["q"]))
    with pytest.raises(ArgumentError, match=r"^deterministic must be of type bool or None; got 1"):
        call(given["q"], deterministic=1)


@pytest.mark.usefixtures("on_cpu")
def test_a_compiled_call_takes_other_tokens_and_lengths() -> None:
    torch.compiler.reset()
    graphs = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    call = torch.compile(flashgen.attention_varlen, fullgraph=True, backend=count)
    for tokens_q, tokens_kv, longest in ((20, 30, 15), (21, 31, 16), (50, 60, 45), (101, 100, 96)):
        given = {**tensors(tokens_q, tokens_kv), "causal": True, "window": (7, None), "softcap": 2.0}
        given |= {"max_seqlen_q": longest, "max_seqlen_kv": longest + 5}
        assert call(**given).equal(flashgen.attention_varlen(**given))
    assert len(graphs) <= 2, "one for the first call, and one for all sizes"
    called = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function" and "varlen" in str(node.target)]
    assert called == ["flashgen.attention_varlen_output.default"]
    torch.compiler.reset()
    del graphs[:]
    call = torch.compile(flashgen.attention_varlen, fullgraph=True, backend=count, dynamic=True)
    for tokens_q in (20, 50, 77):
        given = {**tensors(tokens_q, 64), "seqused_q": ends(5, 0, 2), "alibi_slopes": torch.ones(4), "return_lse": True}
        for found, wanted in zip(call(**given), flashgen.attention_varlen(**given), strict=True):
            assert found.equal(wanted)
    assert len(graphs) == 1


@pytest.mark.parametrize("index", [0, 10, 24, 35])
def test_torch_compile_lets_refusals_through_as_they_are(index: int) -> None:
    change, message = REFUSED[index]
    given = tensors()
    change(given)
    torch.compiler.reset()
    with pytest.raises(ArgumentError, match=message):
        torch.compile(flashgen.attention_varlen, backend="aot_eager")(**given)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("operator", ["attention_varlen_output", "attention_varlen_forward"])
def test_operators_pass_pytorchs_check(operator: str) -> None:
    given = [*tensors().values(), None, ends(7, 0, 20), 4, None]
    call = getattr(torch.ops.flashgen, operator).default
    torch.library.opcheck(call, (*given, True, 0.3, "alibi,window", [3, 1], [], [torch.ones(4)]))
    torch.library.opcheck(call, (*given, False, None))


@pytest.mark.usefixtures("on_cpu")
def test_operators_of_gradients_pass_pytorchs_check() -> None:
    given = tensors()
    of_tokens = [given["cu_seqlens_q"], given["cu_seqlens_kv"], None, ends(7, 0, 20), 4, None]
    torch.library.opcheck(torch.ops.flashgen.attention_varlen.default, (*leaves_of(given), *of_tokens, True, 0.3, False))
    q, k, v = (given[name] for name in "qkv")
    out, lse = torch.ops.flashgen.attention_varlen_forward(q, k, v, *of_tokens, True, 0.3)
    saved = q, k, v, out, lse, torch.randn(20, 4, 24).to(torch.bfloat16), torch.randn(4, 20)
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_backward.default, (*saved, *of_tokens, True, 0.3, False))


@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_counter_takes_sequences_for_equally_long(causal: bool) -> None:
    given = {name: tensor.to("meta") for name, tensor in tensors(21, 30).items()}
    expected = 2 * 3 * 4 * 7 * 10 * (16 + 24) // (2 if causal else 1)
    for return_lse in (False, True):
        with FlopCounterMode(display=False) as counter:
            flashgen.attention_varlen(**given, causal=causal, return_lse=return_lse)
        assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        flashgen.attention_varlen(**{**given, "q": given["q"].requires_grad_()}, causal=causal).sum().backward()
    assert counter.get_total_flops() == expected + 5 * expected // 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": ends(0, 6, 5, 20)}, r"^cu_seqlens_q must not fall; got 6 in entry 1 and 5 in entry 2"),
    ({"cu_seqlens_q": ends(-1, 5, 5, 20)}, r"^cu_seqlens_q must be from 0 to the number of tokens, 20; got -1 in entry 0"),
    ({"cu_seqlens_kv": ends(0, 5, 5, 31)}, r"^cu_seqlens_kv must be from 0 to the number of tokens, 30; got 31 in entry 3"),
    ({"seqused_q": ends(5, 0, 16)}, r"^seqused_q must be from 0 to the length 15 of sequence 2; got 16"),
    ({"seqused_kv": ends(5, -1, 16)}, r"^seqused_kv must be from 0 to the length 1 of sequence 1; got -1"),
]


@pytest.mark.parametrize(("change", "message", "compiled"), [*((*case, False) for case in WRONG), (*WRONG[0], True)])
def test_wrong_boundaries_are_told_where_somebody_asks(
    change: dict[str, Any], message: str, compiled: bool, on_cpu: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    call = torch.compile(flashgen.attention_varlen, fullgraph=True, backend="eager") if compiled else flashgen.attention_varlen
    given = {**tensors(), **change}
    call(**given)
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    with pytest.raises(ArgumentError, match=message):
        call(**given)
    assert len(on_cpu) == 1
    call(**{**tensors(), "cu_seqlens_q": ends(1, 5, 5, 19), "seqused_q": ends(4, 0, 3)})
    assert len(on_cpu) == 2


def like(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, tensor.offsets())
    return found


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("compiled", [False, True])
def test_nested_tensors_are_taken_as_they_are(compiled: bool) -> None:
    torch.compiler.reset()
    q: Any = jagged(4, 16, 3, 0, 5)
    k: Any = jagged(2, 16, 16, 4, 1)
    v = like(k, torch.randn(21, 2, 24).to(torch.bfloat16))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flashgen.attention_varlen(q, k, v, causal=True, return_lse=True)

    out, lse = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k, v)
    assert out.is_nested
    assert out.layout is torch.jagged
    assert out.shape[:1] + out.shape[2:] == (3, 4, 24)
    assert lse.shape == (4, 8)
    offsets = [tensor.offsets().int() for tensor in (q, k)]
    wanted = flashgen.attention_varlen(
        q.values(), k.values(), v.values(), cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1], causal=True, return_lse=True
    )
    assert out.values().equal(wanted[0])
    assert lse.equal(wanted[1])
    if not compiled:
        assert (out[..., :16] + q).shape == q.shape, "its lengths are q's"


@pytest.mark.usefixtures("on_cpu")
def test_nested_tensors_have_gradients() -> None:
    q: Any = jagged(4, 16, 3, 0, 5).requires_grad_()
    out: Any = flashgen.attention_varlen(q, q, q, causal=True)
    out.values().float().sum().backward()
    assert q.grad.shape == q.shape
    assert q.grad.values().isfinite().all()
    assert q.grad.values().any()


def test_nested_tensors_tell_what_they_know(on_cpu: list[Tensors]) -> None:
    values = torch.randn(20, 4, 16).to(torch.bfloat16)
    q: Any = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 6, 13, 20]), lengths=torch.tensor([4, 0, 7]), max_seqlen=7)
    out: Any = flashgen.attention_varlen(q, q, q)
    (found,) = on_cpu
    assert found["seqused_q"].tolist() == found["seqused_kv"].tolist() == [4, 0, 7]
    assert found["cu_seqlens_q"] is found["cu_seqlens_kv"]
    assert found["cu_seqlens_q"].tolist() == [0, 6, 13, 20]
    assert (found.workload.len_q, found.workload.len_kv) == (7, 7)
    assert out.lengths().tolist() == [4, 0, 7]
    flashgen.attention_varlen(q, q, q, max_seqlen_q=5)
    assert (on_cpu[1].workload.len_q, on_cpu[1].workload.len_kv) == (5, 7)


def with_gaps(*offsets: tuple[int, ...]) -> list[Any]:
    """Nested tensors of two sequences of 2 tokens, which share their lengths, with gaps behind them."""
    lengths, values = torch.tensor([2, 2]), torch.randn(8, 4, 16).to(torch.bfloat16)
    return [torch.nested.nested_tensor_from_jagged(values, torch.tensor(ends), lengths=lengths) for ends in offsets]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(k=torch.empty(3, 4, 16)), r"^k must be a nested tensor of layout torch\.jagged, .*; got torch\.strided"),
        (lambda a: a.update(v=None), r"^v must be a nested tensor of layout torch\.jagged, .*; got NoneType"),
        (
            lambda a: a.update(q=torch.nested.nested_tensor([torch.empty(3, 4, 16)])),
            r"^q must be a nested tensor of .*; got a nested one of ",
        ),
        (lambda a: a.update(v=jagged(4, 16, 3, 0, 5)), r"^v must have k's lengths by the same offsets"),
        (lambda a: a.update(zip("kv", with_gaps((0, 4, 8), (0, 2, 8)), strict=True)), r"^v must have k's lengths by the same offsets"),
        (lambda a: a.update(q=a["q"].transpose(1, 2)), r"^q must have the dimensions \(batch, lengths, heads, head_dim\)"),
        (lambda a: a.update(q=jagged(1, 16, 3).sum(2)), r"^q must have the dimensions \(batch, lengths, heads, head_dim\).*; got 3"),
        (lambda a: a.update(cu_seqlens_q=ends(0)), r"^cu_seqlens_q must be left out for nested tensors"),
        (lambda a: a.update(seqused_kv=ends(0)), r"^seqused_kv must be left out for nested tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_what_is_wrong_with_nested_tensors_is_said(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    q = jagged(4, 16, 3, 0, 5)
    given: dict[str, Any] = {"q": q, "k": q, "v": q}
    change(given)
    with pytest.raises(FlashgenError, match=message):
        flashgen.attention_varlen(**given)


NAMES = (
    *("q", "k", "v", *PackedTokens._fields, "causal", "scale", "return_lse"),
    *("softcap", "window", "chunk", "dropout_p", "sinks", "score_mod"),
)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|deprecated)")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_odd_arguments_are_refused_by_name_or_right(part: int) -> None:
    """Hundreds: none of them ends in an error of Python's, or of PyTorch's."""
    cases: list[tuple[str, Any]] = [(name, value) for name in NAMES for value in ODD]
    cases += [(name, make()) for name in ("q", "k", "v", "cu_seqlens_q", "seqused_kv") for make in TENSORS]
    cases, refused = cases[part::3], 0
    for name, value in cases:
        given = {**tensors(), name: value}
        try:
            flashgen.attention_varlen(**given)
        except FlashgenError as error:
            refused += 1
            told = str(error)
        else:
            continue
        assert re.match(rf"({'|'.join(NAMES)}|head_dim|head_dim_v|flashgen\.attention_varlen|modifiers)\b", told), (name, type(value), told)
        assert len(told) < 600
    assert 0.6 * len(cases) < refused < len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["1", "0", ""])
def test_the_environment_says_whether_boundaries_are_looked_at(value: str) -> None:
    code = "import torch, flashgen; from flashgen.launch import packed_arguments; print(packed_arguments.values_are_checked)"
    environment = {**os.environ, "FLASHGEN_CHECK_SEQUENCES": value, "PYTHONPATH": str(Path(flashgen.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{value == '1'}\n"
