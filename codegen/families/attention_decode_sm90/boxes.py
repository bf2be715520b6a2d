"""How keys in pages of a cache are copied: key tiles are boxes within pages, see templates/tile/warpgroup/decode_boxes.cuh."""

from __future__ import annotations

from flashgen.codegen.attention import reciprocal
from flashgen.codegen.cached import SUMS_BYTES, box_keys, cached_block, cached_values
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock

from .config import BARRIER_BYTES, AttentionDecodeSm90Config
from .rows import seen_key_tiles

PART_COST = 2  # key tiles that a part of a head takes as long as, beside its own: kPartCost in cached_key_tiles.cuh
MOST_LOCAL_ROWS = 32  # of a key/value head, with a window or chunks: parts of more cost as much as the keys there
_BATCHES, _BATCH_BOXES, _BOX_BYTES = 4, 32, 16  # kBoxBatches, a warp's lanes, and what each of them keeps, in decode_storage.cuh
_WARP_BYTES = 4  # of BlockScan, for each warp
_NUMBERS = ("box_keys", "border", "tile_boxes", "batch_tiles")
_DIVISORS = ("border", "tile_boxes")


def box_block(block: ParameterBlock) -> ParameterBlock:
    """The parameters with those of a cache and of boxes."""
    more = (*(Parameter("u64", f"{name}_reciprocal") for name in _DIVISORS), *(Parameter("int", name) for name in _NUMBERS))
    return cached_block(block).with_fields(*more)


def box_values(values: dict[str, int | float], call: Call, block_kv: int, queries: int) -> dict[str, int | float]:
    """The numbers of a launch as `box_block` has them.

    border: of keys, at a multiple of which a sequence's first tile begins; key_tiles: of a head, at most. `queries`: of a tile of rows.
    """
    keys = box_keys(call.workload, block_kv)
    numbers = {
        "box_keys": keys,
        "border": keys if call.workload.table_pages > 1 else 1,
        "tile_boxes": block_kv // keys,
        "batch_tiles": _BATCH_BOXES // (block_kv // keys),
    }
    reciprocals = {f"{name}_reciprocal": reciprocal(numbers[name]) for name in _DIVISORS}
    most = seen_key_tiles(call.problem, call.workload, queries, block_kv, numbers["border"] - 1)
    return {**cached_values(values, call), **numbers, **reciprocals, "key_tiles": most}


def box_bytes(config: AttentionDecodeSm90Config) -> int:
    """Shared memory of boxes, lengths and what adds them up."""
    boxes = _BATCHES * (_BATCH_BOXES * _BOX_BYTES + BARRIER_BYTES)
    return boxes + 4 * (config.consumers + 1) * _WARP_BYTES + SUMS_BYTES
