"""Calls on KV caches on machines without a GPU: what is refused, what tracing sees, and what operators are given."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flashgen
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch import packed_arguments
from flashgen.launch.tensors import Tensors
from tests.support.plain_kernels import plain_in_place_of_kernels
from tests.unit.test_odd_arguments import ODD, TENSORS

LENGTHS = (17, 0, 24)
KEYS = 24  # that a sequence may have


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors(len_q: int = 2, batch: int = 3, keys: int = KEYS) -> dict[str, Any]:
    """With a dense cache."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (batch, len_q, 4, 16), "k_cache": (batch, keys, 2, 16), "v_cache": (batch, keys, 2, 24)}
    made: dict[str, Any] = {
        name: torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16) for name, shape in shapes.items()
    }
    return {**made, "cache_seqlens": ints(*LENGTHS[:batch])}


def paged(page_size: int = 8) -> dict[str, Any]:
    """The keys of the dense cache, in pages."""
    given = tensors()
    table = torch.randperm(3 * KEYS // page_size, generator=torch.Generator().manual_seed(1)).view(3, -1)
    for name in ("k_cache", "v_cache"):
        dense = given[name].view(-1, page_size, *given[name].shape[2:])
        given[name] = torch.empty_like(dense)
        given[name][table.flatten()] = dense
    return {**given, "block_table": table.int()}


def added(len_new: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    angles = torch.rand(40, 4, generator=generator) * 6
    k, v = (torch.randn(3, len_new, 2, width, generator=generator).to(torch.bfloat16) for width in (16, 24))
    return {"k": k, "v": v, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": ints(17, 0, 20)}


def in_float8(given: dict[str, Any]) -> dict[str, Any]:
    """The cache of e4m3 numbers."""
    return {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    return plain_in_place_of_kernels(monkeypatch, "forward")


REFUSED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda a: a.update(q=None), r"^q must be of type Tensor; got None"),
    (lambda a: a.update(v_cache=[a["v_cache"]]), r"^v_cache must be of type Tensor; got "),
    (lambda a: a.update(cache_seqlens=[1, 2, 3]), r"^cache_seqlens must be of type Tensor or int or None; got \[1, 2, 3\]"),
    (lambda a: a.update(cache_seqlens=True), r"^cache_seqlens must be of type Tensor or int or None; got True"),
    (lambda a: a.update(cache_seqlens=25), r"^cache_seqlens must be an integer from 0 to 24; got 25"),
    (lambda a: a.update(added(), cache_seqlens=23), r"^cache_seqlens must be an integer from 0 to 22; got 23"),
    (lambda a: a.update(added(25), cache_seqlens=0), r"^k must have at most 24 new keys, which a sequence has room for; got 25"),
    (lambda a: a.update(cache_seqlens=-1), r"^cache_seqlens must be an integer from 0 to 24; got -1"),
    (lambda a: a.update(added(), cache_seqlens=None), r"^cache_seqlens must say where new keys and positions begin, .*; got None"),
    (lambda a: a.update(block_table=[[1]]), r"^block_table must be of type Tensor or None; got \[\[1\]\]"),
    (lambda a: a.update(cache_leftpad=1), r"^cache_leftpad must be of type Tensor or None; got 1"),
    (lambda a: a.update(causal="top_left"), r"^causal must be True or False for a cache, .*; got 'top_left'"),
    (lambda a: a.update(causal="top_left", softcap=3.0), r"^causal must be .*; got 'top_left'"),
    (lambda a: a.update(causal=1), r"^causal must be of type bool; got 1"),
    (lambda a: a.update(scale="0.5"), r"^scale must be of type float or None; got '0\.5'"),
    (lambda a: a.update(scale=-1.0), r"^scale must be from .*; got -1\.0"),
    (lambda a: a.update(return_lse=1), r"^return_lse must be of type bool; got 1"),
    (lambda a: a.update(softcap=-1.0), r"^softcap must be .*; got -1\.0"),
    (lambda a: a.update(num_splits=-1), r"^num_splits must be an integer from 0 to 2147483647; got -1"),
    (lambda a: a.update(num_splits=1.0), r"^num_splits must be of type int or None; got 1\.0"),
    (lambda a: a.update(num_splits=True), r"^num_splits must be of type int or None; got True"),
    (lambda a: a.update(rotary_interleaved=1), r"^rotary_interleaved must be of type bool; got 1"),
    (lambda a: a.update(batch_invariant=1), r"^batch_invariant must be of type bool; got 1"),
    (lambda a: a.update(q=a["q"][0]), r"^q must have 4 dimensions \(batch, len_q, heads, head_dim\); got 3"),
    (lambda a: a.update(k_cache=a["k_cache"][0]), r"^k_cache must have 4 dimensions \(batch, keys, heads, head_dim\); got 3"),
    (
        lambda a: a.update(paged(), k_cache=a["k_cache"][0]),
        r"^k_cache must have 4 dimensions \(pages, keys of a page, heads, head_dim\); got 3",
    ),
    (lambda a: a.update(q=a["q"].float()), r"^q must be torch\.bfloat16 or torch\.float16; got torch\.float32"),
    (
        lambda a: a.update(k_cache=a["k_cache"].to(torch.float8_e5m2)),
        r"^k_cache must be torch\.bfloat16, torch\.float16 or torch\.float8_e4m3fn; got torch\.float8_e5m2",
    ),
    (
        lambda a: a.update(k_cache=a["k_cache"].to(torch.float8_e4m3fn)),
        r"^v_cache must have k_cache's dtype torch\.float8_e4m3fn; got torch\.bfloat16",
    ),
    (
        lambda a: a.update(k_descale=torch.ones(3, 2)),
        r"^k_descale must be left out where the cache is not torch\.float8_e4m3fn; got a cache of torch\.bfloat16",
    ),
    (
        lambda a: a.update(in_float8(a), v_descale=torch.ones(3, 4)),
        r"^v_descale must be of shape \(batch, heads_kv\) = \(3, 2\), or broadcast to it; got \(3, 4\)",
    ),
    (
        lambda a: a.update(in_float8(a), k_descale=torch.ones(2).half()),
        r"^k_descale must be torch\.float32; got torch\.float16",
    ),
    (lambda a: a.update(in_float8(a), v_descale=torch.ones(3, 2).to_sparse()), r"^v_descale must be dense .*; got torch.sparse_coo"),
    (lambda a: a.update(in_float8(a), k_descale=2.0), r"^k_descale must be of type Tensor or None; got 2\.0"),
    (lambda a: a.update(v_cache=a["v_cache"].half()), r"^v_cache must have q's dtype torch\.bfloat16; got torch\.float16"),
    (lambda a: a.update(k_cache=a["k_cache"].to("meta")), r"^k_cache must be on q's device cpu; got meta"),
    (lambda a: a.update(k_cache=a["k_cache"][..., :8]), r"^k_cache must have q's head_dim 16; got 8"),
    (lambda a: a.update(v_cache=a["v_cache"][:, :9]), r"^v_cache must have k_cache's number of keys 24; got 9"),
    (lambda a: a.update(v_cache=a["v_cache"][:2]), r"^v_cache must have k_cache's batch size 3; got 2"),
    (lambda a: a.update(v_cache=a["v_cache"][:, :, :1]), r"^v_cache must have k_cache's number of heads 2; got 1"),
    (lambda a: a.update(q=a["q"][:, :, :3]), r"^q must have a number of heads that is a multiple of k_cache's 2; got 3"),
    (lambda a: a.update(q=a["q"].mT.contiguous().mT), r"^q must be contiguous in its last dimension \(stride 1\); got stride 4"),
    (lambda a: a.update(k_cache=a["k_cache"][..., 1:]), r"^k_cache must have q's head_dim 16; got 15"),
    (
        lambda a: a.update(k_cache=torch.zeros(3, KEYS, 2, 20).to(a["k_cache"])[..., :16]),
        r"^k_cache must have rows aligned to 16 bytes .*; got stride 20 in dim.* 2",
    ),
    (lambda a: a.update(k_cache=a["k_cache"].to_sparse()), r"^k_cache must be dense \(torch\.strided\); got torch\.sparse_coo"),
    (lambda a: a.update(k_cache=a["k_cache"][:2], v_cache=a["v_cache"][:2]), r"^k_cache must have at least q's batch size 3, .*; got 2"),
    (lambda a: a.update(cache_seqlens=a["cache_seqlens"][None]), r"^cache_seqlens must have 1 dimension; got 2"),
    (lambda a: a.update(cache_seqlens=a["cache_seqlens"].long()), r"^cache_seqlens must be torch\.int32; got torch\.int64"),
    (lambda a: a.update(cache_seqlens=a["cache_seqlens"].to("meta")), r"^cache_seqlens must be on q's device cpu; got meta"),
    (lambda a: a.update(cache_seqlens=ints(*range(6))[::2]), r"^cache_seqlens must be contiguous; got stride 2"),
    (lambda a: a.update(cache_seqlens=ints(1, 2)), r"^cache_seqlens must have an entry for each of 3 sequences of q; got 2"),
    (lambda a: a.update(paged(), block_table=ints(1, 2, 3)), r"^block_table must have 2 dimensions \(batch, pages of a sequence\); got 1"),
    (lambda a: a.update(paged(), block_table=torch.zeros(3, 2).long()), r"^block_table must be torch\.int32; got torch\.int64"),
    (
        lambda a: a.update(paged(), block_table=ints(*range(9)).view(3, 3).mT),
        r"^block_table must be contiguous in its last dimension; got stride 3",
    ),
    (
        lambda a: a.update(paged(), block_table=ints(*range(6)).view(2, 3)),
        r"^block_table must have an entry for each of 3 sequences of q; got 2",
    ),
    (lambda a: a.update(paged(), cache_batch_idx=ints(0, 1, 2)), r"^cache_batch_idx must be left out where block_table .*; got both"),
    (lambda a: a.update(paged(), k_cache=a["k_cache"][:0], v_cache=a["v_cache"][:0]), r"^k_cache must have a page where .*; got none"),
    (lambda a: a.update(cache_batch_idx=ints(0, 1)), r"^cache_batch_idx must have an entry for each of 3 sequences of q; got 2"),
    (lambda a: a.update(cache_batch_idx=ints(0, 1, 2)[:, None]), r"^cache_batch_idx must have 1 dimension; got 2"),
    (lambda a: a.update(cache_leftpad=ints(0, 1, 2).float()), r"^cache_leftpad must be torch\.int32; got torch\.float32"),
    (lambda a: a.update(cache_leftpad=ints(0, 1, 2, 3)), r"^cache_leftpad must have an entry for each of 3 sequences of q; got 4"),
    (lambda a: a.update(alibi_slopes=torch.ones(2, 4)), r"^alibi_slopes must have the shape .*; got \(2, 4\)"),
    (lambda a: a.update(sinks=torch.ones(3)), r"^sinks must have the shape .*; got \(3,\)"),
    (lambda a: a.update(k=added()["k"]), r"^v must be given where k is; got None"),
    (lambda a: a.update(v=added()["v"]), r"^k must be given where v is; got None"),
    (lambda a: a.update(added(), v=1), r"^v must be of type Tensor or None; got 1"),
    (lambda a: a.update(added(), k=added()["k"][:2]), r"^k must "),
    (lambda a: a.update(added(), v=added()["v"][:, :1]), r"^v must "),
    (lambda a: a.update(added(), k=added()["k"].half()), r"^k must "),
    (lambda a: a.update(rotary_cos=added()["rotary_cos"]), r"^rotary_sin must be given where rotary_cos is; got None"),
    (lambda a: a.update(added(), rotary_sin=None), r"^rotary_sin must be given where rotary_cos is; got None"),
    (lambda a: a.update(added(), rotary_sin=added()["rotary_sin"][:, :2]), r"^rotary_sin must "),
    (
        lambda a: a.update(added(), **{name: added()[name][:23] for name in ("rotary_cos", "rotary_sin")}),
        r"^rotary_cos must have a row for each of 24 positions, as a sequence has room for 24 keys; got 23",
    ),
    (lambda a: None, r"^q must be on a CUDA device; got cpu\. FLASHGEN_CPU=1 "),
    *(
        (lambda a, name=name: a.update({name: True}), rf"^{name} must be left out of flashgen\.attention_with_kvcache: ")
        for name in ("layout", "deterministic", "dropout_p", "document_ids", "key_padding_mask", "block_mask", "return_dropout_mask")
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("gradients", [False, True])
def test_bad_arguments_are_named(change: Callable[[dict[str, Any]], Any], message: str, gradients: bool) -> None:
    given = tensors()
    change(given)
    cache = [given[name].clone() for name in ("k_cache", "v_cache") if isinstance(given[name], torch.Tensor)]
    with pytest.raises(ArgumentError, match=message), torch.set_grad_enabled(gradients):
        flashgen.attention_with_kvcache(given.pop("q"), given["k_cache"], given["v_cache"], **but_for_cache(given))
    for name, before in zip(("k_cache", "v_cache"), cache, strict=False):
        if len(cache) == 2 and not given[name].is_meta and given[name].layout is torch.strided:
            assert given[name].float().equal(before.float()), "nothing is appended"


def but_for_cache(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in ("k_cache", "v_cache")}


REAL = ("sparse", "FLASHGEN_CPU", "float8")  # what fake tensors have in another way


@pytest.mark.parametrize(("change", "message"), [case for case in REFUSED if not any(word in case[1] for word in REAL)])
def test_fake_tensors_are_checked_too(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with FakeTensorMode():
        given = tensors()
        change(given)
        with pytest.raises(ArgumentError, match=message):
            flashgen.attention_with_kvcache(**given)


def test_an_int_must_count_the_keys_of_a_sequence() -> None:
    given = {name: tensor.to("meta") for name, tensor in paged().items()}
    huge = {name: torch.empty(9, 2**30, *given[name].shape[2:], device="meta", dtype=torch.bfloat16) for name in ("k_cache", "v_cache")}
    for lengths in (given["cache_seqlens"], None, 5):
        message = r"^block_table must name at most 2147483647 keys of a sequence; got 3 pages of 1073741824 keys"
        with pytest.raises(ArgumentError, match=message):
            flashgen.attention_with_kvcache(**{**given, **huge, "cache_seqlens": lengths})


def test_what_is_no_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'softmax_scale'"):
        flashgen.attention_with_kvcache(**tensors(), softmax_scale=None)
    meta = {name: tensor.to("meta") for name, tensor in tensors().items()}
    assert flashgen.attention_with_kvcache(**meta, bias=None, score_mod=None).shape == (3, 2, 4, 24), "as left out"


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("more", [{}, added()])
def test_fake_and_meta_tensors_get_the_shapes(return_lse: bool, more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"return_lse": return_lse, "causal": True, "window": (4, None), "softcap": 2.0}
    with FakeTensorMode() as mode:
        given: dict[str, Any] = {name: mode.from_tensor(value) for name, value in {**paged(), **more}.items()}
        found = flashgen.attention_with_kvcache(**given, **options)
    out, *lse = found if return_lse else (found,)
    assert out.shape == (3, 2, 4, 24)
    assert out.is_contiguous()
    assert out.dtype == torch.bfloat16
    assert [(one.shape, one.dtype) for one in lse] == [((3, 4, 2), torch.float32)] * return_lse
    assert isinstance(found, tuple) is return_lse


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("padding", [None, ints(3, 0, 24)])
def test_each_sequence_is_a_call_of_its_own(padding: torch.Tensor | None) -> None:
    """Dense, in pages and by entries of the cache alike."""
    slopes, sinks = torch.rand(3, 4), torch.randn(4)
    options: dict[str, Any] = {"causal": True, "scale": 0.3, "alibi_slopes": slopes, "sinks": sinks, "cache_leftpad": padding}
    given = tensors()
    out, lse = flashgen.attention_with_kvcache(**given, **options, return_lse=True)
    assert flashgen.attention_with_kvcache(**given, **options).equal(out)
    assert lse.shape == (3, 4, 2)
    other = torch.tensor([2, 0, 1])
    by_entry = {**given, "cache_batch_idx": other.argsort().int(), **{name: given[name][other] for name in ("k_cache", "v_cache")}}
    for form in (paged(), paged(1), paged(3), by_entry):
        found = flashgen.attention_with_kvcache(**form, **options, return_lse=True)
        assert found[0].equal(out)
        assert found[1].equal(lse)
    for b, length in enumerate(LENGTHS):
        begin = 0 if padding is None else int(padding[b])
        k, v = (given[name][b : b + 1, begin:length] for name in ("k_cache", "v_cache"))
        more: dict[str, Any] = {"causal": True, "scale": 0.3, "alibi_slopes": slopes[b : b + 1], "sinks": sinks, "return_lse": True}
        one = flashgen.attention(given["q"][b : b + 1], k, v, **more)
        torch.testing.assert_close(out[b], one[0][0])
        torch.testing.assert_close(lse[b], one[1][0])


def test_operands_have_their_names(on_cpu: list[Tensors]) -> None:
    given = {**paged(), "cache_leftpad": ints(1, 0, 2)}
    flashgen.attention_with_kvcache(**given, chunk=3, window=(4, 2), num_splits=3)
    (found,) = on_cpu
    names = {"q": "q", "k": "k_cache", "v": "v_cache"} | {name: name for name in ("cache_seqlens", "block_table", "cache_leftpad")}
    assert all(found[name].equal(given[own]) for name, own in names.items())
    w = found.workload
    assert (w.batch, w.heads_q, w.heads_kv, w.len_q, w.len_kv) == (3, 4, 2, 2, KEYS)
    assert (w.pages, w.page_size, w.table_pages) == (9, 8, 3)
    assert (w.chunk, w.window_left, w.window_right) == (3, 4, 2)
    flashgen.attention_with_kvcache(**tensors(), cache_batch_idx=ints(2, 0, 0))
    assert on_cpu[1]["block_table"].tolist() == [[2], [0], [0]]
    assert (on_cpu[1].workload.pages, on_cpu[1].workload.page_size, on_cpu[1].workload.table_pages) == (3, KEYS, 1)
    assert "cache_leftpad" not in on_cpu[1]
    flashgen.attention_with_kvcache(**tensors(), batch_invariant=True)
    assert "block_table" not in on_cpu[2]
    assert [one.problem.batch_invariant for one in on_cpu] == [False, False, True]


def test_lengths_may_be_one_number_or_left_out(on_cpu: list[Tensors]) -> None:
    for form, keys in ((tensors(), KEYS), (paged(), KEYS)):
        for length, wanted in ((None, keys), (5, 5), (0, 0), (keys, keys)):
            out = flashgen.attention_with_kvcache(**{**form, "cache_seqlens": length})
            assert on_cpu[-1]["cache_seqlens"].tolist() == 3 * [wanted]
            assert out.any() == bool(wanted)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("len_q", "batch", "keys"), [(0, 3, KEYS), (2, 0, KEYS), (2, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_there_may_be_no_queries_sequences_and_keys(len_q: int, batch: int, keys: int) -> None:
    given = {**tensors(len_q, batch, keys), "cache_seqlens": None}
    out, lse = flashgen.attention_with_kvcache(**given, return_lse=True)
    assert out.shape == (batch, len_q, 4, 24)
    assert lse.shape == (batch, 4, len_q)
    if not keys:
        assert not out.any()
        assert (lse == -torch.inf).all()


def rotated(x: torch.Tensor, first: int, step: int, given: dict[str, Any], interleaved: bool) -> torch.Tensor:
    """[length, heads, width], at positions first + i * step."""
    position = first + step * torch.arange(len(x))
    cos, sin = (given[name].double()[position][:, None] for name in ("rotary_cos", "rotary_sin"))
    n, found = cos.shape[-1], x.double().clone()
    one, other = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    a, b = found[..., one].clone(), found[..., other].clone()
    found[..., one], found[..., other] = a * cos - b * sin, a * sin + b * cos
    return found.to(x.dtype)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("by_query", [{"causal": True}, {"window": (9, 9)}, {"chunk": 100}, {}])
@pytest.mark.parametrize("form", [tensors, paged])
def test_new_keys_are_appended_and_rotated(interleaved: bool, by_query: dict[str, Any], form: Callable[[], dict[str, Any]]) -> None:
    given, new = form(), added()
    seqlens, cache = new["cache_seqlens"], tensors()
    found = flashgen.attention_with_kvcache(**{**given, **new}, **by_query, rotary_interleaved=interleaved)
    assert seqlens.tolist() == [17, 0, 20], "not changed"
    q = given["q"].clone()
    for b, length in enumerate(seqlens.tolist()):
        cache["k_cache"][b, length : length + 2] = rotated(new["k"][b], length, 1, new, interleaved)
        cache["v_cache"][b, length : length + 2] = new["v"][b]
        q[b] = rotated(q[b], length, int(bool(by_query)), new, interleaved)
    cache |= {"q": q, "cache_seqlens": seqlens + 2}
    torch.testing.assert_close(found, flashgen.attention_with_kvcache(**cache, **by_query), atol=2e-2, rtol=2e-2)
    table = given.get("block_table", torch.arange(3)[:, None]).long()
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given[name][table].reshape(cache[name].shape), cache[name], atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("on_cpu")
def test_each_may_be_asked_for_alone() -> None:
    new = added()
    for names in (("k", "v"), ("rotary_cos", "rotary_sin")):
        given = {**tensors(), **{name: new[name] for name in (*names, "cache_seqlens")}}
        before = given["k_cache"].clone()
        flashgen.attention_with_kvcache(**given, causal=True)
        assert given["k_cache"].equal(before) is ("k" not in names)


def test_gradients_and_transforms_are_refused() -> None:
    given: dict[str, Any] = tensors()
    call: Any = flashgen.attention_with_kvcache
    for name in ("q", "k_cache", "v_cache"):
        changed = {**given, name: given[name].clone().requires_grad_()}
        with pytest.raises(ArgumentError, match=rf"^{name} must not require grad, as attention_with_kvcache has no gradients"):
            call(**changed)
        with torch.no_grad(), pytest.raises(ArgumentError, match=r"^q must be on a CUDA device"):
            call(**changed)
    for name in ("k", "v", "rotary_cos"):
        changed = {**given, **added()}
        changed[name] = changed[name].clone().requires_grad_()
        with pytest.raises(ArgumentError, match=rf"^{name} must not require grad"):
            call(**changed)
    for name in ("k_descale", "v_descale"):
        with pytest.raises(ArgumentError, match=rf"^{name} must not require grad"):
            call(**given, **{name: torch.ones(len(given["q"]), given["k_cache"].shape[2], requires_grad=True)})
    for name in ("alibi_slopes", "sinks"):
        with pytest.raises(ArgumentError, match=rf"^{name} must not require grad"):
            call(**given, **{name: torch.ones(4, requires_grad=True)})
    message = r"^flashgen\.attention_with_kvcache has no gradients, and no rules for the transforms of torch\.func"
    of_q = partial(call, **{name: tensor for name, tensor in given.items() if name != "q"})
    with pytest.raises(FlashgenError, match=message):
        torch.func.grad(lambda q: of_q(q).float().sum())(given["q"])
    with pytest.raises(FlashgenError, match=message):
        torch.vmap(of_q)(given["q"][None])
    with forward_ad.dual_level(), pytest.raises(FlashgenError, match=message):
        of_q(forward_ad.make_dual(given["q"], given["q"]))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("form", [pytest.param(tensors, marks=pytest.mark.slow), paged])
def test_a_compiled_call_takes_other_sizes(form: Callable[..., dict[str, Any]]) -> None:
    torch.compiler.reset()
    graphs = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    call = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend=count, dynamic=True)
    for len_q, batch in ((5, 3), (6, 3 if form is paged else 2), (7, 3)):  # sizes that are alike at first must stay so
        given, new = form(), added(len_q)
        if form is tensors:
            given |= {name: given[name].repeat(2, 1, 1, 1) for name in ("k_cache", "v_cache")}
        given["q"] = tensors(len_q)["q"]
        given = {name: tensor[:batch].clone() if name in ("q", "block_table") else tensor for name, tensor in {**given, **new}.items()}
        given |= {name: given[name][:batch].clone() for name in ("k", "v", "cache_seqlens")} | {"causal": True, "window": (7, None)}
        given["cache_seqlens"] = given["cache_seqlens"].clamp(max=KEYS - len_q)
        other = {**given, "k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}
        assert call(**given).equal(flashgen.attention_with_kvcache(**other))
        assert given["k_cache"].equal(other["k_cache"])
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function" and "flashgen" in str(node.target)]
    assert called == ["flashgen.append_to_cache.default", "flashgen.attention_cached_output.default"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("in_one", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_cache_is_copied_in_a_compiled_graph(in_one: bool) -> None:
    """Neither one that is given, nor one that is a part of another tensor."""
    torch.compiler.reset()
    given: dict[str, Any] = {**paged(), **added()}
    caches = [given.pop(name) for name in ("k_cache", "v_cache")]
    if in_one:
        given["v"], caches = given["v"][..., :16], [torch.stack((caches[0], caches[1][..., :16]), 1)]

    def step(q: torch.Tensor, *caches: torch.Tensor, **more: Any) -> Any:
        k_cache, v_cache = (caches[0][:, 0], caches[0][:, 1]) if in_one else caches
        return flashgen.attention_with_kvcache(q, k_cache, v_cache, causal=True, **more)

    copies = [cache.clone() for cache in caches]
    found, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), given["q"], *caches, **but_for_q(given))
    assert found.equal(step(given["q"], *copies, **but_for_q(given)))
    assert all(cache.equal(copy) for cache, copy in zip(caches, copies, strict=True))
    body = code[code.index("def call(") :]
    assert [name.split(".")[0] for name in body.split(" = torch.ops.flashgen.")[1:]] == ["append_to_cache", "attention_cached_output"]
    assert "fused" not in body, "no other kernel, as those that copy are"
    assert not re.search(r"copy_|clone|empty_strided|torch\.ops\.aten", body)


def but_for_q(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "q"}


@pytest.mark.usefixtures("on_cpu")
def test_a_compiled_call_takes_a_length() -> None:
    torch.compiler.reset()
    call = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend="aot_eager")
    for length in (None, 3, 7, 9):
        given = {**tensors(), "cache_seqlens": length}
        assert call(**given).equal(flashgen.attention_with_kvcache(**given))
    with pytest.raises(Exception, match="cache_seqlens must be an integer from 0 to the keys that a sequence has room for"):
        call(**{**tensors(), "cache_seqlens": 25})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("lengths", [(25,), (-1,), (3, 4, 25), (3, 4, -1)], ids=str)
def test_compiled_calls_refuse_a_length_that_is_out_of_range(lengths: tuple[int, ...]) -> None:
    """Also where torch.compile has made a symbol of it."""
    torch.compiler.reset()
    *right, wrong = lengths
    call = torch.compile(flashgen.attention_with_kvcache, backend="aot_eager")
    assert all(call(**{**tensors(), "cache_seqlens": length}).shape == (3, 2, 4, 24) for length in right)
    with pytest.raises(ArgumentError, match=rf"^cache_seqlens must be an integer from 0 to 24; got {wrong}$"):
        call(**{**tensors(), "cache_seqlens": wrong})
    given = {**tensors(), "k": added()["k"], "v": added()["v"]}
    with pytest.raises(ArgumentError, match=r"^cache_seqlens must be an integer from 0 to 22; got 23$"):
        call(**{**given, "cache_seqlens": 23})


@pytest.mark.usefixtures("on_cpu")
def test_a_compiled_call_takes_a_length_that_only_a_run_knows() -> None:
    """It counts as the nearest one that is possible, as those of a tensor do."""
    torch.compiler.reset()
    given = tensors()

    def of_longest(lengths: torch.Tensor) -> Any:
        return flashgen.attention_with_kvcache(**{**given, "cache_seqlens": lengths.max().item()})

    call = torch.compile(of_longest, fullgraph=True, backend="aot_eager")
    for longest, wanted in ((7, 7), (99, 24)):
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            found = call(ints(3, longest))
        assert found.equal(flashgen.attention_with_kvcache(**{**given, "cache_seqlens": wanted}))


@pytest.mark.parametrize("index", [0, 22])
def test_torch_compile_lets_refusals_through_as_they_are(index: int) -> None:
    change, message = REFUSED[index]
    given = tensors()
    change(given)
    torch.compiler.reset()
    with pytest.raises(ArgumentError, match=message):
        torch.compile(flashgen.attention_with_kvcache, backend="aot_eager")(**given)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("operator", [pytest.param("attention_cached_output", marks=pytest.mark.slow), "attention_cached_forward"])
def test_operators_pass_pytorchs_check(operator: str) -> None:
    call = getattr(torch.ops.flashgen, operator).default
    given = paged()
    existing = [given[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens", "block_table")]
    torch.library.opcheck(call, (*existing, None, ints(3, 0, 1), None, None, True, 0.3, True, "alibi,window", [3, 1], [], [torch.ones(4)]))
    dense = [tensors()[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens")]
    torch.library.opcheck(call, (*dense, None, ints(2, 0, 0), None, None, None, False, None))


@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_counter_takes_caches_for_full(causal: bool) -> None:
    for form in (tensors(), paged()):
        given = {name: tensor.to("meta") for name, tensor in form.items()}
        for return_lse in (False, True):
            with FlopCounterMode(display=False) as counter:
                flashgen.attention_with_kvcache(**given, causal=causal, return_lse=return_lse)
            assert counter.get_total_flops() == 2 * 3 * 4 * 2 * KEYS * (16 + 24) // (2 if causal else 1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cache_seqlens": ints(3, 25, 0)}, r"^cache_seqlens must be from 0 to the keys that a sequence may have, 24; got 25 in entry 1"),
    ({"cache_seqlens": ints(-1, 2, 0)}, r"^cache_seqlens must be from 0 to the keys that a sequence may have, 24; got -1 in entry 0"),
    ({"cache_leftpad": ints(3, 1, 0)}, r"^cache_leftpad must be from 0 to the length 0 of sequence 1; got 1"),
    (
        {"block_table": ints(1, 2, 9, 0, 0, 0, 1, 1, 1).view(3, 3)},
        r"^block_table must name pages from 0 to 8; got 9 in entry 2 of sequence 0",
    ),
    ({"block_table": ints(1, 2, 3, 0, 0, 0, -1, 1, 1).view(3, 3)}, r"^block_table must name pages .*; got -1 in entry 0 of sequence 2"),
    (
        {**tensors(), "block_table": None, "cache_batch_idx": ints(0, 7, 3)},
        r"^cache_batch_idx must name pages .* 2; got 3 in entry 0 of seq.* 2",
    ),
    (
        {**added(), "cache_seqlens": ints(3, 20, 0), "block_table": ints(1, 2, 9, 0, 0, 9, 1, 1, 1).view(3, 3)},
        r"^block_table must name pages from 0 to 8; got 9 in entry 2 of sequence 1",
    ),
    (
        {**tensors(), **added(), "block_table": None, "cache_seqlens": ints(3, 2, 0), "cache_batch_idx": ints(0, 7, 2)},
        r"^cache_batch_idx must name pages from 0 to 2; got 7 in entry 0 of sequence 1",
    ),
    (
        {**added(), "cache_seqlens": ints(3, 23, 0)},
        r"^cache_seqlens must be from 0 to the keys that a sequence may have before 2 more, 22; got 23 in entry 1",
    ),
]


@pytest.mark.parametrize(("change", "message", "compiled"), [*((*case, False) for case in WRONG), (*WRONG[0], True), (*WRONG[-1], True)])
def test_wrong_lengths_are_told_where_somebody_asks(
    change: dict[str, Any], message: str, compiled: bool, on_cpu: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    call = flashgen.attention_with_kvcache
    call = torch.compile(call, fullgraph=True, backend="eager") if compiled else call  # type: ignore[assignment]
    given = {**paged(), **change}
    call(**given)
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    with pytest.raises(ArgumentError, match=message):
        call(**given)
    assert len(on_cpu) == 1
    unused = ints(1, 2, -1, 99, -1, -1, 0, 0, 0).view(3, 3)
    call(**{**paged(), "cache_seqlens": ints(16, 0, 24), "block_table": unused, "cache_leftpad": ints(16, 0, 3)})
    assert len(on_cpu) == 2
    nobody = {name: tensor[:0] if name in ("q", "cache_seqlens", "block_table") else tensor for name, tensor in paged().items()}
    assert call(**nobody).shape == (0, 2, 4, 24)


def test_wrong_padding_is_told_before_anything_is_written(on_cpu: list[Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys count in the lengths that padding is within."""
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    given = {**tensors(), **added(), "cache_seqlens": ints(3, 0, 5)}
    before = given["k_cache"].clone()
    with pytest.raises(ArgumentError, match=r"^cache_leftpad must be from 0 to the length 2 of sequence 1; got 3"):
        flashgen.attention_with_kvcache(**given, cache_leftpad=ints(5, 3, 0))
    assert given["k_cache"].equal(before)
    assert not on_cpu
    flashgen.attention_with_kvcache(**given, cache_leftpad=ints(5, 2, 0))
    assert not given["k_cache"].equal(before)


NAMES = (
    "q",
    "k_cache",
    "v_cache",
    "k",
    "v",
    "cache_seqlens",
    "block_table",
    "cache_batch_idx",
    "cache_leftpad",
    "rotary_cos",
    "rotary_sin",
)
OPTIONS = (
    "rotary_interleaved",
    "batch_invariant",
    "causal",
    "scale",
    "return_lse",
    "softcap",
    "window",
    "chunk",
    "num_splits",
    "sinks",
    "alibi_slopes",
)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|deprecated)")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_odd_arguments_are_refused_by_name_or_right(part: int) -> None:
    """Hundreds: none of them ends in an error of Python's, or of PyTorch's."""
    cases: list[tuple[str, Any]] = [(name, value) for name in (*NAMES, *OPTIONS) for value in ODD]
    cases += [(name, make()) for name in ("q", "k_cache", "v_cache", "cache_seqlens", "block_table", "k", "rotary_sin") for make in TENSORS]
    cases, refused = cases[part::4], 0
    for name, value in cases:
        given = {**tensors(), **added(), name: value}
        try:
            flashgen.attention_with_kvcache(**given)
        except FlashgenError as error:
            refused += 1
            told = str(error)
        else:
            continue
        own = "|".join((*NAMES, *OPTIONS))
        assert re.match(rf"({own}|head_dim|head_dim_v|flashgen\.attention_with_kvcache|modifiers)\b", told), (name, type(value), told)
        assert len(told) < 600
    assert 0.6 * len(cases) < refused < len(cases)
