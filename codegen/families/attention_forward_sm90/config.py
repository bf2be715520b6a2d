"""What may be chosen of the Hopper forward kernel."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged

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
    def stale_row_max(self) -> bool:
        """Whether the row max may be stale."""
        return self.row_max is RowMax.STALE

    @property
    def dynamic(self) -> bool:
        """Whether blocks claim their work tiles."""
        return self.scheduler is Scheduler.DYNAMIC
