"""`scaled_dot_product_attention` as a call of `flashgen.attention`: which calls can be one, and what becomes of each argument."""

from __future__ import annotations

import os
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from flashgen.api import CaptureError, attention
from flashgen.build.artifact import CompileError
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.seen import Causal
from flashgen.operators.autograd import is_transformed
from flashgen.varlen import attention_varlen

from . import counted

NAME = "scaled_dot_product_attention"
Call = Callable[..., torch.Tensor]
pytorch_sdpa: Call = torch._C._nn.scaled_dot_product_attention  # what torch.nn.functional has under that name
DTYPES = {torch.bfloat16, torch.float16}
# flashgen's errors whose calls are passed on: what kernels cannot take, a kernel that is not there yet while a CUDA graph is captured, and
# one that does not compile. Faults of the driver, and a compiler that is missing, stay errors.
REFUSALS = (ArgumentError, CaptureError, CompileError)
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_ALIGNED = 8  # elements, to which rows are aligned: 16 bytes
_LOWER_RIGHT: Any = object()  # in place of is_causal, which is aligned top-left
_RANKS = "tensors of fewer than 2 dimensions, 3 with enable_gqa, or of different numbers of them"
_HEAD_DIM = "a head_dim that is no multiple of 8 up to 256"
_NO_ELEMENTS = "tensors without elements"
_NO_NUMBER = "a dropout_p or a scale that is no number"
_DROPOUT = "a dropout_p of 1, or beyond 0 and 1"
_SCALE = "a scale that is not above 0"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch.nn.functional.scaled_dot_product_attention computes, with its arguments, by flashgen where flashgen can.

    query: [..., heads, len_q, head_dim]; key: [..., heads, len_kv, head_dim]; value: [..., heads, len_kv, head_dim_v]; any leading
       dimensions, or fewer. Or nested tensors of layout torch.jagged, [batch, heads, lengths, head_dim].
    attn_mask: bool, True where a query sees a key, or numbers that are added to scaled scores, of query's dtype or fp32, which have a
       gradient; of a shape that broadcasts to [..., heads, len_q, len_kv]. Or a bias of torch.nn.attention.bias.
    is_causal: query i sees the keys j <= i, from the top left also where lengths differ
    dropout_p, scale, enable_gqa: as PyTorch has them. Seeds come from PyTorch's generator, but its own kernels drop other elements.
    Returns [..., heads, len_q, head_dim_v]. A row that sees no key gives 0, as PyTorch's math and efficient kernels have it.

    What flashgen does not take (other dtypes, CPU tensors without FLASHGEN_CPU=1, head dims that are no multiple of 8, ...) PyTorch
    computes, or refuses: `report` says how often, and why. Raises what PyTorch raises.
    """
    if is_dynamo_compiling():
        if type(attn_mask) in _NO_MASK and not query.is_nested:
            tensors = (query, key, value, attn_mask)
            if torch.is_autocast_enabled(query.device.type):
                tensors = _autocast(*tensors)
            if reason_against(*tensors, dropout_p, is_causal, scale, enable_gqa) is None and _is_laid_out(*tensors):
                return _attended(*tensors, dropout_p, is_causal, scale)
        return pytorch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return attended_or_passed_on(pytorch_sdpa, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def attended_or_passed_on(
    before: Call, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> torch.Tensor:
    """The call by flashgen, or by `before`, with what autocast makes of its tensors. Not while torch.compile traces."""
    q, k, v, mask, causal, sizes = query, key, value, attn_mask, is_causal, None
    if type(attn_mask) not in _NO_MASK and is_causal_bias(attn_mask):
        if is_causal is not False:
            return of_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)  # which refuses it
        if (
            attn_mask.variant.name == "LOWER_RIGHT" and attn_mask.seq_len_q != attn_mask.seq_len_kv
        ):  # else PyTorch has it top-left, of any sizes
            sizes = attn_mask.seq_len_q, attn_mask.seq_len_kv
        mask, causal = None, True if sizes is None else _LOWER_RIGHT
    if _autocasts() and isinstance(query, torch.Tensor) and torch.is_autocast_enabled(query.device.type):
        q, k, v, mask = _autocast(q, k, v, mask)
    reason = reason_against(q, k, v, mask, dropout_p, causal, scale, enable_gqa)
    if reason is None and sizes is not None and sizes != (query.shape[-2], key.shape[-2]):
        reason = "a causal_lower_right of other lengths than those of query and key"
    if reason is None:
        try:
            found = _attended(q, k, v, mask, dropout_p, causal, scale)
        except REFUSALS as error:
            reason = reason_of(error)
        else:
            counted.ran(NAME)
            return found
    calls = counted.calls_of_thread()
    if is_causal_bias(attn_mask):
        found = of_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    else:
        found = before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if counted.calls_of_thread() == calls:  # else a fused operator within has counted the call
        counted.passed_on(reason)
    return found


def reason_of(error: FlashgenError) -> str:
    """What is counted of an error among REFUSALS: not the compiler's log below the first line."""
    return str(error).partition("\n")[0]


