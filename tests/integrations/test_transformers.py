"""transformers' interfaces with flashgen's calls in plain PyTorch and float32: which keys models of twelve architectures let queries see.

What is wrong by one key shows here. The same models with flashgen's kernels are in test_transformers_kernels.py and in tests/gpu.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.masking_utils import blockwise_overlay, causal_mask_function, create_chunked_causal_mask, or_masks

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.integrations.transformers import NAME, calls, masks, register, report
from flashgen.integrations.transformers.mask_functions import MaskParts, mask_parts
from flashgen.integrations.transformers.masks import flashgen_mask
from flashgen.integrations.transformers.prepared import PreparedMask
from tests.support import plain_calls
from tests.support.tiny_models import ARCHITECTURES, CPU, Architecture, as_dtype, model_of, of_dtype

DECODERS = [each for each in ARCHITECTURES.values() if each.is_decoder]
BATCH, LENGTH = 2, 14
# Before transformers 5.20 `generate` makes no masks of chunks for a static cache, whatever the attention.
MAKES_CHUNKS_AHEAD = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters
IN_FRONT, BEHIND, HOLE = [0] * 4 + [1] * 10, [1] * 10 + [0] * 4, [1] * 5 + [0] * 3 + [1] * 6


@pytest.fixture(autouse=True)
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    for name in ("attention", "attention_with_kvcache", "attention_varlen"):
        monkeypatch.setattr(flashgen, name, getattr(plain_calls, name))
    monkeypatch.setattr(calls, "_cast", lambda *tensors: tensors)
    report(reset=True)


_models: dict[str, Any] = {}


def models(architecture: Architecture) -> tuple[Any, Any]:
    """flashgen's and eager's, of the same weights, kept for all tests."""
    if architecture.name not in _models:
        model = model_of(architecture, CPU)
        _models[architecture.name] = tuple(as_dtype(model, torch.float32, each) for each in (NAME, "eager"))
    return _models[architecture.name]  # type: ignore[no-any-return]


def inputs_of(architecture: Architecture) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return of_dtype(architecture.inputs(CPU, BATCH, LENGTH), torch.float32)


def padded(rows: list[int]) -> Tensor:
    return torch.tensor([rows, [1] * LENGTH])


def assert_same(given: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda each: each.name)
def test_logits_and_gradients(architecture: Architecture) -> None:
    given, wanted = models(architecture)
    inputs = inputs_of(architecture)
    logits = [model(**inputs).logits for model in (given, wanted)]
    assert_same(*logits)
    weights = torch.randn_like(logits[0])
    for model, found in zip((given, wanted), logits, strict=True):
        model.zero_grad()
        (found * weights).sum().backward()
    assert sum(report().run.values()) >= CPU.layers
    most = max(float(each.grad.abs().max()) for each in wanted.parameters() if each.grad is not None)
    for (name, parameter), other in zip(given.named_parameters(), wanted.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5 * most)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("llama", {"causal": False}), ("mistral", {"window": (CPU.window, None)}), ("llama4", {"chunk": CPU.chunk + 1})],
    ids=["causal", "window", "chunk"],
)
def test_a_key_too_many_shows(name: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given, wanted = models(ARCHITECTURES[name])
    right = mask_parts

    def planted(function: Any) -> MaskParts:
        parts = right(function)
        return replace(parts, **wrong) if all(getattr(parts, part) for part in wrong) else parts

    monkeypatch.setattr(masks, "mask_parts", planted)
    inputs = inputs_of(ARCHITECTURES[name])
    with pytest.raises(AssertionError):
        assert_same(given(**inputs).logits, wanted(**inputs).logits)


@pytest.mark.parametrize("rows", [IN_FRONT, BEHIND, HOLE], ids=["left", "right", "hole"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4", "bert", "t5"])
def test_padding(name: str, grad: bool, rows: list[int]) -> None:
    given, wanted = models(ARCHITECTURES[name])
    inputs = {**inputs_of(ARCHITECTURES[name]), "attention_mask": padded(rows)}
    with torch.set_grad_enabled(grad):
        logits = [model(**inputs).logits for model in (given, wanted)]
    if "decoder_input_ids" not in inputs:
        logits = [each[padded(rows).bool()] for each in logits]
    assert_same(*logits)


@pytest.mark.parametrize("rows", [[1] * LENGTH, IN_FRONT, BEHIND], ids=["whole", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES.values() if each.generates], ids=lambda each: each.name)
def test_tokens(architecture: Architecture, cache: str, rows: list[int]) -> None:
    if rows != [1] * LENGTH and architecture.name not in ("llama", "gemma3", "llama4"):
        return
    inputs = {name: each for name, each in inputs_of(architecture).items() if "decoder" not in name}
    if architecture.is_decoder:
        inputs["attention_mask"] = padded(rows)
    more = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    if (architecture.name, cache) == ("llama4", "static") and not MAKES_CHUNKS_AHEAD:
        for model in models(architecture):
            with pytest.raises(TypeError, match="block_sequence_ids"):
                model.generate(**inputs, **more)
        return
    tokens = [model.generate(**inputs, **more).tolist() for model in models(architecture)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"num_beams": 3, "cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}])
def test_beams_and_guessed_tokens(more: dict[str, Any]) -> None:
    """Caches whose sequences change places, and steps of several tokens of which some are taken back."""
    inputs = {"input_ids": inputs_of(ARCHITECTURES["gemma3"])["input_ids"][:1]}
    own = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "disable_compile": True}
    tokens = [model.generate(**inputs, **own, **more).tolist() for model in models(ARCHITECTURES["gemma3"])]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_a_cache_longer_than_its_content(name: str, grad: bool) -> None:
    """Steps of several lengths, without a mask, in caches with room for more: of the second half what a call of all tokens gives."""
    given, wanted = models(ARCHITECTURES[name])
    tokens = inputs_of(ARCHITECTURES[name])["input_ids"]
    with torch.set_grad_enabled(grad):
        whole = wanted(tokens).logits
        for cache in (StaticCache(config=given.config, max_cache_len=32), DynamicCache(config=given.config)):
            first = given(tokens[:, :4], past_key_values=cache).logits
            parts = [first, *(given(tokens[:, i:j], past_key_values=cache).logits for i, j in ((4, 5), (5, 11), (11, 12), (12, LENGTH)))]
            assert_same(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "mistral"])
def test_packed_sequences(name: str) -> None:
    """By positions that begin anew: as eager has them, with chunks that only later versions begin anew. By boundaries: as each alone."""
    given, wanted = models(ARCHITECTURES[name])
    tokens = inputs_of(ARCHITECTURES[name])["input_ids"][:1]
    lengths = [3, 10, 1]
    alone = torch.cat([wanted(part).logits for part in tokens.split(lengths, 1)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    assert_same(*(model(tokens, position_ids=positions, use_cache=False).logits for model in (given, wanted)))
    assert set(report(reset=True).run) == {"attention"}
    ends = torch.tensor([0, 3, 13, 14], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 10, "max_length_k": 10}
    assert_same(given(tokens, position_ids=positions, **packed, use_cache=False).logits, alone)
    assert set(report().run) == {"attention_varlen"}


def test_images_and_text_in_one_sequence() -> None:
    """A mask function of a model's own, which lets tokens of an image see each other, is traced."""
    ids = torch.tensor([[-1, 0, 0, -1, 1, 1, -1, -1]])
    function = or_masks(causal_mask_function, blockwise_overlay(ids))
    made = flashgen_mask(1, 8, 8, mask_function=function, attention_mask=torch.tensor([[False] + [True] * 7]))
    assert made.function is not None
    b, h, q, k = (torch.arange(n).view(*shape) for n, shape in ((1, (1, 1, 1, 1)), (1, (1, 1, 1, 1)), (8, (8, 1)), (8, (1, 8))))
    seen = made.function(b, h, q, k)[0, 0]
    expected = (k <= q) | ((ids[0][:, None] == ids[0]) & (ids[0][:, None] >= 0))
    assert torch.equal(seen, expected & (k > 0))


