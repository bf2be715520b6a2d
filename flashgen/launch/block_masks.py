"""Block masks, flashgen's own and FlexAttention's: one becomes a mask_mod, by which kernels find the tiles that it leaves.

Of each block of queries and keys it is known whether queries see none of the keys, those that its own mask_mod lets them see, or all. In
FlexAttention's what lists them is kv_indices and full_kv_indices; the others, which are for its own gradients, nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.expressions.blocks import SMALLEST_BLOCK

from ..traced.modifier import functions_given
from .built_in import CallOf
from .gpu import current_stream
from .kept_tiles import keeping_tiles
from .made_block_masks import ALL, PART, BlockMask, seen_by
from .tracers import may_be_kept

MaskMod = Callable[..., Any]
_ANY_LENGTH = (2**30, 2**30)  # FlexAttention's block size of a mask that hides nothing, whatever the lengths are
_SLICED = getattr(flex_attention, "_sliced_mask_mod_error", None)  # the mask_mod of a part of a block mask


class _Kept(NamedTuple):
    """What a block mask has become, and of what: its fields, how often its tensors had been written, and the stream of the call.

    Another stream may be ahead of that one: it makes its own. beside: the function for calls with another mask_mod, see `BlockMask`
    """

    function: MaskMod
    beside: MaskMod
    fields: tuple[Any, ...]
    versions: tuple[int, ...]
    stream: int


_kept: WeakKeyDictionary[FlexBlockMask, _Kept] = WeakKeyDictionary()


def with_block_mask(score_mod: Any, mask_mod: MaskMod | None, block_mask: Any, call: CallOf | None) -> tuple[Any, MaskMod]:
    """score_mod and mask_mod of a call that has a block mask, too: queries see what both let them see. Raises ArgumentError."""
    if isinstance(block_mask, BlockMask):
        _check_made(block_mask, call)
        of_mask = block_mask.states, block_mask.block_size, block_mask.mask_mod
        seen = seen_by(*of_mask) if is_dynamo_compiling() else block_mask.seen if mask_mod is None else block_mask.seen_beside
    elif isinstance(block_mask, FlexBlockMask):
        _check(block_mask, call)
        seen = _seen_by(block_mask) if is_dynamo_compiling() else _known(block_mask, call, mask_mod is None)
    else:
        wanted = "what flashgen.block_mask gives, or a BlockMask of torch.nn.attention.flex_attention"
        raise ArgumentError(f"block_mask must be {wanted}; got {shown(block_mask)}")
    score_mod, mask_mod = functions_given(score_mod, mask_mod)
    return score_mod, seen if mask_mod is None else _both(seen, mask_mod)


def _check_made(block_mask: BlockMask, call: CallOf | None) -> None:
    if call is None:
        return  # what is wrong with q or k is said elsewhere
    (batch, heads, len_q, len_kv), q, _ = call
    states, lengths = block_mask.states, block_mask.seq_lengths
    if lengths[0] != len_q or lengths[1] != len_kv:
        wanted = f"({len_q}, {len_kv}), those of the call"
        raise ArgumentError(f"block_mask must be for lengths {wanted}: make another one; got {tuple(lengths)}")
    if states.device != q.device:
        raise ArgumentError(f"block_mask must be on q's device {q.device}; got {states.device}")
    batches, of_heads = states.shape[0], states.shape[1]
    if not (_serves(batches, batch) and _serves(of_heads, heads)):
        wanted = f"for batch {batch} and heads {heads}, those of the call, or for all"
        raise ArgumentError(f"block_mask must be {wanted}; got batch {batches}, heads {of_heads}")


def _serves(size: int, most: int) -> bool:
    """Whether a mask for so many entries or heads is for as many as a call has. torch.compile compares symbols so, but not by `in`."""
    return size == 1 or size == most


def _check(block_mask: FlexBlockMask, call: CallOf | None) -> None:
    sizes = block_mask.BLOCK_SIZE
    if len(sizes) != 2 or any(size < SMALLEST_BLOCK or size % SMALLEST_BLOCK for size in sizes):
        raise ArgumentError(f"block_mask must have a BLOCK_SIZE of multiples of {SMALLEST_BLOCK}; got {shown(sizes)}")
    if block_mask.mask_mod is _SLICED:
        raise ArgumentError("block_mask must have a mask_mod, which a slice of one has lost: set it; got one without")
    if call is None:
        return  # what is wrong with q or k is said elsewhere
    (batch, heads, len_q, len_kv), q, _ = call
    if tuple(sizes) != _ANY_LENGTH and tuple(block_mask.seq_lengths) != (len_q, len_kv):
        wanted, advice = f"({len_q}, {len_kv})", "make another one, or cut this one by its _adjust"
        raise ArgumentError(f"block_mask must be for lengths {wanted}, those of the call: {advice}; got {tuple(block_mask.seq_lengths)}")
    listed = block_mask.kv_num_blocks
    if listed.device != q.device:
        raise ArgumentError(f"block_mask must be on q's device {q.device}; got {listed.device}")
    rows = -(-len_q // sizes[0])
    *leading, own = listed.shape
    fits = len(leading) <= 2 and all(_serves(size, most) for size, most in zip(leading[::-1], (heads, batch), strict=False))
    if not fits or own < rows:
        wanted = f"kv_num_blocks of the shape (1 or {batch}, 1 or {heads}, {rows}), for {rows} blocks of queries"
        raise ArgumentError(f"block_mask must have {wanted}; got {tuple(listed.shape)}")


def _known(block_mask: FlexBlockMask, call: CallOf | None, alone: bool) -> MaskMod:
    """The function of a block mask, made once as long as nothing of it changes. alone: of a call without another mask_mod."""
    m = block_mask
    tensors = [each for each in (m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices) if each is not None]
    device = tensors[0].device
    if call is None or not may_be_kept(device) or any(each.is_inference() for each in tensors):
        return _seen_by(m)
    fields, versions = (*tensors, m.mask_mod, m.BLOCK_SIZE, m.seq_lengths), tuple([each._version for each in tensors])
    stream = current_stream(device.index) if device.type == "cuda" else 0
    kept = _kept.get(m)
    if kept is None or kept.versions != versions or kept.stream != stream or not all(map(is_, kept.fields, fields)):
        with torch.inference_mode(False), torch.no_grad():
            states = _states(m)
            beside = seen_by(states, m.BLOCK_SIZE, m.mask_mod)
            kept = _kept[m] = _Kept(seen_by(keeping_tiles(states), m.BLOCK_SIZE, m.mask_mod), beside, fields, versions, stream)
    return kept.function if alone else kept.beside


def _seen_by(block_mask: FlexBlockMask) -> MaskMod:
    """Its function. torch.compile traces this."""
    return seen_by(_states(block_mask), block_mask.BLOCK_SIZE, block_mask.mask_mod)


def _both(seen: MaskMod, mask_mod: MaskMod) -> MaskMod:
    def both(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen(batch, head, query, key) & mask_mod(batch, head, query, key)

    return both


def _states(block_mask: FlexBlockMask) -> torch.Tensor:
    """uint8 [1 or batch, 1 or heads, blocks of queries, blocks of keys]."""
    m = block_mask
    columns = max(1, -(-m.seq_lengths[1] // m.BLOCK_SIZE[1]))
    states = m.kv_indices.new_zeros((*m.kv_num_blocks.shape, columns + 1), dtype=torch.uint8)
    for state, count, indices in (
        (PART, m.kv_num_blocks, m.kv_indices),
        (ALL, m.full_kv_num_blocks, m.full_kv_indices),
    ):
        if count is not None and indices is not None:
            position = torch.arange(indices.shape[-1], device=indices.device)
            listed = (position < count.unsqueeze(-1)) & (indices >= 0) & (indices < columns)
            index = torch.where(listed, indices, columns).long()  # what is not listed: into a column of nobody
            # By a tensor, not by a number, of which PyTorch 2.11's Inductor makes int64 where the index has one column.
            states.scatter_(-1, index, torch.full_like(index, state, dtype=torch.uint8))
    states = states[..., :columns]
    while states.ndim < 4:
        states = states.unsqueeze(0)
    return states
