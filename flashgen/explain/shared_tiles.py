"""Which tiles a block has in shared memory, by where its threads have copied them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Resident:
    """A tile in shared memory; landed: its copy has been waited for, so that all warps may read it."""

    tile: str
    landed: bool


@dataclass
class SharedTiles:
    """Tiles by their chunks, and of those on their way what says that they have landed: a group of copies, or an mbarrier."""

    chunk: ClassVar[int] = 16  # bytes that are always of one tile: what a thread copies at once
    chunks: dict[int, str] = field(default_factory=dict)
    lands_with: dict[str, int] = field(default_factory=dict)

    def put(self, addresses: Sequence[int], tiles: Sequence[str]) -> None:
        """Chunks get the tiles that are copied there: as many of each, in the order of addresses. Without tiles they hold none any more."""
        if not tiles:
            self.chunks = {chunk: tile for chunk, tile in self.chunks.items() if chunk * self.chunk not in addresses}
            return
        each = max(1, len(addresses) // max(1, len(tiles)))
        for position, address in enumerate(sorted(addresses)):
            self.chunks[address // self.chunk] = tiles[min(position // each, len(tiles) - 1)]

    def read(self, addresses: Sequence[int]) -> list[str]:
        """The tiles at these addresses."""
        at = [address // self.chunk for address in addresses]
        return list(dict.fromkeys(self.chunks[number] for number in at if number in self.chunks))

    def residents(self) -> tuple[Resident, ...]:
        """All of them."""
        return tuple(Resident(tile, tile not in self.lands_with) for tile in sorted(set(self.chunks.values())))
