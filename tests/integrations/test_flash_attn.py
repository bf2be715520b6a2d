"""FlashAttention's functions by flashgen: options, layouts and refusals, and a call of CPU tensors against plain attention in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.integrations import flash_attn as fa
from flashgen.integrations.flash_attn import arguments, bert_padding, flash_attn_3_interface, flash_attn_interface, primitives, rotary
from flashgen.integrations.flash_attn.inference import inference
from flashgen.operators.gradients import NoDerivativeError


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.manual_seed(11)


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes).bfloat16()


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
    kept: torch.Tensor | None = None,
    p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of [batch, length, heads, width] in fp64, as FlashAttention's documentation says it."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    last = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = torch.arange(k.shape[1])
    if slopes is not None:
        s = s - slopes.double().reshape(-1, q.shape[2], 1, 1) * (last - keys).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = (keys > last + right) & (right >= 0) | (keys < last - left) & (left >= 0)
    s = s.masked_fill(hidden, -math.inf)
    probabilities = torch.softmax(s, -1).nan_to_num(0.0)
    if kept is not None:
        probabilities = probabilities * kept / (1 - p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), s.logsumexp(-1)


def close(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert given.shape == wanted.shape
    return torch.allclose(given.double(), wanted.double(), atol=0.04, rtol=0.02)


def fake_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """The arguments that flashgen's function of that name gets, in place of the calls."""
    calls: list[dict[str, Any]] = []

    def call(*tensors: Any, **options: Any) -> Any:
        calls.append({"tensors": tensors, **options})
        found = torch.zeros(*tensors[0].shape[:-1], tensors[2].shape[-1])
        return (found, torch.zeros(1)) if options["return_lse"] else found

    monkeypatch.setattr(f"flashgen.integrations.flash_attn.calls.{name}", call)
    return calls


@pytest.mark.slow
def test_a_call_is_that_of_plain_attention() -> None:
    q, k, v = (drawn(2, 9, 2, 8).requires_grad_() for _ in "qkv")
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse, s_dmask = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    wanted, wanted_lse = exact(doubles[0], doubles[1], doubles[2], causal=True)
    assert close(out, wanted)
    assert torch.allclose(lse.double(), wanted_lse, atol=1e-3)
    assert s_dmask.shape == (0,)
    into = torch.randn_like(wanted)
    gradients = torch.autograd.grad(out, (q, k, v), into.bfloat16()), torch.autograd.grad(wanted, doubles, into)
    assert all(close(*both) for both in zip(*gradients, strict=True))
    with torch.no_grad():
        again = fa.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True)
        assert torch.equal(again, out)
        assert torch.equal(fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True), out)


