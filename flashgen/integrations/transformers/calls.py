"""transformers' attention interface: a layer's tensors and keywords become one of flashgen's calls."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask

import flashgen
from flashgen.codegen.errors import ArgumentError, shown

from ..renaming import by_other_names
from . import counts
from .mask_functions import window_length
from .prepared import PreparedMask

# What layers pass on of what a model was called with, and what says nothing about attention itself.
_OF_NO_MATTER = {
    *("position_ids", "cache_position", "past_key_values", "use_cache", "logits_to_keep", "labels", "num_items_in_batch", "seq_idx"),
    *("output_hidden_states", "output_router_logits", "return_dict", "layer_idx", "kernel_options"),
}
_REFUSED = {
    "output_attentions": "no probabilities are kept",
    "head_mask": "probabilities of a head cannot be scaled",
    "layer_head_mask": "probabilities of a head cannot be scaled",
}
_NAMES = {
    **{"q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value", "scale": "scaling", "dropout_p": "dropout"},
    **{"sinks": "s_aux", "mask": "attention_mask", "key_padding_mask": "attention_mask", "block_mask": "attention_mask"},
    **{"window": "sliding_window"},
    **{"cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_kv": "cu_seq_lens_k", "max_seqlen_q": "max_length_q", "max_seqlen_kv": "max_length_k"},
}
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def flashgen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer of transformers.

    query: [batch, heads_q, len_q, head_dim]; key, value: [batch, heads_kv, len_kv, head_dim], with heads_kv a divisor of heads_q. bf16 or
       fp16; fp32 under autocast, to whose dtype all three are cast.
    attention_mask: what the mask interface has given, which says whether attention is causal and what its window is. Or a model's own:
       [batch, 1 or heads_q, len_q, len_kv], bool, True where a key is seen, or numbers that are added to scores; or FlexAttention's. None
       for no other mask than is_causal, or else module.is_causal, and sliding_window say, aligned at the last key: a query sees
       sliding_window keys, its own included, and as many to the right where it is not causal.
    s_aux: [heads_q], sinks; position_bias: [1 or batch, heads_q, len_q, len_kv], added to scaled scores, with gradient
    deterministic: True for gradients that are the same to the bit; else what torch.are_deterministic_algorithms_enabled() says
    others: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of sequences that are packed in a batch of 1; and what a model was
       called with, of which some has no meaning here. What is not known is refused by name.
    Returns out, [batch, len_q, heads_q, head_dim_v], and None for the probabilities. Raises ArgumentError as flashgen's calls do.
    """
    try:
        packed = None
        for name, given in others.items():
            if given is not None and name not in _OF_NO_MATTER:
                packed = _checked(others)
                break
        if torch.float32 in (query.dtype, key.dtype, value.dtype):
            query, key, value = _cast(query, key, value)
        if isinstance(attention_mask, PreparedMask):
            mask = attention_mask
            _, _, len_q, len_kv = mask.prepared_shape
            if len_q != query.shape[2] or len_kv != key.shape[2]:
                _refuse(f"attention_mask must be of the layer's queries and keys, {query.shape[2]} and {key.shape[2]}; got {mask!r}")
            attention_mask = None
        else:
            mask = _of_layer(module, query, key, attention_mask is not None, is_causal, sliding_window)
        modifiers: dict[str, Any] = {}
        if mask.window is not None:
            modifiers["window"] = mask.window
        if softcap is not None:
            modifiers["softcap"] = softcap
        if s_aux is not None:
            modifiers["sinks"] = s_aux
        if position_bias is not None:
            modifiers["bias"] = position_bias
        if attention_mask is not None:
            modifiers |= _own_mask(attention_mask, position_bias, packed)
        if deterministic and not mask.cached:  # gradients, which no cache has
            modifiers["deterministic"] = deterministic
        if "bias" in modifiers:
            _check_bias(modifiers["bias"], "attention_mask" if position_bias is None else "position_bias")
        if packed is not None:
            out = _of_packed(*_by_rows(query, key, value), mask, scaling, dropout, packed, modifiers)
        elif mask.cached:
            out = _of_cache(*_by_rows(query, key, value), mask, scaling, dropout, modifiers)
        else:
            if mask.chunk is not None:
                modifiers["chunk"] = mask.chunk
            if mask.document_ids is not None:
                modifiers["document_ids"] = mask.document_ids
            if mask.keys is not None:
                modifiers["key_padding_mask"] = mask.keys
            if mask.function is not None:
                modifiers["mask_mod"] = mask.function
            if dropout:
                modifiers["dropout_p"] = dropout
            compiles = is_compiling()  # where views cost nothing
            _, of_heads, of_queries, _ = query.stride()
            if not compiles and of_heads < of_queries:  # so will out lie: one view of it in place of three before
                by_heads = flashgen.attention(query, key, value, causal=mask.causal, scale=scaling, layout="bhsd", **modifiers)
                out = by_heads.transpose(1, 2)
            else:
                out = flashgen.attention(*_by_rows(query, key, value), causal=mask.causal, scale=scaling, **modifiers)
            if not compiles:
                counts.run["attention"] += 1
    except ArgumentError as error:
        if is_compiling():
            raise
        of_bias = "attention_mask" if position_bias is None else "position_bias"
        named = by_other_names(error, {**_NAMES, "bias": of_bias})
        counts.count_refusal(named)
        if named is error:
            raise
        raise named from error
    return out, None


