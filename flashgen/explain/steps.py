"""The schedule of a run: its tile operations with the names of their tiles, and what shared memory holds after each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.codegen.family import Traffic

from .computed_tiles import ComputedTiles, product_of
from .events import OperationKind, TileOperation
from .gradient_block import GradientBlock
from .pipelined import PipelinedBlock
from .shared_tiles import Resident, SharedTiles

# Of operands and buffers, for their tiles. A small letter is a gradient: o is dO. R: O between two steps; A: sums of dQ; L: lse; D: delta.
LETTERS = {"q": "Q", "k": "K", "v": "V", "out": "O", "S": "S", "P": "P", "running_rows": "R"}
LETTERS |= {"d_out": "o", "d_q": "q", "d_k": "k", "d_v": "v", "d_q_sum": "A", "lse": "L", "row_lse": "L", "row_delta": "D"}


@dataclass(frozen=True)
class Tiling:
    """How a tensor of one head divides into tiles, in bytes: of a row, and of a tile in it; tiles of all columns have `columns` 0."""

    row_bytes: int
    rows: int
    columns: int = 0

    def tiles(self, ranges: Sequence[tuple[int, int]]) -> list[str]:
        """The tiles that ranges of bytes touch: '3', or '3,1' where columns are divided, too."""
        found: dict[tuple[int, int], None] = {}
        for begin, end in ranges:
            for row in range(begin // self.row_bytes, (end - 1) // self.row_bytes + 1):
                first, last = max(begin, row * self.row_bytes), min(end, (row + 1) * self.row_bytes) - 1
                columns = range(first % self.row_bytes // self.columns, last % self.row_bytes // self.columns + 1) if self.columns else [0]
                found |= dict.fromkeys((row // self.rows, column) for column in columns)
        return [f"{row},{column}" if self.columns else str(row) for row, column in sorted(found)]


@dataclass(frozen=True)
class ScheduleStep:
    """A tile operation, as it is shown.

    tiles: that it loads, stores or computes; needs: those that it computes them from; shared: what is in shared memory after it
    """

    launch: int
    operation: TileOperation
    tiles: tuple[str, ...]
    needs: tuple[str, ...]
    shared: tuple[Resident, ...]

    @property
    def bytes_read(self) -> int:
        """From device memory."""
        return self.operation.bytes if self.operation.kind in (OperationKind.COPY, OperationKind.LOAD) else 0

    @property
    def bytes_written(self) -> int:
        """To device memory."""
        return self.operation.bytes if self.operation.kind is OperationKind.STORE else 0

    @property
    def bytes_added(self) -> int:
        """To sums in device memory, by atomic additions."""
        return self.operation.bytes if self.operation.kind is OperationKind.ADD else 0


@dataclass
class _BlockState(SharedTiles, ComputedTiles):
    """What a block holds: tiles in shared memory, copies by group, and what its warps have computed last."""

    result: str = "O"  # the letter of what its rows are in the end
    rows: list[str] = field(default_factory=list)  # tiles of delta, of a block that has no S

    def meaning(self, operation: TileOperation, touched: list[str]) -> tuple[list[str], list[str]]:
        """See PipelinedBlock."""
        return _meaning(operation, touched, self)


def schedule(launches: Sequence[Sequence[TileOperation]], tilings: Mapping[str, Tiling]) -> list[ScheduleStep]:
    """The steps of all launches, one after the other."""
    return [step for number, operations in enumerate(launches) for step in _steps_of(number, operations, tilings)]


def _steps_of(launch: int, operations: Sequence[TileOperation], tilings: Mapping[str, Tiling]) -> Iterator[ScheduleStep]:
    make: type[_BlockState] | type[PipelinedBlock] | type[GradientBlock] = _BlockState
    if any(each.is_pipelined for each in operations):
        make = GradientBlock if any(each.operand == "d_out" for each in operations) else PipelinedBlock
    block, state = -1, make()
    for operation in operations:
        if operation.block != block:
            block, state = operation.block, make()
        touched: list[str] = []
        if operation.operand:
            touched = [LETTERS[operation.operand] + tile for tile in tilings[operation.operand].tiles(operation.offsets)]
        tiles, needs = state.meaning(operation, touched)
        yield ScheduleStep(launch, operation, tuple(tiles), tuple(needs), state.residents())


def _meaning(operation: TileOperation, touched: list[str], state: _BlockState) -> tuple[list[str], list[str]]:
    """Which tiles an operation is about, and which ones it needs; `state` moves on."""
    match operation.kind:
        case OperationKind.COPY:
            state.put(operation.shared, touched)
            state.lands_with |= dict.fromkeys(touched, operation.group)
            return touched, []
        case OperationKind.WAIT if operation.atom == "cp_async_bulk_wait_group_read":
            return [f"{state.result}{state.query_tile}"], []
        case OperationKind.WAIT:
            landed = [tile for tile, group in state.lands_with.items() if group < operation.group]
            for tile in landed:
                del state.lands_with[tile]
            return landed, []
        case OperationKind.LOAD:
            if operation.operand in ("S", "d_q_sum", "d_out"):
                state.query_tile = touched[0][1:].split(",")[0]
            if operation.operand == "S":
                state.in_registers = touched
            if operation.operand == "d_q_sum":
                state.result = "q"
            if operation.operand == "d_out":
                state.rows = [f"D{state.query_tile}"]
            return touched, []
        case OperationKind.STORE | OperationKind.ADD:
            return touched, _sources(operation.operand, state)
        case OperationKind.PRODUCT:
            return product_of(state.read(operation.shared), state)
        case OperationKind.REDUCE:
            return state.in_registers or state.rows, []
        case OperationKind.STAGE:
            tiles = _staged(operation, state)
            state.put(operation.shared, tiles)
            return tiles, []
        case OperationKind.RELEASE:
            return [], []  # of kernels with stages: see pipelined.py


def _staged(operation: TileOperation, state: _BlockState) -> list[str]:
    """What goes into shared memory: dS from the scores in registers; dK and dV over K and V; else the output of the query tile.

    Before warps add up their parts of dK or dV, these take the stages' place: they are no tiles.
    """
    if operation.function == "store_operand":
        return list(state.in_registers)
    if operation.function in ("store_columns", "add_up_parts"):
        return [tile.lower() for tile in state.read(operation.shared) if tile[0] in "KV"]
    return [f"{state.result}{state.query_tile}"]


def _sources(operand: str, state: _BlockState) -> list[str]:
    if operand in ("S", "P"):
        return state.in_registers
    return [f"O{state.query_tile}"] if operand in ("out", "running_rows") else []  # gradients need what their products say


@dataclass
class MovedBytes:
    """Bytes between device memory and the SMs, by operand: read, written, and added to sums there."""

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)

    @property
    def all(self) -> Traffic:
        """Of all operands."""
        return Traffic(sum(self.read.values()), sum(self.written.values()), sum(self.added.values()))


def totals(steps: Sequence[ScheduleStep]) -> MovedBytes:
    """What all steps have moved."""
    found = MovedBytes()
    for step in steps:
        moves = ((found.read, step.bytes_read), (found.written, step.bytes_written), (found.added, step.bytes_added))
        for counts, moved in moves:
            if moved:
                counts[step.operation.operand] = counts.get(step.operation.operand, 0) + moved
    return found
