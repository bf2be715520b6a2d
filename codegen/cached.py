"""What a family needs for sequences in pages of a cache: see templates/tile/common/cached_sequences.cuh and cached_key_tiles.cuh.

How many keys a sequence has, and in which pages, only the device knows. So nothing of a launch depends on it: grids and buffers follow from
how many keys there is room for, and a captured graph stays right when lengths change.
"""

from __future__ import annotations

from .attention import reciprocal
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .sizes import common_divisor
from .workload import Workload

ENTRIES = 512  # of shared memory for sums of key tiles: each for one sequence, as long as there are no more
SUMS_BYTES = (ENTRIES + 1) * 4  # kBytes of CachedKeyTiles
ENTRY_BYTES, TILE_BYTES = 16, 16  # of shared memory: what copies must know of a key, and of a tile
TILES = ("sequences", "cached_sequences", "block_scan", "key_shares", "cached_key_tiles")
ATOM_ROWS = 8  # of the 128-byte swizzle: a box of a tensor copy begins with one in shared memory, so its rows are a multiple
_OF_DENSE = ("key_tiles_reciprocal", "batch_reciprocal")
_OF_CACHE = (
    *(Parameter("const int*", name) for name in ("cache_seqlens", "block_table", "cache_leftpad")),
    Parameter("i64", "block_table_row"),
    Parameter("u64", "page_size_reciprocal"),
    *(Parameter("int", name) for name in ("pages", "page_size")),
)


def with_cached_files(tiles: tuple[str, ...]) -> tuple[str, ...]:
    """Files of tile operations, with those of sequences in a cache in place of `key_shares`: each behind what it needs."""
    own = tuple(f"common/{name}" for name in TILES)
    at = tiles.index("common/key_shares")
    return (*tiles[:at], *own, *(name for name in tiles[at:] if name not in own))


def cached_bytes(stages: int, key_groups: int, group_kv: int, warps: int) -> int:
    """Of shared memory: entries of page tables, and sums of key tiles with what it takes to make them."""
    return (stages + 1) * key_groups * (group_kv * ENTRY_BYTES + TILE_BYTES) + warps * 4 + SUMS_BYTES


def sequence_block(block: ParameterBlock) -> ParameterBlock:
    """The parameters of a kernel with those that `CachedSequences` reads. len_kv: keys that there is room for."""
    return block.with_fields(*_OF_CACHE)


def sequence_values(call: Call) -> dict[str, int | float]:
    """Their numbers. Without pages there is no room for a key."""
    w = call.workload
    return {
        "block_table_row": call.views["block_table"].strides[0],
        "page_size_reciprocal": reciprocal(max(1, w.page_size)),
        "pages": w.pages,
        "page_size": w.page_size,
        "len_kv": w.len_kv if w.pages else 0,
    }


def cached_block(block: ParameterBlock) -> ParameterBlock:
    """The parameters of a decode kernel for sequences in a cache. key_tiles: of a head, at most."""
    left = ParameterBlock(tuple(field for field in block.fields if field.name not in _OF_DENSE))
    return sequence_block(left).with_fields(*(Parameter("int", name) for name in ("entries", "entry_sequences")))


def cached_values(values: dict[str, int | float], call: Call) -> dict[str, int | float]:
    """The numbers of a launch as `cached_block` has them."""
    each = entry_sequences(call.workload)
    left = {name: value for name, value in values.items() if name not in _OF_DENSE}
    return {**left, **sequence_values(call), "entries": -(-call.workload.batch // each), "entry_sequences": each}


def box_keys(workload: Workload, block_kv: int) -> int:
    """Keys of a box of tensor copies: as many as divide both tile and page.

    Where a sequence has one page alone, a tile: behind the page are zeros.
    """
    return common_divisor(block_kv, workload.page_size) if workload.table_pages > 1 else block_kv


def page_reasons(workload: Workload) -> list[str]:
    """Why tensor copies cannot take a cache: the rest of `call_refusals` is that of dense sequences."""
    reasons = []
    if not workload.pages:
        reasons.append("pages must be at least 1 for tensor copies; got 0")
    if workload.table_pages > 1 and workload.page_size % ATOM_ROWS:
        size = workload.page_size
        reasons.append(f"page_size must be a multiple of {ATOM_ROWS} for tensor copies where a sequence has several pages; got {size}")
    return reasons


def entry_sequences(workload: Workload) -> int:
    """Sequences of each entry."""
    return max(1, -(-workload.batch // ENTRIES))
