"""diffusers' models by flashgen's kernels: an attention backend, and a processor for models that have none.

    import flashgen.integrations.diffusers
    flashgen.integrations.diffusers.register()
    pipeline.transformer.set_attention_backend("flashgen")  # or: with diffusers.attention_backend("flashgen")
    pipeline.unet.set_attn_processor(flashgen.integrations.diffusers.AttnProcessor())  # whose processors call PyTorch themselves

What belongs here: what the backends of diffusers.models.attention_dispatch are given, in flashgen's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models import attention_dispatch
from torch.nn.attention.flex_attention import BlockMask

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.typed import require_type

from ..api import attention
from ..launch.made_block_masks import BlockMask as MadeBlockMask
from .probability import probability
from .renaming import by_other_names

__all__ = ["NAME", "AttnProcessor", "attention_of_backend", "register", "unregister"]

NAME = "flashgen"
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask", "block_mask": "attn_mask"}
_attention: Callable[..., Any] = attention


def attention_of_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | BlockMask | MadeBlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """What a backend of diffusers is called with; `register` gives it a name there.

    query: [batch, len_q, heads_q, head_dim], bf16 or fp16; key: [batch, len_kv, heads_kv, head_dim]; value: as key, with head_dim_v
    attn_mask: as scaled_dot_product_attention has it, of a shape that broadcasts to [batch, heads_q, len_q, len_kv]: a bool where queries
       see keys, or numbers to be added to scores, of query's dtype or fp32, with gradient. Of the shape [batch, len_kv] it is one of keys.
       Or a block mask, PyTorch's or flashgen's.
    is_causal: query i sees keys j <= i
    enable_gqa: whether heads_q may be a multiple of heads_kv
    return_lse: also return the natural log-sum-exp of scores, fp32 [batch, heads_q, len_q], as FlashAttention's backend does
    _parallel_config: of diffusers: it must be None
    Returns [batch, len_q, heads_q, head_dim_v], dense. A query that sees no key gets 0.

    Raises ArgumentError, which is a ValueError, and what `flashgen.attention` raises.
    """
    if _parallel_config is not None:
        raise ArgumentError("_parallel_config must be None: choose one of diffusers' own backends for context parallelism; got one")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
        if tensor.ndim != 4:
            raise ArgumentError(f"{name} must have 4 dimensions (batch, length, heads, head_dim); got {tensor.ndim}")
    if type(is_causal) is not bool:
        require_type("is_causal", is_causal, bool)
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ArgumentError(f"key must have query's {query.shape[2]} heads, or enable_gqa must be True; got {key.shape[2]} heads")
    options: dict[str, Any] = {}
    if attn_mask is not None:
        if is_causal:
            raise ArgumentError("is_causal must be False beside attn_mask, which can say it; got True")
        options = _masked(attn_mask, query, key.shape[1])
    causal = is_causal if query.shape[1] == key.shape[1] or not is_causal else "top_left"
    try:
        options["dropout_p"] = probability(dropout_p)
        return _attention(query, key, value, causal=causal, scale=scale, return_lse=return_lse, **options)
    except ArgumentError as error:
        raise by_other_names(error, _NAMES) from error


def _masked(attn_mask: Any, query: torch.Tensor, len_kv: int) -> dict[str, Any]:
    if not isinstance(attn_mask, torch.Tensor):
        if isinstance(attn_mask, (BlockMask, MadeBlockMask)):
            return {"block_mask": attn_mask}
        raise ArgumentError(f"attn_mask must be a tensor or a block mask; got {shown(attn_mask)}")
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ArgumentError(f"attn_mask must be torch.bool, torch.float32 or query's {query.dtype}; got {attn_mask.dtype}")
    if attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], len_kv):
        attn_mask = attn_mask[:, None, None]
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def register() -> None:
    """Makes "flashgen" the name of a backend of diffusers, which `set_attention_backend` and `attention_backend` take from then on.

    diffusers has its backends as members of an enumeration: this adds one.
    """
    names, name = attention_dispatch.AttentionBackendName, NAME.upper()
    if NAME in names._value2member_map_:
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_ = name, NAME
    setattr(names, name, member)
    names._member_map_[name] = names._value2member_map_[NAME] = member
    names._member_names_.append(name)
    attention_dispatch._AttentionBackendRegistry.register(member)(attention_of_backend)


def unregister() -> None:
    """Undoes `register`. Models that have this backend must be given another one before."""
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    member = names._value2member_map_.pop(NAME, None)
    if member is None:
        return
    name = member.name
    del names._member_map_[name]
    delattr(names, name)
    names._member_names_.remove(name)
    for kept in (registry._backends, registry._constraints, registry._supported_arg_names):
        kept.pop(member, None)
    if registry._active_backend == NAME:
        registry._active_backend = names.NATIVE


class AttnProcessor:
    """A processor for diffusers' Attention modules whose own ones call scaled_dot_product_attention: `unet.set_attn_processor(...)`.

    What it computes is what diffusers' AttnProcessor2_0 does, and its AttnProcessor, which modules without a scale of scores have.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> Any:
        """hidden_states: [batch, length, channels] or [batch, channels, height, width]; encoder_hidden_states: the former."""
        given = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = hidden_states.shape[2:] if hidden_states.ndim == 4 else None
        if image is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            source = attn.norm_encoder_hidden_states(source)
        if attention_mask is not None:
            batch, length = source.shape[:2]
            attention_mask = attn.prepare_attention_mask(attention_mask, length, batch).view(batch, attn.heads, -1, length)
        query, key, value = (
            project(tensor).unflatten(2, (attn.heads, -1))
            for project, tensor in ((attn.to_q, hidden_states), (attn.to_k, source), (attn.to_v, source))
        )
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        scale = None if attn.scale_qk else 1.0
        out = attn.to_out[0](attention_of_backend(query, key, value, attention_mask, scale=scale).flatten(2))
        out = attn.to_out[1](out)  # dropout
        if image is not None:
            out = out.transpose(1, 2).unflatten(2, image)
        return (out + given if attn.residual_connection else out) / attn.rescale_output_factor
