"""transformers' mask interface: what its models say of a mask becomes a `PreparedMask`, and never a tensor of len_q * len_kv."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from flashgen.codegen.errors import ArgumentError

from . import counts
from .mask_functions import MaskFunction, MaskParts, mask_parts
from .prepared import PreparedMask

# What other interfaces use to leave a mask out, or to make one of their own, and what says again what the mask function says.
_OF_NO_MATTER = {
    *("allow_is_causal_skip", "allow_is_bidirectional_skip", "allow_torch_fix", "local_size", "dtype", "config", "use_vmap"),
}
# Models whose layers make a bias of their own that holds the mask only if this is a tensor: theirs would not be causal.
_DROPS_BLOCK_MASKS = {"doge"}
_SEQUENCES = 2**32  # what a number of a sequence is multiplied by to make room for its chunks


def flashgen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> PreparedMask:
    """The mask of layers that have `q_length` queries from position `q_offset` on, and `kv_length` keys from position `kv_offset` on.

    mask_function: of batch, head, and the positions of a query and a key; a causal mask without
    attention_mask: bool, [batch, positions], True where a token is none of padding
    A padded batch becomes sequences that begin behind their padding, or a mask of keys. Keys of a static cache beyond its content end at a
    length on the device. Whether there is padding, and where, is asked once for each mask, which waits for the device, but not in a
    compiled graph, while a CUDA graph is captured, or for one query of each sequence with a static cache: keys are masked there. Raises
    ArgumentError for an argument that is not known, and for models whose layers drop masks that are no tensors.
    """
    if unknown := others.keys() - _OF_NO_MATTER:
        raise counts.refused_error(f"mask interface must get arguments that flashgen knows; got {', '.join(sorted(unknown))}")
    if getattr(others.get("config"), "model_type", None) in _DROPS_BLOCK_MASKS:
        raise counts.refused_error(
            f"attn_implementation must be 'sdpa' or 'eager' for {others['config'].model_type}, whose layers drop masks that are no "
            "tensors: else call the model with an attention_mask of four dimensions"
        )
    try:
        parts = mask_parts(mask_function)
    except ArgumentError as error:
        counts.count_refusal(error)
        raise
    shape = (batch_size, 1, q_length, kv_length)
    padding = None if attention_mask is None else _of_keys(attention_mask, kv_offset, kv_length)
    is_static = isinstance(q_offset, torch.Tensor)
    length = q_offset + q_length - kv_offset  # of keys up to the last query's
    at_hand = not parts.is_local() or (not is_static and length == kv_length)  # where queries are needs no length
    knows_lengths = parts.causal and not torch.is_grad_enabled() and (is_static or length <= kv_length)
    fits = parts.chunk is None or _reaches_next_chunk(q_offset, kv_offset, parts.chunk)
    if parts.others or not fits or not (at_hand or knows_lengths):
        function = _causal if mask_function is None else mask_function  # by `or` PyTorch 2.11 traces no functions
        return PreparedMask(shape, function=_as_function(function, padding, q_offset, kv_offset))
    prepared = PreparedMask(shape, causal=parts.causal, window=parts.window)
    if parts.sequence_ids is not None:
        return _packed(prepared, parts, parts.sequence_ids)
    if not at_hand:
        prepared.lengths = _lengths(batch_size, length, device)
    starts = None
    if padding is not None and (is_compiling() or _is_captured(padding) or (q_length == 1 and is_static)):
        prepared.keys = padding
    elif padding is not None:
        prepared.keys, starts = _looked_at(padding, length if parts.causal else kv_length)
    if parts.chunk is not None and (kv_offset or prepared.keys is not None):
        if starts is not None and not kv_offset:
            prepared.keys = None  # padding in front of all is of no chunk
        return _chunked(prepared, parts, parts.chunk, q_offset, kv_offset)
    prepared.chunk = parts.chunk
    if parts.causal and not torch.is_grad_enabled():
        prepared.starts = starts
        prepared.cached = prepared.lengths is not None or prepared.keys is not None
    return prepared


def _of_keys(attention_mask: torch.Tensor, kv_offset: int, kv_length: int) -> torch.Tensor:
    """[batch, kv_length]: keys that a mask of positions does not reach are padding."""
    if attention_mask.ndim != 2 or attention_mask.dtype != torch.bool:
        wanted = "bool, of shape (batch, positions)"
        raise counts.refused_error(f"attention_mask must be {wanted}; got {attention_mask.dtype}, {tuple(attention_mask.shape)}")
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _looked_at(padding: torch.Tensor, length: int | torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask of keys, if one is needed, and if it hides the first keys of sequences alone, how many, int32 [batch]; of `length` keys."""
    beyond = torch.arange(padding.shape[1], device=padding.device) >= length
    before = padding.cumsum(-1) == 0
    seen = padding | beyond
    has_none, has_it_in_front = torch.stack((seen.all(), (seen | before).all())).tolist()  # one wait for both
    if has_none:
        return None, None
    return padding, before.sum(-1, dtype=torch.int32) if has_it_in_front else None


