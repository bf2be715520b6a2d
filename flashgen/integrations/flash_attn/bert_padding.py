"""flash_attn.bert_padding: from padded tensors to packed tokens and back, with gradients. Shapes and results are FlashAttention's."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flashgen.codegen.errors import ArgumentError

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows of [rows, ...] that the indices name, int64 or int32 [n]: [n, ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """[first_axis_dim, ...] with these values, [n, ...], in the rows that the indices name, which differ, and 0 in others.

    indices: int64 or int32, as transformers takes them from boundaries in decoding
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`index_first_axis`, and the input, whose gradients are added up."""
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of [batch, length, ...] that a mask names, one sequence behind the other. Waits for the device.

    attention_mask: [batch, length], bool or int, not 0 where there is a token; unused_mask: the same for tokens that are kept, but unused
    Returns them, [tokens, ...], their indices among batch * length, cu_seqlens [batch + 1], the longest length, and used lengths [batch].
    Raises ArgumentError for a mask of another batch or length.
    """
    used = attention_mask.sum(-1, dtype=torch.int32)
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(-1, dtype=torch.int32)
    return (*_packed("attention_mask", hidden_states, mask, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The same where rows of the batch hold several sequences. attention_mask_in_length: [batch, length], their lengths, then zeros."""
    of_rows = attention_mask_in_length.sum(-1)
    lengths = attention_mask_in_length.flatten()
    mask = torch.arange(attention_mask_in_length.shape[-1], device=of_rows.device) < of_rows[:, None]
    return _packed("attention_mask_in_length", hidden_states, mask, lengths[lengths != 0])


def _packed(
    name: str, hidden_states: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    if mask.shape != hidden_states.shape[:2]:  # else indices would be those of other tokens
        wanted = f"hidden_states' batch and length {tuple(hidden_states.shape[:2])}"
        raise ArgumentError(f"{name} must have {wanted}; got the shape {tuple(mask.shape)}")
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The way back: [batch, seqlen, ...] from [tokens, ...] and their indices, 0 where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])
