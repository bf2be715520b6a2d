"""What operations of warp-specialised backward kernels are about: as in pipelined.py, with key tiles outside and query tiles inside."""

from __future__ import annotations

from dataclasses import dataclass, field

from .computed_tiles import ComputedTiles, product_of
from .events import OperationKind, TileOperation
from .pipelined import EMPTY, WARPS, Consumer, StagedTiles


@dataclass
class _KeyConsumer(Consumer, ComputedTiles):
    """A warpgroup with some of the keys of a tile."""

    staged: list[str] = field(default_factory=list)  # dS in shared memory, until both consumers have met
    leaving: list[str] = field(default_factory=list)  # dK and dV in shared memory, until tensor copies have read them


@dataclass
class GradientBlock(StagedTiles):
    """Its stages have query tiles and numbers of their rows. The first stages' mbarriers announce K and V, too, which stay."""

    consumers: dict[int, _KeyConsumer] = field(default_factory=dict)

    def meaning(self, operation: TileOperation, touched: list[str]) -> tuple[list[str], list[str]]:
        """See PipelinedBlock."""
        consumer = self.consumers.setdefault(operation.warps[0] // WARPS, _KeyConsumer())
        match operation.kind:
            case OperationKind.COPY:
                return self.copied(operation, touched), []
            case OperationKind.WAIT:
                return self._awaited(operation, consumer), []
            case OperationKind.RELEASE:
                return _of_stage(self.announced.get(operation.mbarrier - EMPTY, [])), []
            case OperationKind.PRODUCT:
                tiles, needs = product_of(self.read(operation.shared), consumer)
                consumer.under_way += [(operation.group, tile) for tile in tiles]
                return tiles, needs
            case OperationKind.STAGE:
                return self._staged(operation, consumer), []
            case _:
                return touched, touched if operation.kind is OperationKind.STORE else []

    def _staged(self, operation: TileOperation, consumer: _KeyConsumer) -> list[str]:
        """dS, for the products of both consumers; at the end dK and dV, in the places of K and V."""
        if operation.function == "store_transposed":
            tiles = consumer.staged = list(consumer.in_registers)
        else:
            tiles = [tile.lower() for tile in self.read(operation.shared)]
            consumer.leaving += tiles
        if tiles:  # else zeros, of keys that no query sees: K and V were not loaded
            self.put(operation.shared, tiles)
        return tiles

    def _awaited(self, operation: TileOperation, consumer: _KeyConsumer) -> list[str]:
        """See PipelinedBlock. Consumers meet where the dS of both is in shared memory; once more, where nobody reads K and V any more."""
        match operation.atom:
            case "wgmma_complete":
                return consumer.complete(operation.group)
            case "bar_sync":
                met, consumer.staged = consumer.staged, []
                return met
            case "cp_async_bulk_wait_group_read":
                read, consumer.leaving = consumer.leaving, []
                return read
        return _of_stage(self.acquired(operation)) if operation.function == "producer_acquire" else self.landed(operation)


def _of_stage(tiles: list[str]) -> list[str]:
    """Without K and V."""
    return [tile for tile in tiles if tile[0] not in "KV"]