def reason_against(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> str | None:
    """Why flashgen does not take a call; None if it does. Devices, strides and a mask's shape are left to `flashgen.attention`."""
    kind = type(query)  # each call asks: what most calls are comes first
    if not (kind is type(key) is type(value) is torch.Tensor or {kind, type(key), type(value)} <= _PLAIN):
        if all(isinstance(tensor, torch.Tensor) and tensor.is_nested for tensor in (query, key, value)):
            return _against_nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return "a subclass of Tensor, or no tensor"
    shape_q, shape_k, shape_v, dtype = query.shape, key.shape, value.shape, query.dtype
    if dtype not in DTYPES or key.dtype is not dtype or value.dtype is not dtype:
        return f"dtype {dtype}" if key.dtype == value.dtype == dtype else "dtypes that differ"
    if not query.is_cuda and not (query.device.type == "cpu" and os.environ.get("FLASHGEN_CPU") == "1"):
        return f"tensors on {query.device.type}"
    if type(enable_gqa) is not bool:
        return "an enable_gqa that is no bool"
    if len(shape_q) < 3 and (len(shape_q) < 2 or enable_gqa):
        return _RANKS
    if shape_q[-1] % 8 or shape_q[-1] > 256:
        return _HEAD_DIM
    if 0 in shape_q:
        return _NO_ELEMENTS
    if not shape_q == shape_k == shape_v:
        shapes_reason = _against_shapes(shape_q, shape_k, shape_v, enable_gqa)
        if shapes_reason is not None:
            return shapes_reason
    if attn_mask is not None:
        mask_reason = _against_mask(attn_mask, len(shape_q), dtype, is_causal)
        if mask_reason is not None:
            return mask_reason
    elif type(is_causal) is not bool and is_causal is not _LOWER_RIGHT:
        return "an is_causal that is no bool"
    if scale is not None or type(dropout_p) is not float or dropout_p != 0.0:
        numbers_reason = _against_numbers(dropout_p, scale)
        if numbers_reason is not None:
            return numbers_reason
    if is_transformed() or getattr(forward_ad, "_current_level", 0) >= 0:
        return "a transform of torch.func, or forward-mode gradients"
    return None


def _against_shapes(shape_q: torch.Size, shape_k: torch.Size, shape_v: torch.Size, enable_gqa: Any) -> str | None:
    """Of shapes that differ, of which that of query is good by itself."""
    rank = len(shape_q)
    if len(shape_k) != rank or len(shape_v) != rank:
        return _RANKS
    if rank == 4:  # as most calls are, by their numbers alone: each slice of a shape takes as long as all of these
        (batch, heads, _, d), (batch_k, heads_kv, len_kv, d_k), (batch_v, heads_v, len_v, d_v) = shape_q, shape_k, shape_v
        is_whole = batch == batch_k == batch_v and heads_kv == heads_v and len_kv == len_v and d == d_k and len_kv and d_v
        if is_whole and not d_v % 8 and d_v <= 256 and (heads == heads_kv or (enable_gqa and heads_kv and not heads % heads_kv)):
            return None
    if shape_v[-1] % 8 or shape_v[-1] > 256:
        return _HEAD_DIM
    if 0 in shape_k or 0 in shape_v:
        return _NO_ELEMENTS
    if shape_k[-1] != shape_q[-1] or shape_k[-2] != shape_v[-2]:
        return "shapes that do not belong together"
    leading = shape_k[:-2]
    has_own_heads = leading == shape_q[:-2]
    is_grouped = not has_own_heads and enable_gqa and rank > 2 and leading[:-1] == shape_q[:-3] and not shape_q[-3] % shape_k[-3]
    if not (has_own_heads or is_grouped) or shape_v[:-2] != leading:
        return "batch or head dimensions that broadcast"
    return None


def _against_mask(attn_mask: Any, rank: int, dtype: torch.dtype, is_causal: Any) -> str | None:
    """rank, dtype: of query."""
    if type(attn_mask) not in _PLAIN:
        return "an attn_mask that is a subclass of Tensor"
    if is_causal is not False:
        return "attn_mask and is_causal at once"
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        return f"attn_mask of {attn_mask.dtype} beside {dtype}"
    of_mask = attn_mask.ndim
    if not 2 <= of_mask <= rank or (rank > 4 and any(size != 1 for size in attn_mask.shape[:-3])):
        return "an attn_mask of fewer than 2 dimensions, more than query, or several leading ones"
    if attn_mask.requires_grad and torch.are_deterministic_algorithms_enabled():
        return "deterministic gradients of attn_mask"
    return None


def _against_nested(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> str | None:
    if any(tensor.layout is not torch.jagged or tensor.dim() != 4 or tensor._ragged_idx != 2 for tensor in (query, key, value)):
        return "nested tensors of another form than [batch, heads, lengths, head_dim], jagged"
    if attn_mask is not None:
        return "attn_mask with nested tensors"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"dtype {query.dtype}"
    if not query.is_cuda and not (query.device.type == "cpu" and os.environ.get("FLASHGEN_CPU") == "1"):
        return f"tensors on {query.device.type}"
    if not query.size(1) == key.size(1) == value.size(1) or enable_gqa is not False:
        return "nested tensors of different heads"
    if key.offsets() is not value.offsets() or (is_causal and key.offsets() is not query.offsets()):
        return "nested tensors of different lengths"
    return _against_numbers(dropout_p, scale)


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, int, Real))


