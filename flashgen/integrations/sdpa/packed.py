"""aten::_flash_attention_forward and its backward operator by flashgen's: jagged tensors and torch.nn.attention.varlen call them.

Tensors are [tokens, heads, head_dim] with boundaries of sequences, or [batch, len, heads, head_dim] without.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.api import attention
from flashgen.launch.keywords import modified_of_call
from flashgen.operators.gradients import attention_backward
from flashgen.operators.packed_gradients import attention_varlen_backward
from flashgen.varlen import attention_varlen

from .face import DTYPES
from .fused import like_empty
from .states import OF_FLASH, state_of_forward

Tensor = torch.Tensor


def against_packed(
    query: Tensor, key: Tensor, value: Tensor, of_q: Tensor | None, of_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    **others: Any,
) -> str | None:  # fmt: skip
    """Why flashgen does not take a call of _flash_attention_forward."""
    given = next((name for name, value in others.items() if value is not None and (name, value) != ("num_splits", 1)), None)
    if given is not None:
        return f"{given} of PyTorch's flash operator"
    if debug:
        return "a dropout mask is asked for"
    if dropout_p != 0.0:
        return "dropout of _flash_attention_forward"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    if query.shape[-1] % 8 or value.shape[-1] % 8 or query.shape[-1] > 256 or value.shape[-1] != query.shape[-1]:
        return "a head_dim that is no multiple of 8 up to 256"
    if not query.numel() or not key.numel():
        return "tensors without elements"
    if (of_q is None) != (of_k is None):
        return "boundaries of sequences of queries alone, or of keys alone"
    if of_q is None and is_causal and query.shape[1] > key.shape[1]:
        return "rows that see no key, of which PyTorch's flash operator gives an lse of its own"
    return None


def packed_flash(
    query: Tensor, key: Tensor, value: Tensor, of_q: Tensor | None, of_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    **others: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """_flash_attention_forward. lse: [heads, tokens], or [batch, heads, len] without boundaries."""
    window = _window(window_size_left, window_size_right)
    with torch.no_grad():  # of PyTorch's operator, whose backward kernel is another one
        if of_q is None:
            out, lse = attention(query, key, value, causal=is_causal, scale=scale, window=window, return_lse=True)
        else:
            out, lse = attention_varlen(
                query, key, value, cu_seqlens_q=of_q, cu_seqlens_kv=of_k, max_seqlen_q=max_q, max_seqlen_kv=max_k, causal=is_causal,
                scale=scale, window=window, return_lse=True,
            )  # fmt: skip
    unused = query.new_empty((), dtype=torch.uint64)
    return like_empty(out, query), lse, state_of_forward(query, OF_FLASH, 0.0), unused, query.new_empty(0)


def packed_flash_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, of_q: Tensor | None, of_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """_flash_attention_backward."""
    window = _window(window_size_left, window_size_right)
    causal, modified, _ = modified_of_call(is_causal, window, None, None, None, top_left=None, q=query)
    tensors = query, key, value, out, lse, d_out, None
    if of_q is None:
        gradients = attention_backward(*tensors, causal, scale, "bshd", None, *modified)
    else:
        gradients = attention_varlen_backward(*tensors, of_q, of_k, None, None, max_q, max_k, causal, scale, None, *modified)
    return tuple(map(like_empty, gradients, (query, key, value)))


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """PyTorch's operator has -1 or None for an open end."""
    ends = tuple(None if end is None or end < 0 else end for end in (left, right))
    return None if ends == (None, None) else ends  # type: ignore[return-value]