def test_nothing_grows_with_both_lengths() -> None:
    whole = flashgen_mask(2, 64, 64, attention_mask=torch.ones(2, 64, dtype=torch.bool))
    assert not any(isinstance(each, Tensor) for each in vars(whole).values())
    rows = padded(IN_FRONT).bool()
    with torch.no_grad():
        step = flashgen_mask(2, 1, 32, torch.tensor(20), attention_mask=rows)
    for made in (flashgen_mask(2, LENGTH, LENGTH, attention_mask=rows), step):
        assert max(each.numel() for each in vars(made).values() if isinstance(each, Tensor)) <= made.shape[0] * made.shape[3]


def test_a_mask_made_before_is_taken_as_it_is() -> None:
    given, wanted = models(ARCHITECTURES["llama"])
    inputs = inputs_of(ARCHITECTURES["llama"])
    made = flashgen_mask(BATCH, LENGTH, LENGTH)
    assert_same(given(**inputs, attention_mask=made).logits, wanted(**inputs).logits)
    assert isinstance(made.to("cpu"), PreparedMask)
    with pytest.raises(ArgumentError, match="no elements"):
        made[:, :, :, :3]


@pytest.mark.parametrize("numbers", [False, True], ids=["bool", "numbers"])
def test_a_mask_of_four_dimensions_says_all(numbers: bool) -> None:
    given, wanted = models(ARCHITECTURES["llama"])
    inputs = inputs_of(ARCHITECTURES["llama"])
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.5
    seen[..., 0] = True
    added = torch.zeros(seen.shape, dtype=torch.float32).masked_fill(~seen, -1e4)
    logits = wanted(**inputs, attention_mask=added).logits
    assert_same(given(**inputs, attention_mask=added if numbers else seen).logits, logits)


