"""What may be chosen of the generic decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged

from ..attention_forward.config import QueryPlace

# block_q, warp_q, warps, keys of a tile for each key group, blocks_per_sm: what was best somewhere on an H200. The last ones are for wide
# heads where shared memory is small.
SHAPES = (
    *((16, 16, 4, 16, 1), (16, 16, 4, 32, 1), (16, 16, 4, 16, 2), (16, 16, 8, 16, 1)),
    *((32, 16, 8, 16, 1), (32, 32, 4, 16, 1), (64, 16, 8, 32, 1), (64, 32, 8, 16, 1), (32, 16, 4, 16, 1), (16, 16, 2, 16, 1)),
)
SHAPES_OF_E4M3 = (  # first: more keys a tile, as they have half the bytes, and many warps, as each converts what it multiplies
    *((16, 16, 8, 32, 1), (16, 16, 4, 32, 2), (16, 16, 8, 16, 2), (16, 16, 4, 32, 3)),
    *((32, 16, 8, 64, 1), (32, 32, 4, 32, 2), (64, 16, 8, 64, 1), (64, 32, 8, 32, 1), (64, 32, 4, 32, 2)),
)


@dataclass(frozen=True)
class AttentionDecodeConfig(Config):
    """What may be chosen freely.

    block_q:        rows of a work item, 16, 32 or 64: queries of a key/value head times the query heads that share it
    warp_q:         rows of a warp, 16 or 32: block_q / warp_q warps read the same keys, and the others divide those of a tile
    block_kv:       key rows of a tile: each key group, of block_q / warp_q warps, has an equal part of them, a multiple of 16
    warps:          warps of a block, a multiple of block_q / warp_q
    stages:         tiles of K and V that shared memory holds: stages - 1 tiles are loaded ahead
    query:          where Q is read from: shared memory at each use, or registers that hold it
    blocks_per_sm:  blocks that stay on one SM at once
    """

    block_q: int = tagged("bq")
    warp_q: int = tagged("wq")
    block_kv: int = tagged("bk")
    warps: int = tagged("w")
    stages: int = tagged("s")
    query: QueryPlace = tagged("q")
    blocks_per_sm: int = tagged("bps", 1)

    @property
    def key_groups(self) -> int:
        """Groups of warps that divide the keys of a tile."""
        return self.warps * self.warp_q // self.block_q

    @property
    def group_kv(self) -> int:
        """Keys of a tile that a key group has."""
        return self.block_kv // self.key_groups
