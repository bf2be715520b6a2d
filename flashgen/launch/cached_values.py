"""What only the device says of a call on a KV cache, lengths, padding and pages: checked where FLASHGEN_CHECK_SEQUENCES=1 asks for it."""

from __future__ import annotations

import torch

from flashgen.codegen.errors import ArgumentError

from .cached_arguments import CachedKeys
from .packed_arguments import tell_of_capture


def require_right_lengths(k_cache: torch.Tensor, where: CachedKeys, added: int = 0, table_name: str | None = None) -> None:
    """Raises ArgumentError for the first length, padding or used entry of a table that is wrong. Waits for the device.

    added: keys that the call appends; table_name: what the table is called where `where` does not tell. It cannot wait while a CUDA graph
    is being captured, and says so once.
    """
    if k_cache.is_cuda and torch.cuda.is_current_stream_capturing():
        return tell_of_capture()
    pages, page_size = k_cache.shape[:2]
    most, lengths = where.table_pages * page_size - added, where.cache_seqlens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= most:
            more = f" before {added} more" if added else ""
            raise ArgumentError(
                f"cache_seqlens must be from 0 to the keys that a sequence may have{more}, {most}; got {length} in entry {b}"
            )
    for b, padding in enumerate([] if where.cache_leftpad is None else where.cache_leftpad.tolist()):
        if not 0 <= padding <= lengths[b] + added:
            raise ArgumentError(f"cache_leftpad must be from 0 to the length {lengths[b] + added} of sequence {b}; got {padding}")
    if where.table is None:
        return
    name = table_name or ("block_table" if where.block_table is not None else "cache_batch_idx")
    rows = [row if isinstance(row, list) else [row] for row in where.table.tolist()]
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        used = -(-(length + added) // page_size) if page_size else 0
        for at, page in enumerate(row[:used]):
            if not 0 <= page < pages:
                raise ArgumentError(f"{name} must name pages from 0 to {pages - 1}; got {page} in entry {at} of sequence {b}")
