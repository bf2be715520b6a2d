"""`flashgen.attention_with_kvcache` of CPU tensors with a cache of e4m3 numbers, by kernels in the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.numerics.append import rotated

TABLE = torch.tensor([[5, 0, 9], [7, -1, -1], [2, 4, -1]], dtype=torch.int32)
LENGTHS = torch.tensor([41, 3, 18], dtype=torch.int32)
CHECKED = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")  # the schema's compares, which PyTorch cannot


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def call(**changes: Any) -> dict[str, Any]:
    """Three sequences in pages of 16 keys, with descales of heads and sequences."""
    generator = torch.Generator().manual_seed(1)
    k_cache, v_cache = (torch.randn(10, 16, 2, 16, generator=generator).to(torch.float8_e4m3fn) for _ in "kv")
    of_keys, of_values = torch.rand(2, 3, 2, generator=generator) + 0.5
    q = torch.randn(3, 2, 4, 16, generator=generator).bfloat16()
    where = {"cache_seqlens": LENGTHS, "block_table": TABLE, "causal": True}
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, **where, "k_descale": of_keys, "v_descale": of_values, **changes}


def wanted(given: dict[str, Any]) -> list[Tensor]:
    """By plain PyTorch, of each sequence: [queries, heads, columns], fp32."""
    found = []
    for b, length in enumerate(LENGTHS.tolist()):
        pages = TABLE[b, : -(-length // 16)].long()
        k, v = (given[f"{name}_cache"][pages].float().flatten(0, 1)[:length] for name in "kv")
        for one, name in ((k, "k_descale"), (v, "v_descale")):
            if given[name] is not None:
                one *= given[name].expand(3, 2)[b][:, None]
        seen = torch.arange(length)[None] <= torch.arange(2)[:, None] + length - 2
        heads = [one.transpose(0, 1) for one in (given["q"][b].float(), k, v)]
        found.append(scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=seen, enable_gqa=True).transpose(0, 1))
    return found


FORMS: dict[str, dict[str, Any]] = {
    "heads": {},
    "of sequences": {"k_descale": torch.tensor([[0.5], [2.0], [1.25]]), "v_descale": torch.tensor([[3.0], [0.1], [1.0]])},
    "of heads": {"k_descale": torch.tensor([0.7, 1.5]), "v_descale": torch.tensor([3.0, 0.1])},
    "one": {"k_descale": torch.tensor(0.7), "v_descale": torch.tensor([3.0])},
    "values alone": {"k_descale": None},
    "none": {"k_descale": None, "v_descale": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_right(form: str) -> None:
    given = call(**FORMS[form])
    out = flashgen.attention_with_kvcache(**given)
    for one, of_plain in zip(out, wanted(given), strict=True):
        torch.testing.assert_close(one.float(), of_plain, atol=2**-8 * float(of_plain.abs().max()), rtol=0)


NEW = 3


def appending(form: str, interleaved: bool | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The call whose last keys are new; of a rotation unless `interleaved` is None. Some values are too large for an element."""
    generator, given = torch.Generator().manual_seed(2), call(**FORMS[form])
    k, v = (torch.randn(3, NEW, 2, 16, generator=generator) for _ in "kv")
    v[0, 0] *= 1000.0
    found = {**given, "q": given["q"].to(dtype), "k": k.to(dtype), "v": v.to(dtype), "cache_seqlens": LENGTHS - NEW}
    if interleaved is None:
        return found
    angles = torch.rand(60, 4, generator=generator) * 6
    return {**found, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}


