"""FlashAttention's options as flashgen's calls take them, and errors by the names that FlashAttention's callers know.

FlashAttention takes any strides and head dims: a tensor whose elements of a head are apart is copied, and head dims grow to a multiple of 8
by zeros, which change no score and no output. So it is here; the copies grow with the tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, NoReturn

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.seen import Ends
from flashgen.codegen.typed import require_type

from ...launch.untraced import untraced
from ..renaming import by_other_names

NO_WINDOW = (-1, -1)
NO_OTHERS: Mapping[str, str] = {}  # names
_WIDTH, _WIDEST = 8, 256  # head dims are multiples of the one, up to the other
_THEIR_NAMES = {
    "scale": "softmax_scale",
    "window": "window_size",
    "chunk": "attention_chunk",
    "return_lse": "return_attn_probs",
    "return_dropout_mask": "return_attn_probs",
    "sinks": "s_aux",
    **{f"{name}_kv": f"{name}_k" for name in ("cu_seqlens", "max_seqlen", "seqused")},
}


def window_of(window_size: Any, causal: bool) -> Ends | None:
    """(left, right), of which a number below 0 opens its side, as `flashgen.attention` has it. A causal mask ends where it ends.

    The two may be tensors of one element, as FlashAttention's own tests give them. Raises ArgumentError.
    """
    try:
        if type(window_size) is tuple and window_size == NO_WINDOW:
            return None
        left, right = (index(end) for end in window_size)
    except (TypeError, ValueError, RuntimeError):
        given = shown(window_size)
        raise ArgumentError(f"window_size must be (left, right), two integers, of which -1 opens its side; got {given}") from None
    ends = (left if left >= 0 else None, right if right >= 0 and not causal else None)
    return None if ends == (None, None) else ends


def softcap_of(softcap: Any) -> Any:
    """None for 0 and below, which switch it off."""
    return None if isinstance(softcap, (int, float)) and softcap <= 0 else softcap


def length_of(length: Any, needed: bool = False) -> Any:
    """A number of tokens as an int. Of a tensor on a GPU, or in a graph, None, unless it is needed: it is a hint, for which nobody waits.

    What is no whole number stays as it is: the call names it.
    """
    if not isinstance(length, torch.Tensor) or length.numel() != 1 or length.is_floating_point():
        return length
    return int(length) if needed or not (length.is_cuda or is_compiling()) else None


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether kernels take these as they are. Each call asks."""
    return not (q.shape[-1] % _WIDTH or v.shape[-1] % _WIDTH) and q.stride()[-1] == k.stride()[-1] == v.stride()[-1] == 1


def fitted(tensor: Any) -> Any:
    """The tensor, or a copy with its elements side by side and its head dim a multiple of 8. What is no tensor stays as it is."""
    if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
        return tensor
    if tensor.shape[-1] % _WIDTH and tensor.shape[-1] <= _WIDEST:
        return pad(tensor, (0, -tensor.shape[-1] % _WIDTH))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def require_head_dim(name: str, tensor: Any, of: str, other: Any) -> None:
    """Raises ArgumentError unless `tensor` has the head dim of `other`. For `fitted`, after which 12 and 16 look alike.

    What is no tensor is left to the call, which names it.
    """
    if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor) and tensor.shape[-1:] != other.shape[-1:]:
        raise ArgumentError(f"{name} must have {of}'s head_dim {other.shape[-1]}; got {tensor.shape[-1]}")


def refuse(function: str, reasons: dict[str, str], **given: Any) -> None:
    """Raises ArgumentError for the first argument that is given, with the reason. None, False and 0 count as not given."""
    for name, value in given.items():
        if value is not None and value is not False and not (type(value) is int and value == 0):
            raise ArgumentError(f"{name} must be left out of flashgen's {function}: {reasons[name]}; got {shown(value)}")


def unpacked(name: str, tensor: Any, number: int) -> tuple[torch.Tensor, ...]:
    """The tensors that are one along the third dimension from the end. Raises ArgumentError."""
    if not isinstance(tensor, torch.Tensor):
        require_type(name, tensor, torch.Tensor)
    if tensor.ndim < 3 or tensor.shape[-3] != number:
        raise ArgumentError(f"{name} must have {number} entries in its third dimension from the end; got the shape {tuple(tensor.shape)}")
    parts: tuple[torch.Tensor, ...] = tensor.unbind(-3)
    return parts


@untraced
def raise_as_theirs(error: Exception, *, names: Mapping[str, str] = NO_OTHERS, **tensors: Any) -> NoReturn:
    """The error of a call, by FlashAttention's names of arguments.

    names: ours to theirs where a function has others than most; tensors: what must be tensors, by our names
    """
    theirs = {**_THEIR_NAMES, **names}
    if isinstance(error, (AttributeError, IndexError, RuntimeError, TypeError)):  # the last but one: of PyTorch's dispatcher
        for name, tensor in tensors.items():
            known = theirs.get(name, name)
            if not isinstance(tensor, torch.Tensor):
                require_type(known, tensor, torch.Tensor)
            if not tensor.ndim:
                raise ArgumentError(f"{known} must have dimensions; got a tensor of none") from None
    if type(error) is ArgumentError:
        raise by_other_names(error, theirs) from None
    raise error


def require_packed(q: Any, boundaries: Mapping[str, Any]) -> None:
    """Raises ArgumentError unless queries, and what says by these names where sequences lie, have the ranks and dtypes of packed ones."""
    if isinstance(q, torch.Tensor) and q.ndim != 3:
        raise ArgumentError(f"q must have 3 dimensions (tokens, heads, head_dim); got {q.ndim}")
    for name, tensor in boundaries.items():
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
        if tensor.ndim != 1 or not len(tensor) or tensor.dtype != torch.int32:
            shape = tuple(tensor.shape)
            raise ArgumentError(f"{name} must be torch.int32 of the shape (batch + 1,); got {tensor.dtype} of the shape {shape}")
