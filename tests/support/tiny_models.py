"""Tiny random models of transformers, of twelve architectures, and what they are called with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor


class Sizes(NamedTuple):
    """Of a model: what differs between tests on the CPU and on a GPU."""

    head_dim: int = 16
    heads: int = 4
    heads_kv: int = 2
    layers: int = 2
    window: int = 6  # keys that a query of a sliding layer sees
    chunk: int = 5
    vocabulary: int = 96
    positions: int = 512

    @property
    def hidden(self) -> int:
        return self.head_dim * self.heads


CPU, GPU = Sizes(), Sizes(head_dim=64, heads=8, heads_kv=2, window=48, chunk=40)


class Architecture(NamedTuple):
    """`build`: a model with its configuration's own random weights; `inputs`: batch and length, on the CPU; `plain`: PyTorch's attention
    that transformers lets it have; `generates`: whether it makes tokens."""

    name: str
    build: Callable[[Sizes], Any]
    inputs: Callable[[Sizes, int, int], dict[str, Tensor]]
    plain: str = "sdpa"
    generates: bool = True
    is_decoder: bool = True  # and no more than that


def _decoder(sizes: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads_kv,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.positions,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }


def _alternating(sizes: Sizes, other: str) -> list[str]:
    return [other if i % 2 == 0 else "full_attention" for i in range(sizes.layers)]


def _llama(s: Sizes) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_decoder(s)))


def _mistral(s: Sizes) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_decoder(s, sliding_window=s.window)))


def _gemma2(s: Sizes) -> Any:
    more = {"sliding_window": s.window, "layer_types": _alternating(s, "sliding_attention"), "attn_logit_softcapping": 3.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_decoder(s, query_pre_attn_scalar=s.head_dim, **more)))


def _gemma3(s: Sizes) -> Any:
    more = {"sliding_window": s.window, "layer_types": _alternating(s, "sliding_attention"), "query_pre_attn_scalar": s.head_dim}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_decoder(s, **more)))


def _gpt_oss(s: Sizes) -> Any:
    more = {"sliding_window": s.window, "layer_types": _alternating(s, "sliding_attention")}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}  # all of them: rounding chooses none
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**_decoder(s, **more, **experts)))


def _llama4(s: Sizes) -> Any:
    more = {"attention_chunk_size": s.chunk, "layer_types": _alternating(s, "chunked_attention"), "intermediate_size_mlp": 2 * s.hidden}
    more |= {"no_rope_layers": [1 if i % 2 == 0 else 0 for i in range(s.layers)], "num_local_experts": 1, "num_experts_per_tok": 1}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**_decoder(s, **more)))


def _qwen3(s: Sizes) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_decoder(s)))


def _gpt2(s: Sizes) -> Any:
    sizes = {"n_embd": s.hidden, "n_layer": s.layers, "n_head": s.heads, "n_positions": s.positions, "vocab_size": s.vocabulary}
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _bert(s: Sizes) -> Any:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "intermediate_size": 2 * s.hidden}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, **dropout, vocab_size=s.vocabulary, max_position_embeddings=s.positions)
    )


def _t5(s: Sizes) -> Any:
    sizes = {"d_model": s.hidden, "d_kv": s.head_dim, "d_ff": 2 * s.hidden, "num_layers": s.layers, "num_heads": s.heads}
    tokens = {"vocab_size": s.vocabulary, "decoder_start_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens, dropout_rate=0.0))


def _whisper(s: Sizes) -> Any:
    sizes = {"d_model": s.hidden, "encoder_layers": s.layers, "decoder_layers": s.layers, "vocab_size": s.vocabulary, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": s.heads, "decoder_attention_heads": s.heads}
    wide = {"encoder_ffn_dim": 2 * s.hidden, "decoder_ffn_dim": 2 * s.hidden}
    tokens: dict[str, Any] = {"decoder_start_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
    lengths = {"max_source_positions": _sound_positions(s), "max_target_positions": s.positions, "dropout": 0.0}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **heads, **wide, **tokens, **lengths))


def _vit(s: Sizes) -> Any:
    sizes = {"hidden_size": s.hidden, "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "intermediate_size": 2 * s.hidden}
    image = {"image_size": _image_size(s), "patch_size": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **image, **dropout, num_labels=s.vocabulary))


def _sound_positions(s: Sizes) -> int:
    return 20 if s.head_dim == CPU.head_dim else 150


def _image_size(s: Sizes) -> int:
    return 16 if s.head_dim == CPU.head_dim else 64


def tokens(sizes: Sizes, batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, sizes.vocabulary, (batch, length))}


def _of_two(sizes: Sizes, batch: int, length: int) -> dict[str, Tensor]:
    behind = torch.randint(2, sizes.vocabulary, (batch, length // 2))
    return {**tokens(sizes, batch, length), "decoder_input_ids": behind}


def _sound(sizes: Sizes, batch: int, length: int) -> dict[str, Tensor]:
    features = torch.randn(batch, 8, 2 * _sound_positions(sizes))
    return {"input_features": features, "decoder_input_ids": torch.randint(2, sizes.vocabulary, (batch, length))}


def _image(sizes: Sizes, batch: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, _image_size(sizes), _image_size(sizes))}


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", _llama, tokens),
        Architecture("mistral", _mistral, tokens),
        Architecture("gemma2", _gemma2, tokens, plain="eager"),
        Architecture("gemma3", _gemma3, tokens),
        Architecture("gpt_oss", _gpt_oss, tokens, plain="eager"),
        Architecture("llama4", _llama4, tokens),
        Architecture("qwen3", _qwen3, tokens),
        Architecture("bert", _bert, tokens, generates=False, is_decoder=False),
        Architecture("t5", _t5, _of_two, is_decoder=False),
        Architecture("whisper", _whisper, _sound, is_decoder=False),
        Architecture("vit", _vit, _image, generates=False, is_decoder=False),
        Architecture("gpt2", _gpt2, tokens),
    )
}


def model_of(architecture: Architecture, sizes: Sizes, seed: int = 0) -> Any:
    """A model in float32 whose weights are bf16 numbers, of a size that lets its attention matter; ready to be tested."""
    torch.manual_seed(seed)
    model = architecture.build(sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.0 if "embed" in name or "bias" in name else 1.5 * parameter[0].numel() ** -0.5)
            elif "norm" not in name and "layer_norm" not in name:
                parameter.normal_(std=0.5)
            parameter.copy_(parameter.bfloat16())
    return model


def as_dtype(model: Any, dtype: torch.dtype, implementation: str, device: str = "cpu") -> Any:
    """A copy of a model with its own attention. Not by set_attn_implementation, which reaches no part of T5 in transformers 5.17."""
    made = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=implementation)
    made.load_state_dict(model.state_dict())
    return made.eval().to(device=device, dtype=dtype)


def of_dtype(inputs: dict[str, Tensor], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Inputs for a model of a dtype."""
    return {name: each.to(device, dtype if each.is_floating_point() else each.dtype) for name, each in inputs.items()}
