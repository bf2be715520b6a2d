"""What operations of warp-specialised kernels are about: stages that a producer fills and consumers release, and products under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .events import OperationKind, TileOperation
from .shared_tiles import SharedTiles

EMPTY = 8  # bytes from a stage's full mbarrier to its empty one: Pipeline in templates/tile/warpgroup/pipeline.cuh
WARPS = 4  # of a warpgroup


@dataclass
class Consumer:
    """A warpgroup that computes. Its products take place beside what it does next."""

    under_way: list[tuple[int, str]] = field(default_factory=list)  # products by the number of their group, and what they compute

    def complete(self, groups: int) -> list[str]:
        """What the products of the first groups compute, of those that were under way."""
        complete = [tile for group, tile in self.under_way if group < groups]
        self.under_way = self.under_way[len(complete) :]
        return complete


@dataclass
class _OutputConsumer(Consumer):
    """One that computes O."""

    waiting: list[str] = field(default_factory=list)  # tiles of S, from the oldest, whose P has not been multiplied with V yet
    query_tile: str = "0"  # whose O the last product with V was for


@dataclass
class StagedTiles(SharedTiles):
    """Tiles in shared memory, of which stages have some: each has a full mbarrier, at which copies count."""

    chunk: ClassVar[int] = 128  # a row of a panel, within which the swizzle permutes
    announced: dict[int, list[str]] = field(default_factory=dict)  # by a stage's full mbarrier, until the producer fills it again

    def copied(self, operation: TileOperation, touched: list[str]) -> list[str]:
        """The tiles that are on their way from now on: a stage's mbarrier may announce several."""
        self.put(operation.shared, touched)
        self.announced.setdefault(operation.mbarrier, []).extend(touched)
        self.lands_with |= dict.fromkeys(touched, operation.mbarrier)
        return touched

    def acquired(self, operation: TileOperation) -> list[str]:
        """What was in a stage that the producer has waited for, and will fill again."""
        return self.announced.pop(operation.mbarrier - EMPTY, [])

    def landed(self, operation: TileOperation) -> list[str]:
        """What a full stage has brought."""
        landed = self.announced.get(operation.mbarrier, [])
        for tile in landed:
            self.lands_with.pop(tile, None)
        return list(landed)


@dataclass
class PipelinedBlock(StagedTiles):
    """What a block of a forward pass holds: tiles in shared memory, and what its consumers compute."""

    consumers: dict[int, _OutputConsumer] = field(default_factory=dict)

    def meaning(self, operation: TileOperation, touched: list[str]) -> tuple[list[str], list[str]]:
        """Which tiles an operation is about, and which ones it needs; the state moves on. `touched`: by its bytes."""
        consumer = self.consumers.setdefault(operation.warps[0] // WARPS, _OutputConsumer())
        match operation.kind:
            case OperationKind.COPY:
                return self.copied(operation, touched), []
            case OperationKind.WAIT:
                return self._waited(operation, consumer), []
            case OperationKind.RELEASE:
                if operation.function == "producer_commit":  # of a stage that brings no tile: the end of the work
                    self.announced[operation.mbarrier] = []
                return self.announced.get(operation.mbarrier - EMPTY, []), []
            case OperationKind.PRODUCT:
                tiles, needs = _product(self.read(operation.shared), consumer)
                consumer.under_way += [(operation.group, tile) for tile in tiles]
                return tiles, needs
            case OperationKind.REDUCE:
                return consumer.waiting[-1:] if operation.function == "exp2_and_sum" else [f"O{consumer.query_tile}"], []
            case OperationKind.STAGE:
                self.put(operation.shared, [f"O{consumer.query_tile}"])
                return [f"O{consumer.query_tile}"], []
            case _:
                return touched, touched if operation.kind is OperationKind.STORE else []

    def _waited(self, operation: TileOperation, consumer: _OutputConsumer) -> list[str]:
        """What a wait was for: tiles that land, a stage's last tile that is released, products, or stores that have read their tile."""
        if operation.atom == "wgmma_complete":
            return consumer.complete(operation.group)
        if operation.atom == "cp_async_bulk_wait_group_read":
            return [f"O{consumer.query_tile}"]
        return self.acquired(operation) if operation.function == "producer_acquire" else self.landed(operation)


def _product(read: Sequence[str], consumer: _OutputConsumer) -> tuple[list[str], list[str]]:
    """S = Q K^T where a tile of K was read, else O += P V, with the P of the oldest S that has not been multiplied yet."""
    of = {letter: [tile[1:] for tile in read if tile[0] == letter] for letter in "QK"}
    if of["K"]:
        tiles = [f"S{query},{key}" for query in of["Q"] for key in of["K"]]
        consumer.waiting += tiles
        return tiles, list(read)
    factors, consumer.waiting = consumer.waiting[:1], consumer.waiting[1:]
    consumer.query_tile = factors[0][1:].partition(",")[0] if factors else consumer.query_tile
    return [f"O{consumer.query_tile}"], [*factors, *read]