def _against_numbers(dropout_p: Any, scale: Any) -> str | None:
    if not (_is_number(dropout_p) and (scale is None or _is_number(scale))):
        return _NO_NUMBER  # PyTorch takes tensors of one element, and refuses others by its own errors
    if not 0.0 <= dropout_p < 1.0:
        return _DROPOUT
    if scale is not None and not 0.0 < scale < 1e38:
        return _SCALE
    return None


def _attended(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: Any, scale: float | None) -> torch.Tensor:
    """The call by flashgen. Raises ArgumentError for devices, strides, addresses and masks that kernels cannot take."""
    if query.is_nested:
        nested = attention_varlen(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=is_causal, scale=scale, dropout_p=float(dropout_p)
        )
        return nested.transpose(1, 2)
    if query.ndim != 4:
        return _of_other_rank(query, key, value, attn_mask, dropout_p, is_causal, scale)
    causal: Causal = is_causal is not False
    if causal and is_causal is not _LOWER_RIGHT and query.shape[2] != key.shape[2]:
        causal = "top_left"
    if attn_mask is None and dropout_p == 0.0:
        return attention(query, key, value, causal=causal, scale=scale, layout="bhsd")
    bias, mask = (None, attn_mask) if attn_mask is None or attn_mask.dtype is torch.bool else (attn_mask, None)
    return attention(query, key, value, causal=causal, scale=scale, layout="bhsd", bias=bias, mask=mask, dropout_p=float(dropout_p))


def _of_other_rank(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: float, is_causal: Any, scale: float | None
) -> torch.Tensor:
    """Of fewer or more dimensions than 4: leading ones are added, or become one."""
    leading = query.shape[:-3]
    if query.ndim < 4:
        missing = (None,) * (4 - query.ndim)
        q, k, v = query[missing], key[missing], value[missing]
    else:
        q, k, v = (tensor.reshape(-1, *tensor.shape[-3:]) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.ndim > 3:
            attn_mask = attn_mask.reshape(attn_mask.shape[-3:])
    out = _attended(q, k, v, attn_mask, dropout_p, is_causal, scale)
    return out.reshape(*leading, *out.shape[1:]) if query.ndim > 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _is_laid_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any) -> bool:
    """Whether `flashgen.attention` takes these strides, and this shape of a mask: in a graph nobody would catch its error."""
    for tensor in (query, key, value):
        *sizes, _ = tensor.shape
        *strides, last = tensor.stride()
        if last != 1 or any(size > 1 and stride % _ALIGNED for size, stride in zip(sizes, strides, strict=True)):
            return False
    if attn_mask is None:
        return True
    of_scores = (*query.shape[:-1], key.shape[-2])
    return all(own in (1, size) for own, size in zip(attn_mask.shape[::-1], of_scores[::-1], strict=False))


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether it is one of torch.nn.attention.bias, which is not imported for that."""
    return type(attn_mask).__name__ == "CausalBias" and hasattr(attn_mask, "variant")


def of_causal_bias(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any) -> torch.Tensor:
    """PyTorch's way with such a bias. It asks for torch.nn.functional's function by identity, which need not be PyTorch's own now."""
    return type(attn_mask)._dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, gqa)  # type: ignore[no-any-return]


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """What autocast makes of the tensors of a call: `before` would have it done by the dispatcher."""
    wanted = torch.get_autocast_dtype(tensors[0].device.type)

    def cast(tensor: Any) -> Any:
        is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(wanted) if is_number and tensor.dtype != wanted and tensor.device.type == tensors[0].device.type else tensor

    return tuple(map(cast, tensors))


_NO_MASK = {type(None), *_PLAIN}
_autocasts = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
