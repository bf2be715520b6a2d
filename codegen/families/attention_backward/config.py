"""What may be chosen of the generic backward kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged


class Hoisted(enum.Enum):
    """Which operands a warp reads from shared memory once, and keeps in registers while it walks over the queries."""

    NONE = "none"
    VALUES = "v"
    BOTH = "kv"


@dataclass(frozen=True)
class AttentionBackwardConfig(Config):
    """What may be chosen freely.

    block_q:        query rows of a tile (Br in the paper): 32, 64 or 128; what is loaded at once
    block_kv:       key rows of a block (Bc in the paper), 16 or 32 for each warp, or for each set of warps that share keys
    step_q:         queries of a step, a multiple of 16: the columns of S^T and dP^T that a warp holds in registers at once
    warps:          warps of a block, a power of two
    column_groups:  warps that share keys, 1 or 2. One warp keeps P^T and dS^T in registers for dV and dK; two hold half of dV and
                    dK each, and exchange P^T and dS^T through shared memory
    rows_dq:        rows of dQ that a warp computes, 16 or 32: fewer rows read K more often, more rows read dS more often
    stages:         tiles of Q and dO that shared memory holds, 1 or 2: with 2 the next tile is loaded while one is used
    hoisted:        operands that a warp keeps in registers: none, V, or K and V
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    """

    block_q: int = tagged("bq", 64)
    block_kv: int = tagged("bk", 64)
    step_q: int = tagged("sq", 32)
    warps: int = tagged("w", 4)
    column_groups: int = tagged("cg", 1)
    rows_dq: int = tagged("rq", 16)
    stages: int = tagged("s", 1)
    hoisted: Hoisted = tagged("h", Hoisted.NONE)
    blocks_per_sm: int = tagged("bps", 1)

    @property
    def key_rows(self) -> int:
        """Keys of a warp."""
        return self.block_kv * self.column_groups // self.warps
