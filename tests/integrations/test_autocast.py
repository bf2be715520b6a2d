"""torch.autocast: which dtypes calls compute in, as PyTorch's own attention does."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen import api, kvcache, varlen
from tests.support.plain_kernels import plain_in_place_of_kernels

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_in_place_of_kernels(monkeypatch)


def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 9, 2, 16, generator=generator).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (FP32, FP32, BF16), (BF16, FP16, FP32)], ids=str)
def test_autocast_casts_what_has_no_one_dtype_of_16_bits(dtypes: tuple[torch.dtype, ...]) -> None:
    q, k, v = tensors(*dtypes)
    with torch.autocast("cpu", dtype=BF16):
        out = flashgen.attention(q, k, v)
    assert torch.equal(out, flashgen.attention(q.to(BF16), k.to(BF16), v.to(BF16)))
    with pytest.raises(flashgen.ArgumentError, match="must"):
        flashgen.attention(q, k, v)


def test_autocast_casts_as_pytorchs_attention_does() -> None:
    q, k, v = tensors(FP32, FP32, FP32)
    with torch.autocast("cpu", dtype=BF16):
        theirs = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        ours = flashgen.attention(q, k, v)
    assert ours.dtype == theirs.dtype == BF16
    assert (ours.float() - theirs.transpose(1, 2).float()).abs().max() < 0.02


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_with_kvcache"])
def test_nobody_plans_on_a_gpu_what_is_to_be_cast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, where a call goes past the dispatcher."""
    told: list[list[torch.dtype]] = []
    where = torch.tensor([0, 9], dtype=torch.int32)
    modules = {"attention": api, "attention_varlen": varlen, "attention_with_kvcache": kvcache}
    operator = {"attention": "attention_output", "attention_varlen": "attention_varlen_output"}.get(name, "attention_cached_output")
    q, k, v = tensors(FP32, FP32, BF16)
    given, more = [q, k, v], {}
    if name == "attention_varlen":
        given, more = [q[0], k[0], v[0]], {"cu_seqlens_q": where, "cu_seqlens_kv": where}
    elif name == "attention_with_kvcache":  # caches are not cast
        given, more = [q, k.to(BF16), v], {"cache_seqlens": where[1:]}
    monkeypatch.setattr(modules[name], operator, lambda *given: told.append([one.dtype for one in given[:3]]))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: BF16)
    getattr(flashgen, name)(*given, **more)
    assert told == [[BF16] * 3]


def test_gradients_have_the_dtypes_of_what_is_cast() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(FP32, FP32, BF16))
    with torch.autocast("cpu", dtype=BF16):
        flashgen.attention(q, k, v, causal=True).float().square().sum().backward()
    assert [t.grad.dtype for t in (q, k, v) if t.grad is not None] == [FP32, FP32, BF16]


def test_one_dtype_of_16_bits_is_the_callers_choice() -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert flashgen.attention(*tensors(FP16, FP16, FP16)).dtype == FP16


def test_fp64_is_refused_under_autocast_too() -> None:
    with torch.autocast("cpu", dtype=BF16), pytest.raises(flashgen.ArgumentError, match="float64"):
        flashgen.attention(*tensors(torch.float64, torch.float64, torch.float64))


@pytest.mark.slow
def test_packed_sequences_and_caches_are_cast_as_well() -> None:
    q, k, v = tensors(FP32, FP32, FP32)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.autocast("cpu", dtype=BF16):
        packed = flashgen.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        cached = flashgen.attention_with_kvcache(q[:, :1], k.to(BF16), v.to(BF16))
    assert packed.dtype == cached.dtype == BF16


def test_compiled_calls_cast_as_well() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return flashgen.attention(q, k, v)

    given = tensors(FP32, FP32, BF16)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))
