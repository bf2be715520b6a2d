"""The key_padding_mask of a call, [batch, len_kv]: what it must be, and what it is together with a mask of each score."""

from __future__ import annotations

import torch

from flashgen.codegen.errors import ArgumentError

from .arguments import require_dense


def require_padding_mask(key_padding_mask: torch.Tensor) -> None:
    """Raises ArgumentError for what becomes no mask by two further axes: later checks speak of a mask."""
    if key_padding_mask.is_nested or key_padding_mask.layout is not torch.strided:
        require_dense("key_padding_mask", key_padding_mask)
    if key_padding_mask.dtype is not torch.bool:
        raise ArgumentError(f"key_padding_mask must be torch.bool; got {key_padding_mask.dtype}")
    if key_padding_mask.ndim != 2:
        raise ArgumentError(f"key_padding_mask must have the shape (batch, len_kv); got {tuple(key_padding_mask.shape)}")


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
