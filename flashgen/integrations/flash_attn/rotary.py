"""Rotary embeddings as flash_attn.layers.rotary and flash_attn.ops.triton.rotary have them, by PyTorch, computed in fp32, with gradients.

flashgen rotates within its kernels where new keys come to a cache (`flashgen.attention_with_kvcache`).
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.typed import require_type

from .arguments import length_of

__all__ = ["apply_rotary", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_torch"]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Gives x with its first rotary_dim elements rotated by the angles of its positions; in x itself with inplace.

    x: [batch, length, heads, head_dim], or with cu_seqlens (int32, [batch + 1]) [tokens, heads, head_dim]
    cos, sin: [positions, rotary_dim / 2]
    interleaved: whether an element is rotated with the next one, or with that half of rotary_dim behind
    seqlen_offsets: the position of a sequence's first token: an int, or [batch], on the device
    max_seqlen: with cu_seqlens a hint, by which an int offset and the number of positions are checked

    A token whose position cos does not have, by a tensor of offsets or by cu_seqlens, stays as it is, as does one of no sequence: nobody
    waits for the device. Raises ArgumentError for an int offset at which cos does not have all positions, and for wrong shapes.
    """
    _check(x, cos, sin, seqlen_offsets, cu_seqlens)
    is_of_each = isinstance(seqlen_offsets, torch.Tensor)
    offset: Any = 0 if is_of_each else seqlen_offsets
    length = x.shape[1] if cu_seqlens is None else length_of(max_seqlen) or min(x.shape[0], 1)
    if cos.shape[0] < length:
        raise ArgumentError(f"cos must have a row of each position, at least {length}; got {cos.shape[0]}")
    require_int("seqlen_offsets", offset, 0, cos.shape[0] - length)
    if cu_seqlens is None and not is_of_each:
        rotated = _rotated(x, cos[offset : offset + length], sin[offset : offset + length], interleaved)
        return x.copy_(rotated) if inplace else rotated
    if cu_seqlens is None:
        offsets: Any = seqlen_offsets
        position = torch.arange(length, device=x.device) + offsets[:, None]
    else:
        tokens = torch.arange(x.shape[0], device=x.device)
        sequence = torch.bucketize(tokens, cu_seqlens[1:].to(tokens.dtype), right=True)
        first = cu_seqlens[:-1] - seqlen_offsets
        is_of_none = sequence == first.shape[0]
        position = (tokens - first[sequence.clamp_max(first.shape[0] - 1)]).masked_fill(is_of_none, -1)
    row = position.clamp(0, cos.shape[0] - 1)
    is_there = (position == row)[..., None]
    rotated = _rotated(x, cos[row].where(is_there, 1), sin[row].where(is_there, 0), interleaved)
    return x.copy_(rotated) if inplace else rotated


def _check(x: Any, cos: Any, sin: Any, seqlen_offsets: Any, cu_seqlens: Any) -> None:
    """Raises ArgumentError for what would be broadcast, or an error that names no argument."""
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
    axes = "(batch, length, heads, head_dim)" if cu_seqlens is None else "(tokens, heads, head_dim) beside cu_seqlens"
    if x.ndim != (4 if cu_seqlens is None else 3):
        raise ArgumentError(f"x must have the dimensions {axes}; got {tuple(x.shape)}")
    if cos.ndim != 2 or 2 * cos.shape[1] > x.shape[-1]:
        wanted = f"the shape (positions, rotary_dim / 2), of at most half of x's head_dim {x.shape[-1]}"
        raise ArgumentError(f"cos must have {wanted}; got {tuple(cos.shape)}")
    if sin.shape != cos.shape:
        raise ArgumentError(f"sin must have cos's shape {tuple(cos.shape)}; got {tuple(sin.shape)}")
    if isinstance(seqlen_offsets, torch.Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if seqlen_offsets.shape != (batch,):
            wanted = f"an int, or a tensor with an entry for each of {batch} sequences"
            raise ArgumentError(f"seqlen_offsets must be {wanted}; got the shape {tuple(seqlen_offsets.shape)}")


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """`apply_rotary_emb` in the argument order of flash_attn.ops.triton.rotary; conjugate: by the negative angles."""
    return apply_rotary_emb(x, cos, -sin if conjugate else sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def apply_rotary_emb_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The same by cos and sin of each token, [length, rotary_dim / 2] or [batch, length, rotary_dim / 2]."""
    return _rotated(x, cos, sin, interleaved)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """cos, sin: of each token, without the axis of heads."""
    cos, sin, width = cos[..., None, :].float(), sin[..., None, :].float(), 2 * cos.shape[-1]
    turned = x[..., :width].float()
    one, other = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    both = (one * cos - other * sin, one * sin + other * cos)
    found = (torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)).to(x.dtype)
    return found if width == x.shape[-1] else torch.cat((found, x[..., width:]), -1)


apply_rotary_emb_func = apply_rotary_emb