def test_gradients_of_layers_that_are_computed_again() -> None:
    given, wanted = models(ARCHITECTURES["gemma3"])
    inputs = inputs_of(ARCHITECTURES["gemma3"])
    for again in (True, False):
        given.gradient_checkpointing_enable({"use_reentrant": again})
        for model in (given, wanted):
            model.zero_grad()
            model.train()
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
            model.eval()
        given.gradient_checkpointing_disable()
        for parameter, other in zip(given.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5)


def refused(match: str, *, query: Tensor | None = None, mask: Any = None, **keywords: Any) -> None:
    q = torch.randn(2, 4, 3, 16, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=match):
        calls.flashgen_attention(torch.nn.Module(), q if query is None else query, q, q, mask, **keywords)


def test_refusals() -> None:
    ends = {"cu_seq_lens_q": torch.zeros(2), "cu_seq_lens_k": torch.zeros(2)}
    refused("^output_attentions must be left out", output_attentions=True)
    refused("^head_mask must be left out", head_mask=torch.ones(4))
    refused("^strange must be left out: flashgen does not know", strange=3)
    refused("^cu_seq_lens_q and cu_seq_lens_k must be given together", cu_seq_lens_q=torch.zeros(2))
    refused("^cu_seq_lens_q must come with a batch of 1", **ends)
    refused("^attention_mask must be of the layer's queries and keys, 3 and 3", mask=PreparedMask((2, 1, 3, 7)))
    refused("^attention_mask must be a tensor", mask=torch.ones(2, 3, dtype=torch.bool))
    refused("^attention_mask must be a tensor .* got str", mask="causal")
    refused("^cu_seq_lens_q must come without an attention_mask", mask=torch.ones(2, 1, 3, 3, dtype=torch.bool), **ends)
    refused("^dropout must be 0", mask=PreparedMask((2, 1, 3, 3), causal=True, cached=True), dropout=0.5)
    assert report().refused["output_attentions"] == 1
    assert not report().run
    with pytest.raises(ArgumentError, match=r"^mask interface must get .* knows; got strange"):
        flashgen_mask(1, 2, 2, strange=1)


def test_what_models_refuse() -> None:
    given, _ = models(ARCHITECTURES["llama"])
    with pytest.raises(ArgumentError, match="output_attentions"):
        given(torch.ones(1, 3, dtype=torch.int64), output_attentions=True)


def test_a_layer_without_a_mask() -> None:
    """The last query is at the last key, one query sees all keys, and a window has its query in it."""
    q, k = torch.randn(1, 2, 1, 8, dtype=torch.float32), torch.randn(1, 2, 9, 8, dtype=torch.float32)
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    out, probabilities = calls.flashgen_attention(module, q, k, k, None)
    assert probabilities is None
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    assert_same(out, wanted)
    out, _ = calls.flashgen_attention(module, q, k, k, None, sliding_window=3)
    assert_same(out, torch.nn.functional.scaled_dot_product_attention(q, k[:, :, -3:], k[:, :, -3:]).transpose(1, 2))


def test_float32_needs_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    refused("^query must be bfloat16 or float16", query=torch.randn(2, 4, 3, 16))
    monkeypatch.setattr(flashgen, "attention", plain_calls.attention)
    q = torch.randn(1, 2, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = calls.flashgen_attention(torch.nn.Module(), q, q, q, None, is_causal=False)
    assert out.dtype == torch.bfloat16


def test_the_name_is_no_other_implementation() -> None:
    """A name with one of these in it would be taken for another implementation, or be refused."""
    assert not [each for each in ("flash", "sdpa", "flex_attention", "eager", "paged", "/") if each in NAME]
    model = transformers.GptOssForCausalLM  # which has a list of what may take the place of FlashAttention
    assert model._compatible_flash_implementations
    assert models(ARCHITECTURES["gpt_oss"])[0].config._attn_implementation == NAME