def _by_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [batch, len, heads, head_dim]."""
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _of_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: PreparedMask,
    scaling: float | None,
    dropout: float,
    packed: dict[str, Any],
    modifiers: dict[str, Any],
) -> torch.Tensor:
    """Of sequences one behind the other in a batch of 1, whose boundaries are given."""
    if q.shape[0] != 1 or k.shape[0] != 1:
        _refuse(f"cu_seq_lens_q must come with a batch of 1, in which sequences are packed; got a batch of {q.shape[0]}")
    if mask.lacks_queries:
        _refuse("cu_seq_lens_q must be of the layer's queries, of which the model has left some out: call it with logits_to_keep=0")
    if mask.keys is not None or mask.cached or mask.function is not None:
        _refuse("cu_seq_lens_q must come without padding, a cache or a mask function, which are of other tokens; got both")
    chunk = mask.chunk if mask.sequence_chunk is None else mask.sequence_chunk
    if chunk is not None:
        modifiers["chunk"] = chunk
    out: torch.Tensor = flashgen.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=packed["cu_seq_lens_q"].to(torch.int32),
        cu_seqlens_kv=packed["cu_seq_lens_k"].to(torch.int32),
        max_seqlen_q=_hint(packed.get("max_length_q")),
        max_seqlen_kv=_hint(packed.get("max_length_k")),
        causal=mask.causal,
        scale=scaling,
        dropout_p=dropout,
        **modifiers,
    )
    if not is_compiling():
        counts.run["attention_varlen"] += 1
    return out


def _of_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: PreparedMask, scaling: float | None, dropout: float, modifiers: dict[str, Any]
) -> torch.Tensor:
    """Of keys that begin and end where only the device knows."""
    if dropout:
        _refuse(f"dropout must be 0 where gradients are disabled: call model.eval(); got {dropout}")
    starts, keys = mask.starts, mask.keys
    if "bias" in modifiers and starts is not None:  # it has an element for each key from the first one of the cache on
        if mask.chunk is not None:
            _refuse("position_bias must come without chunks; got both")
        starts = None
    if keys is not None and (starts is None or mask.chunk is not None):
        modifiers["mask"] = keys[:, None, None]
    if mask.chunk is not None:
        modifiers["chunk"] = mask.chunk
    out: torch.Tensor = flashgen.attention_with_kvcache(
        q, k, v, cache_seqlens=mask.lengths, cache_leftpad=starts, causal=mask.causal, scale=scaling, **modifiers
    )
    if not is_compiling():
        counts.run["attention_with_kvcache"] += 1
    return out


def _of_layer(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    has_own: bool,
    is_causal: bool | None,
    sliding_window: int | None,
) -> PreparedMask:
    """What a layer says itself, whose model has made no mask, or one of its own, which says all."""
    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    if has_own:
        return PreparedMask(shape)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sliding_window is None:
        return PreparedMask(shape, causal=causal)
    before = (sliding_window if type(sliding_window) is int else window_length(sliding_window)) - 1
    return PreparedMask(shape, causal=causal, window=(before, None if causal else before))


def _own_mask(attention_mask: Any, position_bias: torch.Tensor | None, packed: dict[str, Any] | None) -> dict[str, Any]:
    """The keyword that a model's or a user's own mask becomes."""
    if packed is not None:
        _refuse("cu_seq_lens_q must come without an attention_mask of four dimensions: sequences have their own keys; got both")
    if isinstance(attention_mask, BlockMask):
        return {"block_mask": attention_mask}
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 4:
        found = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        _refuse(f"attention_mask must be a tensor (batch, heads, len_q, len_kv), a BlockMask or None; got {found}")
    if attention_mask.dtype == torch.bool:
        return {"mask": attention_mask}
    if position_bias is not None:
        _refuse(f"attention_mask must be bool where there is a position_bias: add it to that; got {attention_mask.dtype}")
    return {"bias": attention_mask}


def _check_bias(bias: torch.Tensor, name: str) -> None:
    """Here, as PyTorch's switch is asked for in the backward pass, where nobody would know what the bias is."""
    if bias.requires_grad and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
        _refuse(
            f"{name} must need no gradient under torch.use_deterministic_algorithms: a bias's is summed in a sequence that differs from run"
            " to run. Give this part of the model attn_implementation='sdpa', or freeze the bias by requires_grad_(False)"
        )


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """To the dtype of autocast, as PyTorch's own attention does there."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        found = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        cure = "load the model with dtype=torch.bfloat16, or use torch.autocast"
        _refuse(f"query, key and value must be bfloat16 or float16: {cure}; got {found}")
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _checked(others: dict[str, Any]) -> dict[str, Any] | None:
    """Those that say where packed sequences are, if they are there. Refuses what is asked for and is not there, or not known."""
    packed: dict[str, Any] = {}
    for name, value in others.items():
        if value is None or value is False or name in _OF_NO_MATTER:
            continue
        if name in _PACKED:
            packed[name] = value
        elif name in _REFUSED:
            _refuse(f"{name} must be left out, or the model have attn_implementation='eager': {_REFUSED[name]}; got {shown(value)}")
        else:
            _refuse(f"{name} must be left out: flashgen does not know what it means to attention; got {type(value).__name__}")
    if "cu_seq_lens_q" in packed and "cu_seq_lens_k" in packed:
        return packed
    if packed.keys() & {"cu_seq_lens_q", "cu_seq_lens_k"}:
        _refuse(f"cu_seq_lens_q and cu_seq_lens_k must be given together; got {', '.join(packed)} alone")
    return None


def _hint(length: Any) -> int | None:
    return length if isinstance(length, int) else None  # of a tensor only the device knows


def _refuse(message: str) -> NoReturn:
    raise ArgumentError(message)