@pytest.mark.parametrize(
    ("given", "causal", "wanted"),
    [
        ((-1, -1), True, None),
        ([-1, -1], False, None),
        ((3, -1), False, (3, None)),
        ((-1, 0), False, (None, 0)),
        ((4, 7), True, (4, None)),
        ((-1, 5), True, None),
        (torch.tensor([2, 9]), False, (2, 9)),
        ((torch.tensor(-1), torch.tensor(-1)), False, None),
    ],
)
def test_windows_end_where_theirs_do(given: Any, causal: bool, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_calls(monkeypatch, "attention")
    q = drawn(1, 4, 1, 8)
    fa.flash_attn_func(q, q, q, causal=causal, window_size=given)
    assert calls[0]["window"] == wanted


@pytest.mark.parametrize("module", [flash_attn_interface, flash_attn_3_interface])
def test_options_go_where_they_belong(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_calls(monkeypatch, "attention")
    q = drawn(1, 4, 1, 8)
    module.flash_attn_func(q, q, q, softmax_scale=0.5, causal=True, softcap=20.0, deterministic=True)
    sinks = torch.ones(1)
    module.flash_attn_func(q, q, q, softcap=-1.0, s_aux=sinks)
    first, second = calls
    assert (first["sinks"], second["sinks"]) == (None, sinks)
    assert [first[name] for name in ("scale", "causal", "softcap", "deterministic", "return_lse")] == [0.5, True, 20.0, True, False]
    assert [second[name] for name in ("scale", "causal", "softcap", "deterministic", "dropout_p")] == [None, False, None, None, 0.0]
    if module is flash_attn_interface:
        slopes = torch.ones(1)
        module.flash_attn_func(q, q, q, 0.25, alibi_slopes=slopes)
        assert calls[2]["dropout_p"] == 0.25
        assert calls[2]["alibi_slopes"] is slopes
        module.flash_attn_func(q, q, q, False)
        assert calls[3]["dropout_p"] == 0.0
        assert type(calls[3]["dropout_p"]) is float
    else:
        module.flash_attn_func(q, q, q, attention_chunk=4, num_splits=3, pack_gqa=True)
        assert calls[2]["chunk"] == 4
        assert module.get_scheduler_metadata(1, 2, 3, 4, 5, 6, torch.ones(1)) is None


def test_other_head_dims_are_padded_by_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_calls(monkeypatch, "attention")
    q, apart = drawn(1, 4, 1, 11), drawn(1, 11, 1, 4).transpose(1, 3)
    assert fa.flash_attn_func(q, q, q).shape == q.shape
    assert fa.flash_attn_func(apart, apart, apart).shape == apart.shape
    for call in calls:
        assert all(t.shape == (1, 4, 1, 16) and t.stride(-1) == 1 and not t[..., 11:].any() for t in call["tensors"])
        assert call["scale"] == 11**-0.5


def test_head_dims_that_padding_makes_alike_are_refused() -> None:
    narrow, wide, ends = drawn(1, 4, 1, 12), drawn(1, 4, 1, 16), torch.tensor([0, 4], dtype=torch.int32)
    for q, k in ((narrow, wide), (wide, narrow)):
        message = rf"must have q's head_dim {q.shape[-1]}; got {k.shape[-1]}$"
        with pytest.raises(ArgumentError, match=f"^k {message}"):
            fa.flash_attn_func(q, k, narrow)
        with pytest.raises(ArgumentError, match=f"^k {message}"):
            fa.flash_attn_varlen_func(q[0], k[0], narrow[0], ends, ends, 4, 4)
        with pytest.raises(ArgumentError, match=f"^k_cache {message}"):
            fa.flash_attn_with_kvcache(q, k, narrow)
        with pytest.raises(ArgumentError, match=f"^k {message}"):
            primitives._flash_attn_forward(q, k, k, 0.0, 1.0, False)
        with pytest.raises(ArgumentError, match=f"^k {message}"):
            primitives._flash_attn_varlen_forward(q[0], k[0], k[0], ends, ends, 4, 4, 0.0, 1.0, False)
    with pytest.raises(ArgumentError, match=r"^k must have k_cache's head_dim 12; got 16$"):
        fa.flash_attn_with_kvcache(narrow, narrow, narrow, wide, narrow, cache_seqlens=0)
    with pytest.raises(ArgumentError, match=r"^v must have v_cache's head_dim 12; got 16$"):
        fa.flash_attn_with_kvcache(narrow, narrow, narrow, narrow, wide, cache_seqlens=0)


def test_packed_calls_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_calls(monkeypatch, "attention_varlen")
    q, ends = drawn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    longest: Any = torch.tensor(5)
    fa.flash_attn_varlen_qkvpacked_func(torch.stack((q, q, q), 1), ends, longest, 0.1, causal=True)
    fa.flash_attn_varlen_kvpacked_func(q, torch.stack((q, q), 1), ends, ends, 5, 6, window_size=(1, 2))
    flash_attn_3_interface.flash_attn_varlen_func(q, q, q, ends, ends, 5, 5, ends[1:], ends[1:], attention_chunk=2)
    assert all(call["cu_seqlens_q"] is call["cu_seqlens_kv"] is ends for call in calls)
    assert [(call["max_seqlen_q"], call["max_seqlen_kv"], call["window"], call["chunk"]) for call in calls] == [
        (5, 5, None, None),
        (5, 6, (1, 2), None),
        (5, 5, None, 2),
    ]
    assert calls[0]["dropout_p"] == 0.1
    assert calls[2]["seqused_q"] is not None


def refused_3(**given: Any) -> Callable[[], Any]:
    q = drawn(1, 4, 1, 8)
    return lambda: flash_attn_3_interface.flash_attn_func(q, q, q, **given)


def refused_2(*tensors: Any, **given: Any) -> Callable[[], Any]:
    q = drawn(1, 4, 1, 8)
    return lambda: fa.flash_attn_func(*(tensors or (q, q, q)), **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (refused_2(window_size=5), r"^window_size must be \(left, right\), two integers, of which -1 opens its side; got 5$"),
        (refused_2(window_size=(None, 3)), r"^window_size must be "),
        (refused_2(softmax_scale=-1.0), r"^softmax_scale must be "),
        (refused_2(dropout_p=1.5), r"^dropout_p must be "),
        (refused_2(causal="yes"), r"^causal must be "),
        (refused_2(drawn(1, 4, 1, 8), 3, drawn(1, 4, 1, 8)), r"^k must be of type Tensor; got 3$"),
        (refused_2(*(torch.randn(1, 4, 1, 8) for _ in "qkv")), r"^q must be torch.bfloat16 or torch.float16; got torch.float32"),
        (refused_2(*(drawn(1, 4, 1, 300) for _ in "qkv")), r"^head_dim must be a multiple of 8 from 8 to 256; got 300"),
        (refused_2(alibi_slopes=torch.ones(3)), r"^alibi_slopes must have the shape "),
        (refused_3(qv=drawn(1, 4, 1, 8)), r"^qv must be left out of flashgen's flash_attn_func: "),
        (refused_3(q_descale=torch.ones(1, 1)), r"^q_descale must be left out "),
        (refused_3(v_descale=torch.ones(1, 1)), r"^v_descale must be left out "),
        (refused_3(sm_margin=4), r"^sm_margin must be left out .* got 4$"),
    ],
)
def test_what_is_refused_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_packed_tensors_have_their_parts() -> None:
    q, ends = drawn(1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^kv must be of type Tensor; got None$"):
        fa.flash_attn_kvpacked_func(q, None)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"^kv must have 2 entries in its third dimension from the end; got the shape \(1, 4, 3, 2, 8\)$"
    ):
        fa.flash_attn_kvpacked_func(q, drawn(1, 4, 3, 2, 8))
    with pytest.raises(ArgumentError, match=r"^qkv must have 3 entries "):
        fa.flash_attn_varlen_qkvpacked_func(q[0], ends, 4)
    with pytest.raises(ArgumentError, match=r"^num_heads_q must leave heads of k and as many of v, of 2 in all; got 1$"):
        flash_attn_3_interface.flash_attn_qkvpacked_func(q, num_heads_q=1)
    q, pages, table = q[0], drawn(2, 8, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    for longest in (None, 0, "four"):
        with pytest.raises(ArgumentError, match=r"^max_seqlen_q must be an integer >= 1; got "):
            fa.flash_attn_varlen_func(q, pages, pages, ends, ends, longest, 4, block_table=table)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^cu_seqlens_k must be of type Tensor; got \[0, 4\]$"):
        fa.flash_attn_varlen_func(q, pages, pages, ends, [0, 4], 4, 4, block_table=table)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^return_attn_probs must be of type bool; got 1$"):
        fa.flash_attn_func(q[None], q[None], q[None], return_attn_probs=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^return_softmax_lse must be of type bool; got 1$"):
        fa.flash_attn_with_kvcache(q[None], pages[:1], pages[:1], return_softmax_lse=1)  # type: ignore[arg-type]


def test_refusals_have_their_names_for_lengths() -> None:
    q, ends = drawn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^cu_seqlens_k must have as many entries as cu_seqlens_q, 3; got 2$"):
        fa.flash_attn_varlen_func(q, q, q, ends, ends[:2], 5, 5)
    with pytest.raises(ArgumentError, match=r"^max_seqlen_k must be "):
        fa.flash_attn_varlen_func(q, q, q, ends, ends, 5, -5)
    cache = drawn(4, 8, 2, 8)
    with pytest.raises(ArgumentError, match=r"^dropout_p must be left out of flashgen's flash_attn_varlen_func: it is for training"):
        fa.flash_attn_varlen_func(q, cache, cache, ends, ends, 5, 5, 0.1, block_table=torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"^scheduler_metadata must be left out of flashgen's flash_attn_with_kvcache"):
        flash_attn_3_interface.flash_attn_with_kvcache(q[None], cache, cache, scheduler_metadata=ends)
    with pytest.raises(ArgumentError, match=r"^return_softmax must be left out "):
        primitives._flash_attn_forward(q[None], q[None], q[None], 0.1, 1.0, False, return_softmax=True)


@pytest.mark.parametrize("ends", [(1.5, 2), ("1", "2"), "12", (torch.tensor([1, 2]), 0), (torch.tensor(1.0), 0)])
def test_ends_of_windows_are_integers(ends: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^window_size must be \(left, right\), two integers"):
        arguments.window_of(ends, False)


def test_refusals_of_pages_have_their_names() -> None:
    q, pages, table = drawn(4, 2, 8), drawn(2, 8, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    ends = torch.tensor([0, 4], dtype=torch.int32)

    def call(q: Any = q, k: Any = pages, of_q: Any = ends, of_k: Any = ends, longest: Any = 4, pages_of: Any = table) -> Any:
        return fa.flash_attn_varlen_func(q, k, k, of_q, of_k, longest, 4, block_table=pages_of)

    for wrong, message in (
        ({"of_k": None}, "cu_seqlens_k must be of type Tensor; got None"),
        ({"of_k": ends.long()}, "cu_seqlens_k must be torch.int32 of "),
        ({"of_q": ends.float()}, "cu_seqlens_q must be torch.int32 of "),
        ({"of_q": ends[None]}, "cu_seqlens_q must be torch.int32 of the shape .*; got torch.int32 of the shape .1, 2.$"),
        ({"q": q[None]}, "q must have 3 dimensions .tokens, heads, head_dim.; got 4"),
        ({"k": pages[0]}, "k must have 4 dimensions "),
        ({"longest": torch.tensor([4, 4])}, "max_seqlen_q must be an integer"),
        ({"pages_of": table.long()}, "block_table must be torch.int32"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}"):
            call(**wrong)
    cos = drawn(15, 4)
    with pytest.raises(ArgumentError, match=r"^rotary_cos must have a row for each of 17 positions, .* room for 16 keys and .*; got 15"):
        fa.flash_attn_with_kvcache(
            q[None, :1], pages, pages, rotary_cos=cos, rotary_sin=cos, cache_seqlens=3, block_table=torch.zeros(1, 2, dtype=torch.int32)
        )
    with pytest.raises(ArgumentError, match=r"^page_table must be torch.int32"):
        flash_attn_3_interface.flash_attn_with_kvcache(q[None, :1], pages, pages, cache_seqlens=3, page_table=table.long())


def test_tensors_without_dimensions_and_numbers_of_heads_are_refused() -> None:
    q, qkv = drawn(1, 4, 2, 8), drawn(1, 4, 6, 8)
    with pytest.raises(ArgumentError, match=r"^k must have dimensions"):
        fa.flash_attn_func(q, torch.tensor(1.0), q)
    for heads in (-2, 0, 2.0, "2"):
        with pytest.raises(ArgumentError, match=r"^num_heads_q must be an integer >= 1; got "):
            flash_attn_3_interface.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^qkv must have 4 dimensions"):
        flash_attn_3_interface.flash_attn_qkvpacked_func(qkv[0], num_heads_q=2)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^max_seqlen_k must be of type int or None; got a value of type torch.Tensor"):
        fa.flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 4, torch.tensor([4, 4]))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_longest_length_that_is_a_tensor_is_no_hint_in_a_graph() -> None:
    """Its value is known when the graph runs."""
    found = torch.compile(arguments.length_of, fullgraph=True, backend="eager")(torch.tensor(4))
    assert found is None
    assert arguments.length_of(torch.tensor(4)) == 4


def test_rotations_and_padding_of_wrong_shapes_are_refused() -> None:
    x, cos = torch.randn(2, 5, 3, 12), torch.randn(9, 4)
    for wrong, message in (
        ((x[0], cos, cos), "x must have the dimensions .batch, length"),
        ((x, cos, cos[:5]), "sin must have cos's shape"),
        ((x, torch.randn(9, 7), torch.randn(9, 7)), "cos must have the shape"),
        ((x, cos, cos, False, False, torch.tensor([1, 2, 3])), "seqlen_offsets must be an int, or "),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}"):
            rotary.apply_rotary_emb(*wrong)
    with pytest.raises(ArgumentError, match=r"^attention_mask must have hidden_states' batch and length \(2, 5\); got the shape \(2, 4\)"):
        bert_padding.unpad_input(x, torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(3, 5, 2, 4), (3, 5, 7)])
def test_padding_comes_and_goes(shape: tuple[int, ...]) -> None:
    states = torch.randn(shape, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])
    tokens, indices, ends, longest, used = bert_padding.unpad_input(states, mask)
    assert torch.equal(tokens, states[mask.bool()])
    assert (indices.tolist(), ends.tolist(), longest, used.tolist()) == ([0, 1, 2, 10, 12, 13, 14], [0, 3, 3, 7], 4, [3, 0, 4])
    assert ends.dtype == used.dtype == torch.int32
    back = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, states * mask.reshape(3, 5, *(1,) * (len(shape) - 2)))
    assert torch.equal(bert_padding.pad_input(bert_padding.index_first_axis(tokens, ends[:2]), ends[:2], 3, 5).flatten(0, 1)[3], tokens[3])
    (gradient,) = torch.autograd.grad((back * 2).sum(), states)
    assert torch.equal(gradient, 2.0 * mask.reshape(3, 5, *(1,) * (len(shape) - 2)).expand(shape))
    unused = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert bert_padding.unpad_input(states, mask, unused)[2].tolist() == [0, 4, 4, 8]
    tokens, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(
        states, torch.tensor([[2, 3, 0, 0, 0], [3, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    )
    assert (indices.tolist(), ends.tolist(), longest) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 5, 8], 3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_are_those_of_complex_numbers(interleaved: bool) -> None:
    x, angles = torch.randn(2, 5, 3, 12), torch.rand(20, 4) * 6
    offsets = torch.tensor([7, 2], dtype=torch.int32)

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = x[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        by = torch.polar(torch.ones_like(angles[positions]), angles[positions])[..., None, :]
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * by)
        return torch.cat(((pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2), x[..., 8:]), -1)

    positions = torch.arange(5) + offsets[:, None]
    wanted = turned(x, positions)
    found = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=offsets)
    assert torch.allclose(found, wanted, atol=1e-5)
    packed = torch.cat((x[0], x[1, :3]))
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    found = rotary.apply_rotary_emb(packed, angles.cos(), angles.sin(), interleaved, False, offsets, ends, 5)
    assert torch.allclose(found, torch.cat((wanted[0], wanted[1, :3])), atol=1e-5)
    inside = x.clone()
    assert rotary.apply_rotary_emb(inside, angles.cos(), angles.sin(), interleaved, True, 3) is inside
    assert torch.allclose(inside, turned(x, torch.arange(5) + 3), atol=1e-5)
    back = rotary.apply_rotary(inside, angles.cos(), angles.sin(), 3, interleaved=interleaved, conjugate=True)
    assert torch.allclose(back, x, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_of_no_position_stay_as_they_are(interleaved: bool) -> None:
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(6, 4), torch.randn(6, 4)
    offsets = torch.tensor([4, -2], dtype=torch.int32)
    wide_cos, wide_sin = (torch.cat((torch.full((2, 4), one), t, torch.full((9, 4), one))) for one, t in ((1.0, cos), (0.0, sin)))
    parts = [rotary.apply_rotary_emb(x[b, None], wide_cos, wide_sin, interleaved, False, row) for b, row in enumerate((6, 0))]
    wanted = torch.cat(parts)
    found = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    assert torch.equal(found, wanted)
    assert torch.equal(found[0, 2:], x[0, 2:])
    assert torch.equal(found[1, :2], x[1, :2])
    packed, ends = torch.cat((x[0], x[1], x[0])), torch.tensor([0, 5, 10], dtype=torch.int32)
    found = rotary.apply_rotary_emb(packed, cos, sin, interleaved, False, offsets, ends, 5)
    assert torch.equal(found, torch.cat((wanted[0], wanted[1], x[0])))
    found = rotary.apply_rotary_emb(packed, cos, sin, interleaved, False, 1, ends, 5)
    assert torch.equal(found[10:], packed[10:])
    assert torch.equal(found[:10].view_as(x), rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=1))
    of_packed: dict[str, Any] = {"cu_seqlens": ends, "max_seqlen": 5}
    for given in ({}, of_packed):
        for offset in (2, -1):
            with pytest.raises(ArgumentError, match=rf"^seqlen_offsets must be an integer from 0 to 1; got {offset}$"):
                rotary.apply_rotary(packed if given else x, cos, sin, offset, **given)
        with pytest.raises(ArgumentError, match=r"^cos must have a row of each position, at least 5; got 4$"):
            rotary.apply_rotary(packed if given else x, cos[:4], sin[:4], offsets, **given)


def test_who_asks_for_gradients_of_inference_is_told() -> None:
    """Compiled, too, where the backward pass is traced with the forward one."""
    torch.compiler.reset()
    q, cache = torch.randn(2, 3, requires_grad=True), torch.zeros(4, 3)

    def call(q: torch.Tensor, cache: torch.Tensor) -> Any:
        out, lse = inference(lambda: (q * 2, cache.add_(1).sum(-1)), (q, None, cache))
        return out.add_(1), lse

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        cache.zero_()
        out, lse = function(q, cache)
        assert torch.equal(out, q * 2 + 1)
        assert cache.eq(1).all()
        for found in (out, lse):
            with pytest.raises(NoDerivativeError, match=r"^flashgen computes no gradients of keys in a cache "):
                torch.autograd.grad(found.sum(), q, retain_graph=True)
        with torch.no_grad():
            assert not function(q, cache)[0].requires_grad