def _reaches_next_chunk(q_offset: int | torch.Tensor, kv_offset: int, chunk: int) -> bool:
    """Whether the first query is of the first chunk that begins at a key of the call, or of a later one, whatever padding there is."""
    return kv_offset == 0 or (not isinstance(q_offset, torch.Tensor) and q_offset >= kv_offset + chunk - 1)


def _packed(prepared: PreparedMask, parts: MaskParts, ids: torch.Tensor) -> PreparedMask:
    """Of packed sequences, whose tokens see their own."""
    if parts.chunk is not None:
        positions = torch.arange(ids.shape[-1], device=ids.device) if parts.positions is None else parts.positions
        ids = ids * _SEQUENCES + positions // parts.chunk
        prepared.sequence_chunk = parts.chunk
    prepared.document_ids = ids
    return prepared


def _chunked(prepared: PreparedMask, parts: MaskParts, chunk: int, q_offset: int | torch.Tensor, kv_offset: int) -> PreparedMask:
    """Of chunks that may begin elsewhere than at the first key of a call."""
    _, _, len_q, len_kv = prepared.shape
    assert parts.first_tokens is not None
    first = parts.first_tokens
    if torch.is_grad_enabled():
        keys = torch.arange(len_kv, device=first.device) + kv_offset
        queries = torch.arange(len_q, device=first.device) + q_offset
        prepared.document_ids = ((queries - first[:, None]) // chunk, (keys - first[:, None]) // chunk)
        return prepared
    from_here = first - kv_offset
    starts = torch.where(from_here >= 0, from_here, from_here % chunk)  # no query sees what is before the next chunk
    prepared.chunk, prepared.cached, prepared.starts = chunk, True, starts.int()
    if prepared.keys is not None:
        columns = torch.arange(len_kv, device=first.device) + starts[:, None]
        prepared.keys = prepared.keys.gather(1, columns.clamp(max=len_kv - 1))
    return prepared


def _lengths(batch: int, length: int | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """int32 [batch], of a number that stays on the device."""
    if isinstance(length, torch.Tensor):
        return length.to(device=device, dtype=torch.int32).reshape(1).repeat(batch)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _as_function(mask_function: MaskFunction, padding: torch.Tensor | None, q_offset: int | torch.Tensor, kv_offset: int) -> MaskFunction:
    """Of the query's and the key's number in the call, to be traced."""
    first = q_offset.reshape(1).clone() if isinstance(q_offset, torch.Tensor) else None  # a cache counts on in place

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        position = query + (q_offset if first is None else first[0])
        visible = mask_function(batch, head, position, key + kv_offset)
        return visible if padding is None else visible & padding[batch, key]

    return seen
