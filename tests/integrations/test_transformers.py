"""transformers' interfaces with flashgen's calls in plain PyTorch and float32: which keys models of twelve architectures let queries see.

What is wrong by one key shows here. The same models with flashgen's kernels are in test_transformers_kernels.py and in tests/gpu.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    create_chunked_causal_mask,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

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


@pytest.mark.parametrize(
    "rows",
    [pytest.param([1] * LENGTH, marks=pytest.mark.slow), IN_FRONT, pytest.param(BEHIND, marks=pytest.mark.slow)],
    ids=["whole", "left", "right"],
)
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


@pytest.mark.slow
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


ASKED_OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    "elements": lambda mask: mask[:, :, :, :3],
    "queries in front": lambda mask: mask[:, :, :3, :],
    "dtype": lambda mask: mask.dtype,
    "expand": lambda mask: mask.expand(2, 1, 3, 3),
    "numel": lambda mask: mask.numel(),
    "sparsity": lambda mask: mask.sparsity(),
    "!=": lambda mask: mask != 0,
    "1 -": lambda mask: 1.0 - mask,
    "tensor +": lambda mask: torch.ones(3) + mask,
    "where": lambda mask: torch.where(mask, 0.0, 1.0),
    "iter": list,
}


@pytest.mark.parametrize("asked", ASKED_OF_TENSORS.values(), ids=ASKED_OF_TENSORS)
def test_a_mask_is_no_tensor(asked: Callable[[Any], Any]) -> None:
    mask = PreparedMask((2, 1, 8, 8), causal=True)
    with pytest.raises(ArgumentError, match=r"^attention_mask must not be asked for .* attn_implementation='sdpa'"):
        asked(mask)
    assert report().refused == {"attention_mask": 1}
    assert not hasattr(mask, "dtype")
    assert mask == mask
    assert mask != PreparedMask((2, 1, 8, 8), causal=True)


@pytest.mark.parametrize("first", [0, 5, 7])
def test_a_mask_of_the_last_queries(first: int) -> None:
    """Of one made by numbers of documents, and of one made by a function: what these queries see in the mask of all."""
    ids, q = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]]), torch.randn(1, 2, 8, 8)
    for mask in (PreparedMask((1, 1, 8, 8), causal=True, document_ids=ids), PreparedMask((1, 1, 8, 8), function=lambda b, h, i, j: j <= i)):
        whole, _ = calls.flashgen_attention(torch.nn.Module(), q, q, q, mask)
        part, _ = calls.flashgen_attention(torch.nn.Module(), q[:, :, first:], q, q, mask[:, :, slice(first - 8, None), :])
        assert_same(part, whole[:, first:])
    ends: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 8])}
    if first:
        with pytest.raises(ArgumentError, match=r"^cu_seq_lens_q must be of the layer's queries, .* logits_to_keep=0"):
            calls.flashgen_attention(torch.nn.Module(), q[:, :, first:], q, q, mask[:, :, slice(first - 8, None), :], **ends)


@pytest.mark.parametrize("rows", [pytest.param([1] * LENGTH, marks=pytest.mark.slow), IN_FRONT], ids=["whole", "left"])
def test_layers_of_the_last_queries(rows: list[int]) -> None:
    """Gemma 4's layers that take keys of others compute only the queries whose logits are kept."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    heads = {"head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 2, "sliding_window": 5}
    tokens: dict[str, Any] = {"vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
    kinds = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(0)
    model: Any = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, **heads, **tokens, layer_types=kinds)).eval()
    inputs = {"input_ids": torch.randint(3, 97, (BATCH, LENGTH)), "attention_mask": padded(rows)}
    more = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    found = []
    for name in (NAME, "sdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append((model.generate(**inputs, **more).tolist(), model(**inputs, logits_to_keep=3).logits))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert not report().refused


def test_a_model_whose_layers_drop_masks_is_refused() -> None:
    """A layer of Doge keeps no mask in its own but a tensor: its attention would not be causal. One of a user's it keeps."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model: Any = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes, vocab_size=97, hidden_dropout=0.0)).eval()
    tokens = torch.randint(3, 97, (1, 12))
    model.set_attn_implementation("eager")  # to sdpa transformers 5.17 gives no mask, and Doge's layers are not causal either
    wanted = model(tokens).logits
    model.set_attn_implementation(NAME)
    with pytest.raises(ArgumentError, match=r"^attn_implementation must be 'sdpa' or 'eager' for doge"):
        model(tokens)
    assert report().refused == {"attn_implementation": 1}
    assert_same(model(tokens, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()).logits, wanted)


def test_no_model_of_transformers_but_those_refused_knows_block_masks() -> None:
    """What a layer does with a mask that is a BlockMask and no tensor is to be read in those that ask for it."""
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    found = {file.parent.name for file in files if re.search(r"isinstance\([^)]*\bBlockMask\b", file.read_text(encoding="utf-8"))}
    assert found <= masks._DROPS_BLOCK_MASKS


def test_gradients_of_biases_that_must_be_deterministic_are_refused() -> None:
    """In the forward pass, which has names for it."""
    model = models(ARCHITECTURES["t5"])[0]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ArgumentError, match=r"^position_bias must need no gradient under torch\.use_deterministic_algorithms"):
            model(**inputs_of(ARCHITECTURES["t5"]))
        with torch.no_grad():
            model(**inputs_of(ARCHITECTURES["t5"]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert report().refused == {"position_bias": 1}


@pytest.mark.parametrize("rows", [[1] * LENGTH, IN_FRONT, HOLE], ids=["whole", "left", "hole"])
def test_padding_is_asked_once_for_each_mask(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    def counted(name: str) -> Callable[[Tensor], Any]:
        own = getattr(Tensor, name)

        def asked(tensor: Tensor) -> Any:
            waits.append(name)
            return own(tensor)

        return asked

    for name in ("__bool__", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, counted(name))
    flashgen_mask(BATCH, LENGTH, LENGTH, attention_mask=padded(rows).bool())
    assert waits == ["tolist"]


@pytest.mark.parametrize("version", ["5.16.3", "6.0.0.dev0"])
def test_versions_are_asked_before_anything_of_theirs(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # a lazy module, of which there may be an older one
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match=rf"needs transformers 5\.17 or newer, below 6; this is {version}"):
        register()


def test_what_flashgen_itself_refuses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q = torch.randn(1, 2, 3, 12, dtype=torch.bfloat16)
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    with pytest.raises(ArgumentError, match=r"^head_dim must be a multiple of 8"):
        calls.flashgen_attention(torch.nn.Module(), q, q, q, None)
    assert report(reset=True) == ({}, {"head_dim": 1})
    q = q[..., :8].contiguous()
    mask, sinks = torch.ones(1, 2, 3, 3, dtype=torch.int64), torch.ones(3, dtype=torch.bfloat16)
    for keywords, message in (
        ({"attention_mask": mask}, "attention_mask must be torch.bfloat16.*; got torch.int64"),
        ({"attention_mask": mask[..., :2] == 1}, "attention_mask must have the shape"),
        ({"attention_mask": None, "position_bias": mask}, "position_bias must be torch.bfloat16"),
        ({"attention_mask": mask > 0, "position_bias": mask}, "position_bias must be torch.bfloat16"),
        ({"attention_mask": mask, "position_bias": mask}, "attention_mask must be bool where .*; got torch.int64"),
        ({"attention_mask": None, "s_aux": sinks}, "s_aux must have the shape"),
        ({"attention_mask": None, "scaling": -1.0}, "scaling must be from"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}"):
            calls.flashgen_attention(torch.nn.Module(), q, q, q, **keywords)
    assert report() == ({}, {"attention_mask": 3, "position_bias": 2, "s_aux": 1, "scaling": 1})


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
    refused("^sliding_window must be a whole number of keys, of type int, or None for no window; got 5.5$", sliding_window=5.5)
    refused("^sliding_window must be a whole number .*; got '5'$", sliding_window="5", is_causal=False)
    refused("^dropout must be 0", mask=PreparedMask((2, 1, 3, 3), causal=True, cached=True), dropout=0.5)
    assert report().refused["output_attentions"] == 1
    assert not report().run
    with pytest.raises(ArgumentError, match=r"^mask interface must get .* knows; got strange"):
        flashgen_mask(1, 2, 2, strange=1)


def test_deterministic_gradients_are_asked_for_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def call(q: Tensor, *_: Any, deterministic: Any = None, **__: Any) -> Tensor:
        asked.append(deterministic)
        return q

    for name in ("attention", "attention_with_kvcache", "attention_varlen"):
        monkeypatch.setattr(flashgen, name, call)
    q, ends = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16), torch.tensor([0, 3])
    packed: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    for options, mask in (({}, None), (packed, None), ({}, PreparedMask((1, 1, 3, 3), causal=True, cached=True))):
        for deterministic in (True, False, None):
            calls.flashgen_attention(torch.nn.Module(), q, q, q, mask, deterministic=deterministic, **options)
    assert asked == [True, None, None] * 2 + [None] * 3


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


def test_windows_are_whole_numbers_of_keys() -> None:
    """transformers would make a mask of half a key; what Python takes for an index is one here, too."""
    for function, ends in ((sliding_window_causal_mask_function, (4, None)), (sliding_window_bidirectional_mask_function, (5, 5))):
        assert flashgen_mask(1, 3, 3, mask_function=function(np.int64(5))).window == ends
        with pytest.raises(ArgumentError, match=r"^sliding_window must be a whole number of keys, .*; got 5\.5$"):
            flashgen_mask(1, 3, 3, mask_function=function(5.5))
        assert report(reset=True).refused == {"sliding_window": 1}


def test_float32_needs_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    refused("^query, key and value must be bfloat16 or float16", query=torch.randn(2, 4, 3, 16))
    monkeypatch.setattr(flashgen, "attention", plain_calls.attention)
    q = torch.randn(1, 2, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = calls.flashgen_attention(torch.nn.Module(), q, q, q, None, is_causal=False)
        masks_of = PreparedMask((1, 1, 3, 3)), PreparedMask((1, 1, 3, 3), causal=True, cached=True, lengths=torch.tensor([3]))
        monkeypatch.setattr(flashgen, "attention_with_kvcache", plain_calls.attention_with_kvcache)
        for mask in masks_of:
            with torch.no_grad():
                mixed, _ = calls.flashgen_attention(torch.nn.Module(), q.bfloat16(), q, q.bfloat16(), mask)
            assert mixed.dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16


def test_the_name_is_no_other_implementation() -> None:
    """A name with one of these in it would be taken for another implementation, or be refused."""
    assert not [each for each in ("flash", "sdpa", "flex_attention", "eager", "paged", "/") if each in NAME]
    model = transformers.GptOssForCausalLM  # which has a list of what may take the place of FlashAttention
    assert model._compatible_flash_implementations
    assert models(ARCHITECTURES["gpt_oss"])[0].config._attn_implementation == NAME
