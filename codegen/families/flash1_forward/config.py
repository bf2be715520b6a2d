"""What may be chosen of the forward kernel of FlashAttention's first version."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashgen.codegen.config import tagged
from flashgen.codegen.ladder import LadderConfig


class ParallelOver(enum.Enum):
    """What blocks have of their own: a head, as in the paper, or a share of a head's query tiles, as in release 1.0."""

    HEADS = "heads"
    QUERIES = "queries"


@dataclass(frozen=True)
class Flash1ForwardConfig(LadderConfig):
    """What may be chosen freely.

    block_q:        query rows of a tile (Br in the paper), 16 or 32 for each warp
    block_kv:       keys of a tile (Bc in the paper), a multiple of 16
    warps:          warps of a block; each owns block_q / warps rows
    stages:         tiles that the ring of copies holds: stages - 1 tiles are loaded ahead
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    parallel_over:  whether a head has one block, or several, each of which has some of its query tiles
    """

    parallel_over: ParallelOver = tagged("po", ParallelOver.QUERIES)
