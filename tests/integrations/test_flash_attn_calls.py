"""FlashAttention's functions by flashgen, on CPU tensors: packed sequences, dropout, caches, and the functions below autograd."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.integrations import flash_attn as fa
from flashgen.integrations.flash_attn import flash_attn_3_interface, flash_attn_interface, primitives, rotary
from flashgen.operators.gradients import NoDerivativeError

from .test_flash_attn import close, drawn, exact

pytestmark = pytest.mark.slow
ENDS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
ENDS_K = torch.tensor([0, 9, 12, 30], dtype=torch.int32)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.manual_seed(12)


def sequences(q: torch.Tensor, k: torch.Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(pairwise(ENDS.tolist()), pairwise(ENDS_K.tolist()), strict=True)
    return [(slice(*of_q), slice(*of_k)) for of_q, of_k in pairs]


def test_packed_sequences_with_dropout_and_gradients() -> None:
    q, kv = drawn(20, 2, 16).requires_grad_(), drawn(30, 2, 2, 16).requires_grad_()
    given: dict[str, Any] = {"dropout_p": 0.3, "window_size": (4, 3), "return_attn_probs": True}
    out, lse, s_dmask = fa.flash_attn_varlen_kvpacked_func(q, kv, ENDS, ENDS_K, 13, 18, **given)
    assert s_dmask.shape == (3, 2, 13, 18)
    assert flash_attn_interface._get_block_size_n(q.device, 16, True, False) > 18
    doubles, into = [t.detach().double().requires_grad_() for t in (q, kv)], torch.randn(20, 2, 16)
    parts = []
    for b, (of_q, of_k) in enumerate(sequences(q, kv)):
        own, (k, v) = doubles[0][None, of_q], doubles[1][None, of_k].unbind(2)
        signed = s_dmask[b, None, :, : own.shape[1], : k.shape[1]]
        if not own.numel():
            assert not s_dmask[b].any()
            continue
        wanted, of_rows = exact(own, k, v, window=(4, 3), kept=~torch.signbit(signed), p=0.3)
        assert torch.allclose(lse[:, of_q].double(), of_rows[0], atol=1e-3)
        s = torch.einsum("bqhd,bkhd->bhqk", own, k) / 4
        p = (s.masked_fill(signed == 0, -torch.inf) - of_rows[..., None]).exp()
        row_max = s.masked_fill(signed == 0, -torch.inf).amax(-1, keepdim=True)
        assert close(signed.abs() * (row_max - of_rows[..., None]).exp(), p)
        parts.append(wanted[0])
    wanted = torch.cat(parts)
    assert close(out, wanted)
    gradients = torch.autograd.grad(out, (q, kv), into.bfloat16()), torch.autograd.grad(wanted, doubles, into.bfloat16().double())
    assert all(close(*both) for both in zip(*gradients, strict=True))


def test_functions_below_autograd_give_what_autograd_gives() -> None:
    q, k, v = (drawn(2, 9, 2, 8).requires_grad_() for _ in "qkv")
    torch.manual_seed(3)
    with torch.no_grad():
        out, lse, nothing, state = primitives._flash_attn_forward(q, k, v, 0.25, 0.4, True)
    assert (nothing.numel(), state.shape, state.dtype) == (0, (2,), torch.int64)
    torch.manual_seed(3)
    wanted, wanted_lse, _ = fa.flash_attn_func(q, k, v, 0.25, 0.4, True, return_attn_probs=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    into = torch.randn_like(out)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    before = torch.get_rng_state()
    with torch.no_grad():
        d_q, d_k, d_v = gradients
        primitives._flash_attn_backward(into, q, k, v, out, lse, d_q, d_k, d_v, 0.25, 0.4, True, rng_state=state)
        for wrong, message in (
            ({"rng_state": None}, "rng_state must be what the forward function gave, where dropout_p is 0.25; got None"),
            ({"rng_state": state[:1]}, "rng_state must be .* of the shape .2,.; got torch.int64 of the shape .1,."),
            ({"dq": d_q[None].repeat(2, 1, 1, 1, 1)}, "dq must have the shape"),
            ({"softmax_lse": lse[..., :8]}, "softmax_lse must have the shape"),
            ({"dout": into[:, :8]}, "dout must have the shape"),
        ):
            given = {"dout": into, "softmax_lse": lse, "dq": d_q, "rng_state": state, **wrong}
            others = {"q": q, "k": k, "v": v, "out": out, "dk": d_k, "dv": d_v, "dropout_p": 0.25, "softmax_scale": 0.4, "causal": True}
            with pytest.raises(ArgumentError, match=f"^{message}"):
                primitives._flash_attn_backward(**others, **given)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*both) for both in zip(gradients, torch.autograd.grad(wanted, (q, k, v), into), strict=True))
    gpu = flash_attn_interface.flash_attn_gpu
    with torch.no_grad():
        torch.manual_seed(3)
        again = gpu.fwd(q, k, v, None, None, 0.25, 0.4, True, -1, -1, 0.0, False, None)
        others = gpu.bwd(into, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), None, 0.25, 0.4, True, -1, -1, 0.0, False, None, state)
    assert torch.equal(again[0], out)
    assert all(torch.equal(*both) for both in zip(gradients, others[:3], strict=True))


def test_packed_functions_below_autograd() -> None:
    q, k, v = (drawn(tokens, 2, 16).requires_grad_() for tokens in (20, 30, 30))
    gpu, options = flash_attn_interface.flash_attn_gpu, (0.3, 0.25, False, False, 4, 3, 0.0)
    with torch.no_grad():
        torch.manual_seed(4)
        out, lse, _, state = gpu.varlen_fwd(q, k, v, None, ENDS, ENDS_K, None, None, None, None, 13, 18, *options, False, None)
        into, empty = torch.randn_like(out), [torch.empty_like(t) for t in (q, k, v)]
        gpu.varlen_bwd(into, q, k, v, out, lse, *empty, ENDS, ENDS_K, None, 13, 18, *options, False, None, state)
    torch.manual_seed(4)
    wanted = fa.flash_attn_varlen_func(q, k, v, ENDS, ENDS_K, 13, 18, 0.3, 0.25, window_size=(4, 3))
    assert torch.equal(wanted, out)
    assert all(torch.equal(*both) for both in zip(empty, torch.autograd.grad(wanted, (q, k, v), into), strict=True))


@pytest.mark.parametrize("width", [12, 16])
def test_keys_are_added_and_rotated(width: int) -> None:
    q, new_k, new_v = (drawn(2, 3, heads, width) for heads in (4, 2, 2))
    caches, lengths = [drawn(2, 24, 2, width) for _ in "kv"], torch.tensor([5, 17], dtype=torch.int32)
    angles = torch.rand(24, 4) * 6
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    wanted = [cache.clone() for cache in caches]
    turned = [rotary.apply_rotary_emb(t, *tables, True, seqlen_offsets=lengths) for t in (q, new_k)]
    for b, length in enumerate(lengths.tolist()):
        wanted[0][b, length : length + 3], wanted[1][b, length : length + 3] = turned[1][b], new_v[b]
    given: dict[str, Any] = {"rotary_cos": tables[0], "rotary_sin": tables[1], "cache_seqlens": lengths, "causal": True}
    given |= {"num_splits": 1, "return_softmax_lse": True}
    out, lse = fa.flash_attn_with_kvcache(q, caches[0], caches[1], new_k, new_v, **given)
    assert all(close(*both) for both in zip(caches, wanted, strict=True))
    for b, length in enumerate(lengths.tolist()):
        keys = slice(length + 3)
        of_one, of_rows = exact(turned[0][b : b + 1], wanted[0][b : b + 1, keys], wanted[1][b : b + 1, keys], causal=True)
        assert close(out[b : b + 1], of_one)
        assert torch.allclose(lse[b : b + 1].double(), of_rows, atol=0.03)


def test_packed_queries_on_pages() -> None:
    q, slopes = drawn(20, 4, 16), torch.rand(3, 4)
    pages, table = [drawn(12, 8, 2, 16) for _ in "kv"], torch.randperm(12, dtype=torch.int32).reshape(3, 4)
    given: dict[str, Any] = {"causal": True, "window_size": (9, -1), "alibi_slopes": slopes, "return_attn_probs": True}
    k_leaf = pages[0].requires_grad_()
    out, lse, nothing = fa.flash_attn_varlen_func(q, k_leaf, pages[1], ENDS, ENDS_K, 13, 18, block_table=table, **given)
    assert (out.shape, lse.shape, nothing.numel()) == (q.shape, (4, 20), 0)
    for b, (of_q, of_k) in enumerate(sequences(q, q)):
        k, v = (page.detach()[table[b].long()].flatten(0, 1)[None, : of_k.stop - of_k.start] for page in pages)
        if of_q.stop > of_q.start:
            wanted, of_rows = exact(q[None, of_q], k, v, causal=True, window=(9, -1), slopes=slopes[b])
            assert close(out[of_q], wanted[0])
            assert torch.allclose(lse[:, of_q].double(), of_rows[0], atol=1e-3)
    with pytest.raises(NoDerivativeError, match="flashgen computes no gradients of keys in a cache"):
        out.float().sum().backward()
    with torch.no_grad():
        cached: dict[str, Any] = {"cache_seqlens": ENDS_K.diff(), "page_table": table, "cu_seqlens_q": ENDS, "max_seqlen_q": 13}
        same = flash_attn_3_interface.flash_attn_with_kvcache(q, pages[0], pages[1], **cached, causal=True, window_size=(9, -1))
        plain = fa.flash_attn_varlen_func(q, pages[0], pages[1], ENDS, ENDS_K, 13, 18, 0.0, None, True, (9, -1), block_table=table)
        assert torch.equal(same, plain)
        empty = fa.flash_attn_varlen_func(q[:0], pages[0], pages[1], 0 * ENDS, ENDS_K, 0, 18, block_table=table)
        assert empty.shape == (0, 4, 16)


def test_calls_are_compiled_whole() -> None:
    torch.compiler.reset()
    q, k, v = (drawn(2, 9, 2, 11) for _ in "qkv")
    cache, lengths = [drawn(2, 24, 2, 16) for _ in "kv"], torch.tensor([5, 17], dtype=torch.int32)
    packed = [drawn(tokens, 2, 16) for tokens in (20, 30, 30)]

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return fa.flash_attn_varlen_func(q, k, v, ENDS, ENDS_K, 13, 18, window_size=(4, 3))

    def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attn_3_interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)

    with torch.no_grad():
        for call, given in ((dense, (q, k, v)), (varlen, packed), (cached, (drawn(2, 3, 4, 16), *cache))):
            found, wanted = torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given)
            assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    q, k, v = drawn(2, 3, 4, 16).requires_grad_(), *cache
    found, wanted = torch.compile(cached, fullgraph=True, backend="aot_eager")(q, k, v), cached(q, k, v)
    assert torch.equal(found, wanted)
    with pytest.raises(NoDerivativeError, match="flashgen computes no gradients of keys in a cache"):
        found.sum().backward()
    q, k, v = (drawn(2, 9, 2, 11) for _ in "qkv")
    with pytest.raises(ArgumentError, match=r"^q must be torch.bfloat16 or torch.float16; got torch.float32$"):
        torch.compile(dense, backend="aot_eager")(q.float(), k.float(), v.float())
