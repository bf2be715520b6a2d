"""PyTorch's fused attention operators by flashgen's: what each takes, and what PyTorch's fakes and other kernels expect of its outputs.

These are the operators that aten::scaled_dot_product_attention chooses among. Compiled graphs, PyTorch's C++ and jagged tensors call them
past its Python name. What is returned has the shapes and strides of PyTorch's fakes, which compiled graphs count on.

Which backward kernel is flashgen's is told by states.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.backends.cuda import flash_sdp_enabled

from flashgen.codegen.seen import Causal
from flashgen.launch.asked import Modified, names_with_gradients
from flashgen.launch.keywords import modified_of_call
from flashgen.operators.gradients import attention_backward, attention_tensors_backward, backward_on_gpu
from flashgen.operators.registration import attention_forward, forward_on_gpu

from .face import DTYPES
from .states import OF_FLASH, state_of_forward

Tensor = torch.Tensor


# ---- what flashgen does not take


def against_flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, debug: bool = False, **_: Any
) -> str | None:
    """Why flashgen does not take a call of _scaled_dot_product_flash_attention. is_causal is aligned bottom-right."""
    if debug:
        return "a dropout mask is asked for"
    if is_causal and query.shape[2] > key.shape[2]:
        return "rows that see no key, of which PyTorch's flash operator gives an lse of its own"
    return _against(query, key, value, dropout_p)


def against_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lse: bool, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> str | None:
    """The same of _scaled_dot_product_efficient_attention. is_causal is aligned top-left."""
    if not flash_sdp_enabled():
        return "PyTorch's flash backend is switched off"
    if bias is not None and is_causal:
        return "attn_mask and is_causal at once"
    return _against(query, key, value, dropout_p)


def against_cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    debug: bool = False, **_: Any,
) -> str | None:  # fmt: skip
    """The same of _scaled_dot_product_cudnn_attention."""
    if debug:
        return "a dropout mask is asked for"
    if is_causal and query.shape[2] != key.shape[2]:
        return "is_causal of cuDNN's operator where lengths differ"
    return against_efficient(query, key, value, bias, lse, dropout_p, is_causal)


def _against(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str | None:
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    if dropout_p != 0.0:
        return "dropout within a compiled graph or C++"
    if query.shape[3] % 8 or value.shape[3] % 8 or query.shape[3] > 256 or value.shape[3] > 256:
        return "a head_dim that is no multiple of 8 up to 256"
    if not query.numel() or not key.numel() or not value.numel():
        return "tensors without elements"
    return None


# ---- forward


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """_scaled_dot_product_flash_attention."""
    out, lse = _forward(query, key, value, is_causal, scale)
    out = like_empty(out, query) if out.shape == query.shape else out
    state, unused = state_of_forward(query, OF_FLASH, 0.0), query.new_empty((), dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, wants_lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """_scaled_dot_product_efficient_attention. out: [batch, len, heads, head_dim_v] in memory; lse: of a multiple of 32 queries."""
    causal = "top_left" if is_causal and query.shape[2] != key.shape[2] else is_causal
    out, lse = _forward(query, key, value, causal, scale, bias, layout="bshd")
    padded = lse.new_empty(*lse.shape[:2], -(-lse.shape[2] // 32) * 32 if wants_lse else 0)
    if wants_lse:
        # 0 for a row that sees no key, as PyTorch's kernel has it: its backward kernel, and flashgen's, make nothing of that
        torch.nan_to_num(lse, math.nan, math.inf, 0.0, out=padded[..., : lse.shape[2]])
    return out, padded, state_of_forward(query, (), 0.0), query.new_empty((), dtype=torch.int64)


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, wants_lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """_scaled_dot_product_cudnn_attention. out lies in memory as query does; lse: [batch, heads, len_q, 1]."""
    out, lse = _forward(query, key, value, is_causal, scale, bias)
    state, offset = state_of_forward(query, (), 0.0), query.new_empty((), dtype=torch.int64)
    return out, lse.unsqueeze(3), None, None, query.shape[2], key.shape[2], state, offset, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: Any, scale: float | None, bias: Tensor | None = None, layout: str = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Out [batch, heads, len_q, head_dim_v], which lies in memory as query does, or under "bshd" with lengths before heads, and lse."""
    q, k, v = _laid_out(layout, query, key, value)
    causal, modified = _told(query, key, causal, bias)
    out, lse = (forward_on_gpu if q.is_cuda else attention_forward)(q, k, v, causal, scale, layout, *modified)
    assert lse is not None
    return out if layout == "bhsd" else out.transpose(1, 2), lse


