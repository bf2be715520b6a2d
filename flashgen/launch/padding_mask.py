"""The key_padding_mask of a call, [batch, len_kv]: what it must be, and what it is together with a mask of each score."""

from __future__ import annotations

import torch

from flashgen.codegen.errors import ArgumentError

from .arguments import require_dense
from .built_in import CallOf


def require_padding_mask(key_padding_mask: torch.Tensor, call: CallOf | None) -> None:
    """Raises ArgumentError for what is no mask of the call's keys. Later checks would speak of a mask, which nobody has given.

    call: None where nobody asks for its sizes yet, as each call would have to: it does so when a mask is refused
    """
    if key_padding_mask.is_nested or key_padding_mask.layout is not torch.strided:
        require_dense("key_padding_mask", key_padding_mask)
    if key_padding_mask.dtype is not torch.bool:
        raise ArgumentError(f"key_padding_mask must be torch.bool; got {key_padding_mask.dtype}")
    if key_padding_mask.ndim != 2:
        raise ArgumentError(f"key_padding_mask must have the shape (batch, len_kv); got {tuple(key_padding_mask.shape)}")
    if call is None:
        return
    (batch, _, _, len_kv), q, _ = call
    rows, columns = key_padding_mask.shape
    if (rows != batch and rows != 1) or (columns != len_kv and columns != 1):
        wanted = f"(batch, len_kv) = ({batch}, {len_kv}), or one that broadcasts to it"
        raise ArgumentError(f"key_padding_mask must have the shape {wanted}; got ({rows}, {columns})")
    if isinstance(q, torch.Tensor) and key_padding_mask.device != q.device:
        raise ArgumentError(f"key_padding_mask must be on q's device {q.device}; got {key_padding_mask.device}")


def both_masks(mask: torch.Tensor, key_padding_mask: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
    """Keys that both let queries see. of_keys: key_padding_mask with the axes of a mask. Raises ArgumentError."""
    if mask.is_nested or mask.layout is not torch.strided:
        require_dense("mask", mask)
    if mask.dtype is not torch.bool:
        raise ArgumentError(f"mask must be torch.bool; got {mask.dtype}")
    if key_padding_mask.device != mask.device:
        raise ArgumentError(f"key_padding_mask must be on mask's device {mask.device}; got {key_padding_mask.device}")
    if any(own != other and own != 1 and other != 1 for own, other in zip(of_keys.shape[::-1], mask.shape[::-1], strict=False)):
        given = f"{tuple(key_padding_mask.shape)} beside a mask of {tuple(mask.shape)}"
        raise ArgumentError(f"key_padding_mask must have the shape (batch, len_kv), as mask; got {given}")
    return mask & of_keys
