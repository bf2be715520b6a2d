"""What may be chosen of FlashAttention-2's forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import tagged
from flashgen.codegen.ladder import GridOrder, LadderConfig, WarpSplit


@dataclass(frozen=True)
class Flash2ForwardConfig(LadderConfig):
    """What may be chosen freely.

    block_q:        query rows of a tile (Br in the paper): 16 or 32 for each warp, or 16 or 32 in all where warps divide the keys
    block_kv:       keys of a tile (Bc in the paper), a multiple of 16
    warps:          warps of a block; each owns block_q / warps rows, or block_kv / warps keys of each tile
    stages:         tiles that the ring of copies holds: stages - 1 tiles are loaded ahead
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    warp_split:     what the warps divide, the queries as version 2 does or, as version 1 did, the keys: then O, row_max and row_sum of all
                    warps are reduced in the end
    grid_order:     how blocks follow each other: the query tiles of one head, or the heads of one query tile
    """

    warp_split: WarpSplit = tagged("ws", WarpSplit.QUERIES)
    grid_order: GridOrder = tagged("go", GridOrder.TILE_BATCH_HEAD)
