"""What may be chosen of the Hopper forward kernel."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged

STAGE_BYTES = 16  # of shared memory for each stage of a pipeline: Pipeline<1>::kBytes
TILE_BYTES = 16  # of shared memory for the descriptor of each work tile: WorkTileInfo::kBytes in forward_storage.cuh
PACK_GQA = (1, 2, 4, 8, 16)  # 16: the rows of a warp, whose output goes to memory in one box


class RowMax(enum.Enum):
    """Which maximum a row's P is relative to: an early block's, until the row sum tells that it is too low, or always the present one."""

    STALE = "stale"
    EXACT = "exact"


class Scheduler(enum.Enum):
    """The tile scheduler: a block takes every so many-th work tile, or claims the next one from a counter."""

    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class AttentionForwardSm90Config(Config):
    """What may be chosen freely.

    warpgroups:    consumers, 1 to 3: each owns 64 query rows (Br in the paper is 64 of them together)
    block_kv:      key rows of a tile (Bc in the paper), a multiple of 16
    stages:        tiles of K, and of V, that shared memory holds
    query_stages:  query tiles that it holds: with 2, the next one is loaded while this one is worked on
    out_panels:    panels of 64 columns for each warp, through which the output goes to memory
    row_max:       stale, with conditional rescaling, or exact
    ping_pong:     whether consumers alternate between products and softmax (FlashAttention-3, section 3.1)
    scheduler:     the tile scheduler: how blocks come by their work tiles
    pack_gqa:      query heads of a group that share a Q tile, and so its K and V: 1, 2, 4, 8 or 16
    """

    warpgroups: int = tagged("w")
    block_kv: int = tagged("bk")
    stages: int = tagged("s", 2)
    query_stages: int = tagged("qs", 2)
    out_panels: int = tagged("op", 2)
    row_max: RowMax = tagged("m", RowMax.STALE)
    ping_pong: bool = tagged("pp", True)
    scheduler: Scheduler = tagged("s", Scheduler.STATIC)
    pack_gqa: int = tagged("pg", 1)

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return 64 * self.warpgroups

    @property
    def queries(self) -> int:
        """Queries of a tile, which have a row for each of its heads."""
        return self.block_q // self.pack_gqa

    @property
    def divides_blocks(self) -> bool:
        """Whether its tiles divide blocks of 128 queries and keys, of which masks are often made."""
        return 128 % self.block_q == 128 % self.block_kv == 0

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of pipelines of queries, keys, values and each consumer's sums, and of the tiles that a block knows."""
        stages = self.query_stages + 2 * self.stages + self.warpgroups
        return stages * STAGE_BYTES + self.work_slots * TILE_BYTES

    @property
    def work_slots(self) -> int:
        """Tiles that a block knows at a time: kWorkSlots in forward_storage.cuh."""
        return self.query_stages + 2

    @property
    def stale_row_max(self) -> bool:
        """Whether the row max may be stale."""
        return self.row_max is RowMax.STALE

    @property
    def dynamic(self) -> bool:
        """Whether blocks claim their work tiles."""
        return self.scheduler is Scheduler.DYNAMIC