# ---- backward


def flash_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, of_q: Any, of_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, seed: Tensor, unused: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """_scaled_dot_product_flash_attention_backward."""
    gradients = _backward(d_out, query, key, value, out, lse, is_causal, scale)
    return tuple(map(like_empty, gradients, (query, key, value)))


def efficient_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    dropout_p: float, wanted: Any, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """_scaled_dot_product_efficient_attention_backward. d_bias has all elements of scores, and rows of a multiple of 16 in memory."""
    causal = "top_left" if is_causal and query.shape[2] != key.shape[2] else is_causal
    of_bias = bias is not None and bool(wanted[3])
    found = _backward(d_out, query, key, value, out, lse[..., : query.shape[2]], causal, scale, bias, of_bias, "bshd")
    if not of_bias:
        return *found, None
    d_q, d_k, d_v, d_bias = found
    if d_bias.shape[-1] % 16:
        padded = d_bias.new_empty(*d_bias.shape[:-1], -(-d_bias.shape[-1] // 16) * 16)[..., : d_bias.shape[-1]]
        d_bias = padded.copy_(d_bias)
    return d_q, d_k, d_v, d_bias


def cudnn_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: Tensor | None,
    of_q: Any, of_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """_scaled_dot_product_cudnn_attention_backward."""
    gradients = _backward(d_out, query, key, value, out, lse.squeeze(3), is_causal, scale, bias)
    return tuple(map(like_empty, gradients, (query, key, value)))


def _backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: Any, scale: float | None,
    bias: Tensor | None = None, of_bias: bool = False, layout: str = "bhsd",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, key and value, and of the bias if it is asked for."""
    causal, modified = _told(query, key, causal, bias)
    if of_bias:
        names, sizes, numbers, tensors = modified  # type: ignore[misc]  # the bias is among them
        modified = names_with_gradients(names, (True,)), sizes, numbers, tensors
    tensors_of_call = *_laid_out(layout, query, key, value, out), lse, *_laid_out(layout, d_out)
    arguments = *tensors_of_call, None, causal, scale, layout, None, *modified
    if query.is_cuda:
        d_q, d_k, d_v, *others = backward_on_gpu(*arguments, of_tensors=of_bias)
    else:
        d_q, d_k, d_v, *others = (attention_tensors_backward if of_bias else attention_backward)(*arguments)
    return *_laid_out(layout, d_q, d_k, d_v), *others


def _told(query: Tensor, key: Tensor, causal: Causal, bias: Tensor | None) -> tuple[bool, Modified | tuple[()]]:
    """What flashgen's operators are told of the mask and the bias."""
    if bias is None and not isinstance(causal, str):
        return causal, ()
    is_causal, modified, _ = modified_of_call(causal, None, None, None, None, bias, top_left=query.shape[2] - key.shape[2], q=query)
    return is_causal, modified


# ---- how tensors lie in memory


def _laid_out(layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if layout == "bhsd" else tuple([tensor.transpose(1, 2) for tensor in tensors])


def like_empty(found: Tensor, of: Tensor) -> Tensor:
    """With the strides of torch.empty_like(of), which fakes have."""
    if found.stride() == of.stride() or found.stride() == torch.empty_like(of, device="meta").stride():
        return found
    return torch.empty_like(of).copy_(found)
