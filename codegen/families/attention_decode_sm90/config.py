"""What may be chosen of the Hopper decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged

BARRIER_BYTES = 16  # of shared memory for each stage of a pipeline: Pipeline<1>::kBytes


@dataclass(frozen=True)
class AttentionDecodeSm90Config(Config):
    """What may be chosen freely.

    row_groups:  consumers that share key tiles, 1 or 2: each owns 64 packed rows, query heads of a group and their queries
    key_groups:  consumers of the same rows that take key tiles in turn, 1 or 2: one computes while the other waits
    block_kv:    key rows of a tile (Bc in the paper), a multiple of 16
    stages:      tiles of K and of V that shared memory holds, a multiple of key_groups
    heads:       neighbouring key/value heads that a stage has tiles of, 1 or 2, each with consumers of its own: two rows of 128 bytes that
                 lie side by side in memory are then read at a time
    """

    row_groups: int = tagged("rg", 1)
    key_groups: int = tagged("kg", 2)
    block_kv: int = tagged("bk", 64)
    stages: int = tagged("s", 4)
    heads: int = tagged("h", 1, added_later=True)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.sharers * self.key_groups

    @property
    def sharers(self) -> int:
        """Of them those that work on a stage together."""
        return self.heads * self.row_groups

    @property
    def rows(self) -> int:
        """Rows of a row tile at most."""
        return 64 * self.row_groups