@pytest.mark.parametrize(
    ("form", "interleaved", "dtype"),
    [("heads", None, torch.bfloat16), ("of heads", True, torch.bfloat16), ("none", False, torch.bfloat16), ("one", None, torch.float16)],
)
def test_new_keys_are_divided_rounded_and_not_too_large(form: str, interleaved: bool | None, dtype: torch.dtype) -> None:
    given = appending(form, interleaved, dtype)
    before = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    out = flashgen.attention_with_kvcache(**given)
    rows = {"k": given["k"].float(), "v": given["v"].float()}
    q = given["q"].float()
    if interleaved is not None:
        tables = given["rotary_cos"], given["rotary_sin"]
        positions = LENGTHS.long()[:, None] - NEW + torch.arange(NEW)
        rows["k"] = rotated(rows["k"], positions, tables, interleaved).to(dtype).float()
        q = rotated(q, positions[:, :2], tables, interleaved).to(dtype)
    for name, new in rows.items():
        descale = torch.ones(()) if given[f"{name}_descale"] is None else given[f"{name}_descale"]
        elements = (new / descale.expand(3, 2)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for b, i in itertools.product(range(3), range(NEW)):
            position = int(LENGTHS[b]) - NEW + i
            before[f"{name}_cache"][TABLE[b, position // 16], position % 16] = elements[b, i]
        assert torch.equal(given[f"{name}_cache"].view(torch.uint8), before[f"{name}_cache"].view(torch.uint8))
    for one, of_plain in zip(out, wanted({**given, "q": q}), strict=True):
        torch.testing.assert_close(one.float(), of_plain, atol=2**-8 * float(of_plain.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(3, NEW, 2, 16, dtype=torch.float16)}, r"^v must have k's dtype torch\.bfloat16; got torch\.float16"),
        ({"q": torch.zeros(3, 2, 4, 16, dtype=torch.float16)}, r"^q must have k's dtype torch\.bfloat16; got torch\.float16"),
        (
            {"k": torch.zeros(3, NEW, 2, 16).to(torch.float8_e4m3fn)},
            r"^k must be torch\.bfloat16 or torch\.float16; got torch\.float8_e4m3fn",
        ),
        ({"k_descale": torch.ones(3, 5)}, r"^k_descale must be of shape \(batch, heads_kv\) = \(3, 2\), or broadcast to it; got \(3, 5\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flashgen.attention_with_kvcache(**{**appending("heads", None), **change})


def test_a_compiled_call_that_appends_is_the_same() -> None:
    compiled: Any = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend="aot_eager", dynamic=True)
    first, second = appending("heads", True), appending("heads", True)
    assert compiled(**first).equal(flashgen.attention_with_kvcache(**second))
    assert first["k_cache"].view(torch.uint8).equal(second["k_cache"].view(torch.uint8))


def test_a_compiled_call_is_the_same() -> None:
    compiled: Any = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend="aot_eager", dynamic=True)
    for form in ("heads", "of heads"):
        given = call(**FORMS[form])
        for one, eager in zip(*(each(**given, return_lse=True) for each in (compiled, flashgen.attention_with_kvcache)), strict=True):
            assert one.equal(eager)


def test_operators_pass_pytorchs_check() -> None:
    given = call()
    where = given["cache_seqlens"], given["block_table"], None, None
    for operator in (torch.ops.flashgen.attention_cached_output.default, torch.ops.flashgen.attention_cached_forward.default):
        arguments = given["q"], given["k_cache"], given["v_cache"], *where, given["k_descale"], given["v_descale"], True, None
        torch.library.opcheck(operator, arguments, test_utils=CHECKED)


def test_a_head_of_zeros_may_have_a_descale_of_zero() -> None:
    """Whose elements are divided by 1: 0 / 0 would hide all keys of the head from then on."""
    new, none = torch.zeros(3, 1, 2, 16, dtype=torch.bfloat16), torch.zeros(3, 2)
    given = call(k=new, v=new, k_descale=none, v_descale=none)
    flashgen.attention_with_kvcache(**given)
    for b, length in enumerate(LENGTHS.tolist()):
        for name in ("k_cache", "v_cache"):
            assert (given[name][TABLE[b, length // 16], length % 16].float() == 0).all()
