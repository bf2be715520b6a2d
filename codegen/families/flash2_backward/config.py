"""What may be chosen of the backward kernels of FlashAttention-2."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import tagged
from flashgen.codegen.ladder import GridOrder, LadderConfig, WarpSplit


@dataclass(frozen=True)
class Flash2BackwardConfig(LadderConfig):
    """What may be chosen freely.

    block_q:        query rows of a tile (Br in the paper): 32, 64 or 128, at most 16 for each warp, or just 16 where warps divide them
    block_kv:       keys of a tile (Bc in the paper), 16 or 32 for each warp, or any multiple of 16 where warps divide the queries
    warps:          warps of a block, a power of two; each has block_kv / warps keys, or 16 queries of each tile
    stages:         tiles of Q and dO that the ring of copies holds: stages - 1 tiles are loaded ahead
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    warp_split:     what the warps divide, the keys or the queries. The second reduces dK and dV of all warps in the end
    grid_order:     how blocks follow each other: the key tiles of one head, or the heads of one key tile
    """

    warp_split: WarpSplit = tagged("ws", WarpSplit.KEYS, added_later=True)
    grid_order: GridOrder = tagged("go", GridOrder.TILE_BATCH_HEAD)
