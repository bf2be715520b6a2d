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
from flashgen.launch.keywords import complete, modified_of_call
from flashgen.numerics.modifiers.dropout import dropout_mask
from flashgen.operators.gradients import attention_backward, attention_tensors_backward, backward_on_gpu
from flashgen.operators.registration import attention_forward, forward_on_gpu

from ..signed_probabilities import signed_probabilities
from .face import DTYPES
from .states import OF_FLASH, seed_of_state, state_of_forward

Tensor = torch.Tensor


# ---- what flashgen does not take


def against_flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, debug: bool = False, **_: Any
) -> str | None:
    """Why flashgen does not take a call of _scaled_dot_product_flash_attention. is_causal is aligned bottom-right."""
    if debug and not dropout_p:
        return "a dropout mask is asked for, without dropout"
    if is_causal and query.shape[2] > key.shape[2]:
        return "rows that see no key, of which PyTorch's flash operator gives an lse of its own"
    return _against(query, key, value, dropout_p)


def against_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lse: bool, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> str | None:
    """The same of _scaled_dot_product_efficient_attention. is_causal is aligned top-left."""
    if dropout_p:
        return "dropout of efficient attention, of which torch._fill_mem_eff_dropout_mask_ tells by the seed what it drops"
    return _against_biased(query, key, value, bias, dropout_p, is_causal)


def against_cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    debug: bool = False, **_: Any,
) -> str | None:  # fmt: skip
    """The same of _scaled_dot_product_cudnn_attention."""
    if debug:
        return "a dropout mask of cuDNN's operator is asked for"
    if is_causal and query.shape[2] != key.shape[2]:
        return "is_causal of cuDNN's operator where lengths differ"
    return _against_biased(query, key, value, bias, dropout_p, is_causal)


def _against_biased(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool) -> str | None:
    if not flash_sdp_enabled():
        return "PyTorch's flash backend is switched off"
    if bias is not None and is_causal:
        return "attn_mask and is_causal at once"
    return _against(query, key, value, dropout_p)


