"""transformers' models of twelve architectures on a GPU: logits, gradients and 64 greedy tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_chunked_causal_mask

from tests.support.model_checks import KEYS, Compared, compared, compared_tokens, judged, judged_padding, judged_pass
from tests.support.tiny_models import ARCHITECTURES, GPU

pytestmark = pytest.mark.gpu

TOKENS = 64
# Before transformers 5.20 `generate` makes no masks of chunks for a static cache, whatever the attention.
MAKES_CHUNKS_AHEAD = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters


def of_architectures(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("each", [ARCHITECTURES[name] for name in names], ids=names, indirect=True)


@pytest.fixture(scope="module")
def each(request: pytest.FixtureRequest) -> Iterator[Compared]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield compared(request.param, GPU, "cuda")
    torch.set_float32_matmul_precision(precision)


@of_architectures(*ARCHITECTURES)
def test_logits_and_gradients(each: Compared) -> None:
    verdict = judged_pass(each, 3, 150)
    assert verdict.ok, verdict.message


@of_architectures(*(name for name, each in ARCHITECTURES.items() if each.generates))
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens(each: Compared, cache: str) -> None:
    batch = 8
    if (each.architecture.name, cache) == ("llama4", "static") and not MAKES_CHUNKS_AHEAD:
        with pytest.raises(TypeError, match="block_sequence_ids"):
            compared_tokens(each, cache, batch, 100, TOKENS)
        return
    agreed = compared_tokens(each, cache, batch, 100, TOKENS)
    print(f"{each.architecture.name}, {cache}: {agreed} of {batch * TOKENS} tokens compared")
    assert agreed >= batch


@of_architectures("llama", "gemma2", "llama4", "bert", "t5")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_padding(each: Compared, grad: bool, side: str) -> None:
    verdict = judged_padding(each, 3, 150, [70, 0, 13], side, grad)
    assert verdict.ok, verdict.message


@of_architectures("llama", "gemma3")
def test_compiled_steps(each: Compared) -> None:
    """generate compiles steps with a static cache, whose masks are made before: the same logits as long as tokens are the same."""
    inputs: dict[str, Any] = each.inputs("given", 4, 100)
    more = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
    told = {"return_dict_in_generate": True, "output_logits": True}
    made = [each.models["given"].generate(**inputs, **more, **told, disable_compile=disable) for disable in (True, False)]
    logits = [torch.stack(one.logits, 1).float() for one in made]
    tokens = [one.sequences[:, 100:] for one in made]
    same = (tokens[0] == tokens[1]).long().cumprod(1).bool()
    alike = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)  # of a token those before it count
    assert int(alike.sum()) >= 24
    torch.testing.assert_close(logits[0][alike], logits[1][alike], rtol=0.05, atol=0.05 * float(logits[0].abs().max()))


@of_architectures("llama", "gemma3")
def test_packed_sequences(each: Compared) -> None:
    lengths = [40, 1, 109]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    ends = torch.tensor([0, 40, 41, 150], dtype=torch.int32, device="cuda")
    packed: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 109, "max_length_k": 109}
    found: dict[str, dict[str, Tensor]] = {}
    for key in KEYS:
        model, tokens = each.models[key], each.inputs(key, 1, 150)["input_ids"]
        if key == "given":
            logits = [model(tokens, position_ids=positions, use_cache=False, **ways).logits for ways in ({}, packed)]
        else:
            logits = [torch.cat([model(part).logits for part in tokens.split(lengths, 1)], 1)] * 2
        found[key] = {name: given.detach() for name, given in zip(("by positions", "by boundaries"), logits, strict=True)}
    verdict = judged(found)
    assert verdict.ok, verdict.message


@of_architectures("llama")
def test_a_step_with_a_static_cache_waits_for_nobody(each: Compared) -> None:
    """A graph of one step is captured, which a wait would end, and replays with the lengths of later steps."""
    from transformers import StaticCache

    model, tokens = each.models["given"], each.inputs("given", 2, 100)["input_ids"]
    with torch.no_grad():
        wanted = model(tokens).logits
        cache: Any = StaticCache(config=model.config, max_cache_len=128)
        step = tokens[:, 60:61].clone()
        model(tokens[:, :60], None, None, cache)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(step, None, None, cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(step, None, None, cache).logits
        for layer in cache.layers:
            layer.cumulative_length.fill_(60)
        for i in range(60, 100):
            step.copy_(tokens[:, i : i + 1])
            graph.replay()
            torch.testing.assert_close(logits[:, 0], wanted[:, i], rtol=0.05, atol=0.05 * float(wanted.abs().max()))
