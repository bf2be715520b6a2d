"""What may be chosen of the Hopper forward kernel."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged

PACKED_HEADS = (1, 2, 4, 8, 16)  # 16: the rows of a warp, whose output goes to memory in one box


class Reference(enum.Enum):
    """What a row's probabilities are relative to."""

    LAZY = "lazy"
    MAXIMUM = "maximum"


class Scheduler(enum.Enum):
    """How a block comes by its next query tile: so many on, or the next that nobody has claimed."""

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
    reference:     of a row: the maximum of an early block until the sum outgrows it, or following the maximum of each block
    turns:         whether consumers take turns at issuing products
    scheduler:     how blocks come by their tiles
    packed_heads:  query heads of a group that share a tile, and so its keys and values: 1, 2, 4, 8 or 16
    """

    warpgroups: int = tagged("w")
    block_kv: int = tagged("bk")
    stages: int = tagged("s", 2)
    query_stages: int = tagged("qs", 2)
    out_panels: int = tagged("op", 2)
    reference: Reference = tagged("r", Reference.LAZY)
    turns: bool = tagged("t", True)
    scheduler: Scheduler = tagged("s", Scheduler.STATIC)
    packed_heads: int = tagged("ph", 1)

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return 64 * self.warpgroups

    @property
    def queries(self) -> int:
        """Queries of a tile, which have a row for each of its heads."""
        return self.block_q // self.packed_heads

    @property
    def lazy(self) -> bool:
        """Whether the reference is lazy."""
        return self.reference is Reference.LAZY

    @property
    def dynamic(self) -> bool:
        """Whether tiles are claimed."""
        return self.scheduler is Scheduler.DYNAMIC

    def describe(self) -> str:
        """For the header of the rendered file."""
        return ", ".join(f"{name} {value}" for name, value in self.to_json().items())