def _against(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str | None:
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    if not 0.0 <= dropout_p < 1.0:
        return "a dropout_p of 1, or beyond 0 and 1"
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
    """_scaled_dot_product_flash_attention. The last output is what `_debug_mask` gives, if it is asked for."""
    state, unused = state_of_forward(query, OF_FLASH, dropout_p), query.new_empty((), dtype=torch.uint64)
    out, lse = _forward(query, key, value, is_causal, scale, dropout_p, state)
    out = like_empty(out, query) if out.shape == query.shape else out
    mask = _debug_mask(query, key, is_causal, scale, dropout_p, state) if debug else query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, mask


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, wants_lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """_scaled_dot_product_efficient_attention. out: [batch, len, heads, head_dim_v] in memory; lse: of a multiple of 32 queries."""
    causal = "top_left" if is_causal and query.shape[2] != key.shape[2] else is_causal
    state = state_of_forward(query, (), dropout_p)
    out, lse = _forward(query, key, value, causal, scale, dropout_p, state, bias, "bshd")
    padded = lse.new_empty(*lse.shape[:2], -(-lse.shape[2] // 32) * 32 if wants_lse else 0)
    if wants_lse:
        # 0 for a row that sees no key, as PyTorch's kernel has it: its backward kernel, and flashgen's, make nothing of that
        torch.nan_to_num(lse, math.nan, math.inf, 0.0, out=padded[..., : lse.shape[2]])
    return out, padded, state, query.new_empty((), dtype=torch.int64)


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, wants_lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """_scaled_dot_product_cudnn_attention. out's dimensions lie in memory in the order of query's; lse: [batch, heads, len_q, 1]."""
    state, offset = state_of_forward(query, (), dropout_p), query.new_empty((), dtype=torch.int64)
    out, lse = _forward(query, key, value, is_causal, scale, dropout_p, state, bias)
    out = like_empty(out, query) if out.shape == query.shape else _in_order(out, query)
    return out, lse.unsqueeze(3), None, None, query.shape[2], key.shape[2], state, offset, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: Any, scale: float | None, dropout_p: float, state: Tensor,
    bias: Tensor | None = None, layout: str = "bhsd",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [batch, heads, len_q, head_dim_v], which lies in memory as query does, or under "bshd" with lengths before heads, and lse."""
    q, k, v = _laid_out(layout, query, key, value)
    causal, modified = _told(query, key, causal, bias, dropout_p, state)
    out, lse = (forward_on_gpu if q.is_cuda else attention_forward)(q, k, v, causal, scale, layout, *modified)
    assert lse is not None
    return out if layout == "bhsd" else out.transpose(1, 2), lse


def _debug_mask(query: Tensor, key: Tensor, is_causal: bool, scale: float | None, dropout_p: float, state: Tensor) -> Tensor:
    """What `signed_probabilities` gives, with zeros up to multiples of 128 queries and keys, as FlashAttention's kernel has it."""
    (batch, heads, len_q, _), len_kv = query.shape, key.shape[2]
    kept = dropout_mask(seed_of_state(state), dropout_p, batch, heads, len_q, len_kv, query.device)
    q, k = _laid_out("bshd", query, key)
    signed = signed_probabilities(q, k, kept, is_causal, scale, None, None, None)
    return torch.nn.functional.pad(signed, (0, -len_kv % 128, 0, -len_q % 128))


# ---- backward


def flash_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, of_q: Any, of_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, state: Tensor, unused: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """_scaled_dot_product_flash_attention_backward."""
    gradients = _backward(d_out, query, key, value, out, lse, is_causal, scale, dropout_p, state)
    return tuple(map(like_empty, gradients, (query, key, value)))


def efficient_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, state: Tensor, offset: Tensor,
    dropout_p: float, wanted: Any, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """_scaled_dot_product_efficient_attention_backward. d_bias has all elements of scores, and rows of a multiple of 16 in memory."""
    causal = "top_left" if is_causal and query.shape[2] != key.shape[2] else is_causal
    of_bias = bias is not None and bool(wanted[3])
    found = _backward(d_out, query, key, value, out, lse[..., : query.shape[2]], causal, scale, dropout_p, state, bias, of_bias, "bshd")
    if not of_bias:
        return *found, None
    d_q, d_k, d_v, d_bias = found
    if d_bias.shape[-1] % 16:
        padded = d_bias.new_empty(*d_bias.shape[:-1], -(-d_bias.shape[-1] // 16) * 16)[..., : d_bias.shape[-1]]
        d_bias = padded.copy_(d_bias)
    return d_q, d_k, d_v, d_bias


def cudnn_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, state: Tensor, offset: Tensor, bias: Tensor | None,
    of_q: Any, of_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """_scaled_dot_product_cudnn_attention_backward."""
    gradients = _backward(d_out, query, key, value, out, lse.squeeze(3), is_causal, scale, dropout_p, state, bias)
    return tuple(map(like_empty, gradients, (query, key, value)))


def _backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: Any, scale: float | None,
    dropout_p: float, state: Tensor, bias: Tensor | None = None, of_bias: bool = False, layout: str = "bhsd",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, key and value, and of the bias if it is asked for."""
    causal, modified = _told(query, key, causal, bias, dropout_p, state)
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


def _told(
    query: Tensor, key: Tensor, causal: Causal, bias: Tensor | None, dropout_p: float, state: Tensor
) -> tuple[bool, Modified | tuple[()]]:
    """What flashgen's operators are told of the mask, the bias, and the dropout, whose seed the state has."""
    if bias is None and not dropout_p and not isinstance(causal, str):
        return causal, ()
    top_left = query.shape[2] - key.shape[2]
    if not dropout_p:
        return modified_of_call(causal, None, None, None, None, bias, top_left=top_left, q=query)[:2]
    with torch.no_grad():  # else a seed would be drawn
        is_causal, modified, given = modified_of_call(
            causal, None, None, None, None, bias, dropout_p=dropout_p, top_left=top_left, q=query, seed_waits=True
        )
    assert given is not None
    return is_causal, complete(modified, given, query, seed_of_state(state))  # type: ignore[arg-type]  # the dropout is among them


# ---- how tensors lie in memory


def _laid_out(layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if layout == "bhsd" else tuple([tensor.transpose(1, 2) for tensor in tensors])


def like_empty(found: Tensor, of: Tensor) -> Tensor:
    """With the strides of torch.empty_like(of), which fakes have."""
    if found.stride() == of.stride() or found.stride() == torch.empty_like(of, device="meta").stride():
        return found
    return torch.empty_like(of).copy_(found)


def _in_order(found: Tensor, of: Tensor) -> Tensor:
    """Dense, with dimensions in the order of the other tensor's strides, as the fake of cuDNN's operator has them."""
    outermost_first = sorted(range(4), key=of.stride().__getitem__, reverse=True)
    permuted = found.permute(outermost_first)
    inverse = sorted(range(4), key=outermost_first.__getitem__)
    return found if permuted.is_contiguous() else permuted.contiguous().permute(inverse)
