"""What may be chosen of the kernel of memory-efficient attention."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.ladder import LadderConfig


@dataclass(frozen=True)
class MemoryEfficientAttentionConfig(LadderConfig):
    """What may be chosen freely.

    block_q:        query rows of a tile (Br in the paper), 16 or 32 for each warp
    block_kv:       keys of a tile (Bc in the paper), a multiple of 16
    warps:          warps of a block; each owns block_q / warps rows
    stages:         tiles that the ring of copies holds: stages - 1 tiles are loaded ahead
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    """
