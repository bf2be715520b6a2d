"""xformers' memory_efficient_attention, by flashgen's kernels.

    import flashgen.integrations.xformers
    flashgen.integrations.xformers.install()  # xformers.ops.memory_efficient_attention is flashgen's from now on

What belongs here: xformers' functions and what their arguments are in flashgen's. What becomes of a bias is in xformers_biases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xformers.ops
from xformers.ops import fmha

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.typed import require_type

from .probability import probability
from .renaming import by_other_names
from .xformers_biases import Asked, route_of

__all__ = [
    "install",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "uninstall",
]

_NAMES = {
    **{"q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value", "bias": "attn_bias", "dropout_p": "p"},
    **{"cu_seqlens_q": "attn_bias.q_seqinfo.seqstart", "cu_seqlens_kv": "attn_bias.k_seqinfo.seqstart"},
    **{"seqused_kv": "attn_bias.k_seqinfo.seqlen", "cache_seqlens": "attn_bias.k_seqinfo.seqlen"},
    **{"cache_leftpad": "attn_bias.k_seqinfo.seqstart", "block_table": "attn_bias.block_tables", "window": "attn_bias"},
}


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Any:
    """The function of this name in xformers, with gradients of query, key, value and a tensor of biases.

    query: [batch, len_q, heads, head_dim], bf16 or fp16; key: [batch, len_kv, heads, head_dim]; value: as key, with head_dim_v. Or all
       three without heads, [batch, length, head_dim], or in groups, [batch, length, groups, heads of a group, head_dim]. Heads that key
       and value are expanded along (stride 0) are grouped queries, and are not copied, where no gradient of key and value is asked for.
    attn_bias: None, a tensor that is added to scaled scores, [batch, heads, len_q, len_kv] (or a shape that broadcasts to it, of as many
       dimensions as query), or one of xformers' classes; docs/integrations.md says what each becomes
    p: probability of dropout
    scale: of scores, greater than 0; None for head_dim ** -0.5
    op: xformers' choice of a kernel: it must be None
    output_dtype: None or query's
    Returns [batch, len_q, heads, head_dim_v], or the shape without heads or in groups. A query that sees no key gets 0.

    Raises ArgumentError, which is a ValueError, and what `flashgen.attention` raises.
    """
    return _call(query, key, value, attn_bias, p, scale, op, output_dtype, False)[0]


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Any:
    """`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return _call(query, key, value, attn_bias, p, scale, op, output_dtype, False)[0]


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`memory_efficient_attention_forward` and the natural log-sum-exp of scores, fp32 [batch, heads, len_q] (in groups: groups, heads).

    Of biases with blocks it is packed, [1, heads, len_q], as FlashAttention's operators in xformers have it. p must be 0.
    """
    if p != 0.0:
        raise ArgumentError(f"p must be 0 here: memory_efficient_attention has dropout; got {shown(p)}")
    with torch.no_grad():
        out, lse = _call(query, key, value, attn_bias, p, scale, op, output_dtype, True)
    return out, lse


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any,
    p: float,
    scale: float | None,
    op: Any,
    output_dtype: torch.dtype | None,
    return_lse: bool,
) -> tuple[Any, Any]:
    """Out and, if wanted, lse."""
    if op is not None:
        raise ArgumentError(f"op must be None: flashgen chooses its kernels by records and sizes; got {shown(op)}")
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_type(name, tensor, torch.Tensor)
    if output_dtype is not None and output_dtype != query.dtype:
        raise ArgumentError(f"output_dtype must be None or query's dtype {query.dtype}; got {shown(output_dtype)}")
    if type(p) is not float:
        p = probability(p)
        require_type("p", p, float)
    q, k, v = _by_heads(query, key, value)
    route, options = route_of(attn_bias, query, q, k)
    try:
        out, lse = route(Asked(q, k, v, attn_bias, float(p), scale, return_lse), options)
    except ArgumentError as error:
        raise by_other_names(error, _NAMES) from error
    rank = query.ndim
    if rank == 3:
        return out.squeeze(2), lse
    if rank == 5:
        groups = query.shape[2:4]
        return out.unflatten(2, groups), lse if lse is None else lse.unflatten(1, groups)
    return out, lse


def _by_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[batch, length, heads, head_dim] of tensors with heads, without or with groups of them. Raises ArgumentError."""
    of_query, of_key = query.shape, key.shape
    rank = len(of_query)
    if rank == len(of_key) == 4 and of_key == value.shape and of_query[2] == of_key[2] and key.stride(2):
        return query, key, value  # as most calls are
    if not rank == key.ndim == value.ndim or rank not in (3, 4, 5):
        dims = [tensor.ndim for tensor in (query, key, value)]
        raise ArgumentError(f"query, key and value must all have 3, 4 or 5 dimensions; got {dims}")
    if not query.shape[2:-1] == key.shape[2:-1] == value.shape[2:-1]:
        what, shapes = "groups and heads" if rank == 5 else "heads", [tuple(tensor.shape[2:-1]) for tensor in (query, key, value)]
        raise ArgumentError(f"key and value must have query's {what}, along which they may be expanded; got {shapes}")
    if rank == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if _is_one_head(key) and _is_one_head(value):
        key, value = key[..., :1, :], value[..., :1, :]
    return (query, key, value) if rank == 4 else (query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3))


def _is_one_head(tensor: torch.Tensor) -> bool:
    """Whether all heads (of a group) are one in memory, and nobody asks for gradients, of which each head has its own."""
    return not tensor.stride(-2) and not (tensor.requires_grad and torch.is_grad_enabled())


_REPLACED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        memory_efficient_attention,
        memory_efficient_attention_forward,
        memory_efficient_attention_forward_requires_grad,
    )
}
_before: dict[tuple[Any, str], Any] = {}


def install() -> None:
    """Puts the functions of this module in the place of xformers' own, in xformers.ops and xformers.ops.fmha.

    What was imported from there by name before stays as it was. xformers' own backward and partial functions stay, too.
    """
    for module in (xformers.ops, fmha):
        for name, function in _REPLACED.items():
            if hasattr(module, name) and getattr(module, name) is not function:
                _before[module, name] = getattr(module, name)
                setattr(module, name, function)


def uninstall() -> None:
    """Undoes `install`, but for what others have put in the place of this module's functions since."""
    while _before:
        (module, name), function = _before.popitem()
        if getattr(module, name) is _REPLACED[name]:
            setattr(module, name, function)
