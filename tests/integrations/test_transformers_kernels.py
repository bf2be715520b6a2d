"""transformers' models with flashgen's kernels in the emulator, beside eager fp32 and PyTorch's attention, by the numerics rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.cache_utils import StaticCache
from transformers.masking_utils import create_masks_for_generate

import flashgen
from flashgen.integrations.transformers import NAME, register
from flashgen.integrations.transformers.calls import flashgen_attention
from tests.support.model_checks import compared, compared_tokens, judged_padding, judged_pass
from tests.support.tiny_models import ARCHITECTURES, CPU, Architecture, as_dtype, model_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda each: each.name)
def test_logits_and_gradients(architecture: Architecture) -> None:
    verdict = judged_pass(compared(architecture, CPU, "cpu"), 2, 14)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES.values() if each.generates], ids=lambda each: each.name)
def test_tokens(architecture: Architecture, cache: str) -> None:
    assert compared_tokens(compared(architecture, CPU, "cpu"), cache, 1, 9, 4) >= 1


@pytest.mark.parametrize("name", ["llama", "llama4", "bert"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_padding(name: str, grad: bool) -> None:
    verdict = judged_padding(compared(ARCHITECTURES[name], CPU, "cpu"), 2, 14, [4, 0], "left", grad)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_a_compiled_pass(name: str, grad: bool) -> None:
    """One graph, in which masks are made, too."""
    register()
    model = as_dtype(model_of(ARCHITECTURES[name], CPU), torch.bfloat16, NAME)
    inputs = ARCHITECTURES[name].inputs(CPU, 2, 14)
    torch.compiler.reset()
    with torch.set_grad_enabled(grad):
        wanted = model(**inputs, use_cache=False).logits.detach()
        compiled: Any = torch.compile(model.forward, backend="eager", fullgraph=True)
        logits = compiled(**inputs, use_cache=False).logits.detach()
    torch.testing.assert_close(logits, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_steps(name: str) -> None:
    """As `generate` has them, with masks made before and a static cache: later steps compile nothing, and know how long the cache is."""
    register()
    model = as_dtype(model_of(ARCHITECTURES[name], CPU), torch.bfloat16, NAME)
    tokens = ARCHITECTURES[name].inputs(CPU, 2, 14)["input_ids"]
    torch.compiler.reset()
    counter = CompileCounter()
    with torch.no_grad():
        wanted = model(tokens).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        model(tokens[:, :4], None, None, cache)
        step: Any = torch.compile(model.forward, backend=counter, fullgraph=True)
        frames = []
        for i in range(4, 14):
            mask = create_masks_for_generate(model.config, torch.zeros(2, 1, CPU.hidden), None, cache)
            logits = step(tokens[:, i : i + 1], mask, None, cache).logits[:, 0]
            torch.testing.assert_close(logits, wanted[:, i], rtol=0.05, atol=0.05 * float(wanted.abs().max()))
            frames.append(counter.frame_count)
    assert frames[4:] == frames[-1:] * 6, "from the step on at which a cache of a window is full"


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("rows", [True, False], ids=["views of rows", "heads first"])
def test_out_needs_no_copy_to_be_reshaped(rows: bool, length: int) -> None:
    def made(heads: int) -> torch.Tensor:
        tensor = torch.randn(2, length, heads, 16).bfloat16().transpose(1, 2)
        return (tensor if rows else tensor.contiguous()).requires_grad_()

    query, key, value = made(4), made(2), made(2)
    out, _ = flashgen_attention(torch.nn.Module(), query, key, value, None)
    assert out.shape == (2, length, 4, 16)
    assert out.is_contiguous()
    assert torch.equal(out, flashgen.attention(query, key, value, causal=True, layout="bhsd").transpose(1, 2))
    for tensor, gradient in zip((query, key, value), torch.autograd.grad(out.float().sum(), (query, key, value)), strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.transpose(1, 2).is_contiguous(), "as a layer's projection gives what it belongs to"
