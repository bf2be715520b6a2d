"""From records of threads to tile operations: what the warps of a block do at one line between two barriers is one `TileOperation`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashgen.build.emulator.trace import LaunchTrace

from .counts import LANES, RecordArray, counted_once, counts_before
from .lines import CallLines, ShownText

WARPGROUP = 4 * LANES


class OperationKind(enum.StrEnum):
    """What warps do."""

    COPY = "copy"  # asynchronously, from device memory to shared memory
    LOAD = "load"  # from device memory to registers
    STORE = "store"  # from registers to device memory
    ADD = "add"  # from registers to sums in device memory, atomically
    PRODUCT = "product"
    REDUCE = "reduce"  # lanes of a row find its maximum, or its sum
    STAGE = "stage"  # from registers to shared memory
    WAIT = "wait"  # for copies, products, and other warps
    RELEASE = "release"  # a stage of shared memory to those who fill it, or a turn to those who wait for it


_OF_OPS = {
    "cp_async": OperationKind.COPY,
    "cp_async_bulk_load": OperationKind.COPY,
    "cp_async_bulk_tensor_load": OperationKind.COPY,
    "cp_async_bulk_tensor_store": OperationKind.STORE,
    "shfl_sync_bfly": OperationKind.REDUCE,
    "vote_sync_any": OperationKind.REDUCE,
    "store_shared": OperationKind.STAGE,
    "red_add": OperationKind.ADD,
    "cp_async_wait_group": OperationKind.WAIT,
    "barrier_sync": OperationKind.WAIT,
    "mbarrier_try_wait_parity": OperationKind.WAIT,
    "wgmma_complete": OperationKind.WAIT,
    "cp_async_bulk_wait_group_read": OperationKind.WAIT,
    "bar_sync": OperationKind.WAIT,
    "mbarrier_arrive": OperationKind.RELEASE,
    "bar_arrive": OperationKind.RELEASE,
}
_PRODUCTS = ("mma_sync", "wgmma_ss", "wgmma_rs", "wgmma_operand")  # how the names of atoms begin
_ROLE_WAITS = ("mbarrier_try_wait_parity", "bar_sync")  # waits of all threads of a role
_KINDS = tuple(OperationKind)
# What backward kernels do in case a row has huge scores, or few keys, is left out, as in their byte formulas: an operand, a function that
# reads lse, and one that computes rows once more. So are counters of their progress.
_LEFT_OUT, _GUARDS = ("huge_tiles", "d_q_progress"), ("any_huge_row", "write_exact_rows")


@dataclass(frozen=True)
class TileOperation:
    """What warps of a block do to tiles at one line of the kernel, between two barriers; of a warp-specialised one, between two waits.

    segment:     how many barriers the block has passed
    operand:     what is loaded or stored; empty for other kinds
    offsets:     bytes of the operand that are touched, from its first one: (begin, end) of each adjacent range
    bytes:       that move between device memory and the SM, a warp's load of the same bytes by several lanes counted once
    warps:       that take part
    shared:      addresses in shared memory that are written or, by a product, read
    group:       of copies and wgmma, how many groups their threads had committed before; of a wait, how many have ended after it
    mbarrier:    at which copies count, or that is waited for or arrived at; 0: none
    atom:        what the first of the warps is at
    """

    block: int
    segment: int
    kind: OperationKind
    operand: str
    offsets: tuple[tuple[int, int], ...]
    bytes: int
    warps: tuple[int, ...]
    shared: tuple[int, ...]
    group: int
    mbarrier: int
    lines: CallLines
    atom: str
    function: str

    @property
    def is_pipelined(self) -> bool:
        """Whether only a warp-specialised kernel does it."""
        return self.atom.startswith(("mbarrier", "wgmma"))


def tile_operations(trace: LaunchTrace, text: ShownText) -> list[TileOperation]:
    """Those of one launch: block by block, in the order of the first warp's program, or in that of time if warps have several programs."""
    launch = _Launch(trace, text)
    return [launch.operation(group) for group in launch.groups()]


class _Launch:
    """A trace, with what each of its records belongs to."""

    def __init__(self, trace: LaunchTrace, text: ShownText) -> None:
        self.trace, self.text, records = trace, text, trace.records
        storing = [number for number, stack in trace.stacks.items() if text.operation(stack).startswith("store_")]
        self.is_pipelined = "wgmma_commit_group" in trace.ops
        self.kinds = _kinds(trace, storing, self.is_pipelined)
        self.block, thread = records["block"].astype(np.int64), records["thread"].astype(np.int64)
        self.segment = counts_before(self.block, thread, _is(trace, "barrier_sync"))
        self.committed = counts_before(self.block, thread, _is(trace, "cp_async_commit_group"))
        self.columns: tuple[RecordArray, ...] = ()  # what else records of one operation have in common
        if self.is_pipelined:
            meets, warpgroup = _is(trace, "barrier_sync"), thread // WARPGROUP
            self.committed = counts_before(self.block, warpgroup, _is(trace, "wgmma_commit_group"))
            complete = counts_before(self.block, warpgroup, _is(trace, "wgmma_complete"))
            waits = counts_before(self.block, thread, np.isin(records["op"], [_op(trace, name) for name in _ROLE_WAITS]))
            self.columns = (np.where(meets, -1, warpgroup), self.committed, complete, waits)
        self.calls = {number: text.call(stack) for number, stack in trace.stacks.items()}
        self.reads = _operand_reads(trace)
        self.once = counted_once(trace, self.block, thread)

    def groups(self) -> list[RecordArray]:
        """The positions of the records of each operation."""
        chains: dict[tuple[int, ...], int] = {}
        chain_of = np.zeros(max(self.calls, default=0) + 1, np.int64)
        for number, call in self.calls.items():
            chain_of[number] = chains.setdefault(call.kernel, len(chains))
        wait = self.kinds == _KINDS.index(OperationKind.WAIT)
        chain = chain_of[self.trace.records["stack"]]
        if not self.is_pipelined:
            chain = np.where(wait, -1, chain)  # a wait and the barrier behind it are one
        columns = (self.block, self.segment, self.kinds, chain, self.trace.records["operand"].astype(np.int64), *self.columns)
        positions = np.flatnonzero(self.kinds >= 0)
        if not len(positions):
            return []
        keys = np.stack(columns, axis=1)[positions]
        by_key = np.lexsort(keys.T)  # stable
        begins = np.flatnonzero((np.diff(keys[by_key], axis=0) != 0).any(axis=1)) + 1
        groups = np.split(positions[by_key], begins)
        if self.is_pipelined:
            return sorted(groups, key=lambda group: (self.block[group[0]], self.led(group)))
        return sorted(groups, key=lambda group: (self.block[group[0]], self.segment[group[0]], wait[group[0]], group[0]))

    def led(self, group: RecordArray) -> int:
        """When the first of the threads that take part began: others of its role may be ahead."""
        return int(group[np.argmin(self.trace.records["thread"][group])])

    def operation(self, group: RecordArray) -> TileOperation:
        """What the records at these positions are together."""
        trace, records = self.trace, self.trace.records[group]
        first, kind = records[0], _KINDS[self.kinds[group[0]]]
        atom = trace.ops[first["op"]]
        operand = trace.operands[first["operand"]] if first["operand"] >= 0 else ""
        stacks = [int(number) for number in dict.fromkeys(records["stack"].tolist())]
        lines = CallLines(
            tuple(dict.fromkeys(line for number in stacks for line in self.calls[number].kernel)),
            tuple(sorted({line for number in stacks for line in self.calls[number].tile})),
        )
        committed = int(self.committed[group[0]])
        shared: tuple[int, ...] = ()
        if kind is OperationKind.PRODUCT:
            shared = tuple(dict.fromkeys(address for position in group.tolist() for address in self.reads.get(position, [])))
            shared = shared or tuple(np.unique(records["shared"][records["op"] == _op(trace, "wgmma_operand")]).tolist())
        elif kind in (OperationKind.COPY, OperationKind.STAGE):
            shared = tuple(np.unique(records["shared"] // 16 * 16).tolist())
        elif kind is OperationKind.WAIT:
            waits = records[records["op"] == _op(trace, "cp_async_wait_group")]
            committed = committed - int(waits["shared"].min()) if len(waits) else 0
            if atom == "wgmma_complete":  # says how many
                committed = int(first["shared"])
        return TileOperation(
            block=int(first["block"]),
            segment=int(self.segment[group[0]]),
            kind=kind,
            operand=operand,
            offsets=_ranges(records) if operand else (),
            bytes=int(records["bytes"][self.once[group]].sum()) if operand else 0,
            warps=_warps(records, atom),
            shared=shared,
            group=committed,
            mbarrier=int(first["shared"] if atom.startswith("mbarrier") else first["mbarrier"]),
            lines=lines,
            atom=atom,
            function=next(filter(None, (self.text.operation(trace.stacks[number]) for number in stacks)), ""),
        )


def _warps(records: RecordArray, atom: str) -> tuple[int, ...]:
    """Who takes part. For all warps of a warpgroup that meet at an atom one tells."""
    if atom.startswith("wgmma"):
        first = int(records["thread"][0]) // WARPGROUP * 4
        return tuple(range(first, first + 4))
    return tuple(np.unique(records["thread"] // LANES).tolist())


def _op(trace: LaunchTrace, name: str) -> int:
    return trace.ops.index(name) if name in trace.ops else -1


def _is(trace: LaunchTrace, name: str) -> RecordArray:
    found: RecordArray = trace.records["op"] == _op(trace, name)
    return found


def _kinds(trace: LaunchTrace, storing: list[int], is_pipelined: bool) -> RecordArray:
    """Of each record the place of its kind in `_KINDS`, -1 for what no operation counts. A copy of zeros touches no device memory."""
    kinds = np.full(len(trace.records), -1, np.int64)
    for name in trace.ops:
        kind = OperationKind.PRODUCT if name.startswith(_PRODUCTS) else _OF_OPS.get(name)
        if kind is not None:
            kinds[_is(trace, name)] = _KINDS.index(kind)
    written = trace.records["written"] == 1
    kinds[_is(trace, "global") & ~written] = _KINDS.index(OperationKind.LOAD)
    kinds[_is(trace, "global") & written] = _KINDS.index(OperationKind.STORE)
    kinds[_is(trace, "cp_async") & (trace.records["operand"] < 0)] = -1
    guards = [number for number, stack in trace.stacks.items() if any(name in frame.function for frame in stack for name in _GUARDS)]
    words = [number for number, name in enumerate(trace.operands) if name in _LEFT_OUT]
    kinds[np.isin(trace.records["stack"], guards) | np.isin(trace.records["operand"], words)] = -1
    if is_pipelined:  # roles also pass on through shared memory which tile is next
        tiles = [number for number, stack in trace.stacks.items() if any("stmatrix" in frame.function for frame in stack)]
        kinds[_is(trace, "store_shared") & ~np.isin(trace.records["stack"], tiles)] = -1
    # Lanes also trade what they are about to store.
    kinds[np.isin(trace.records["stack"], storing) & (kinds == _KINDS.index(OperationKind.REDUCE))] = -1
    return kinds


def _operand_reads(trace: LaunchTrace) -> dict[int, list[int]]:
    """By the position of a product's record: the addresses from which its warp's first lane read fragments since the product before."""
    records = trace.records
    fragments = [number for number, stack in trace.stacks.items() if any("ldmatrix" in frame.function for frame in stack)]
    reads = _is(trace, "load_shared") & (records["thread"] % LANES == 0) & np.isin(records["stack"], fragments)
    is_product = np.array([name.startswith("mma_sync") for name in trace.ops], bool)[records["op"]]
    pending: dict[tuple[int, int], list[int]] = {}
    found: dict[int, list[int]] = {}
    for position in np.flatnonzero(reads | is_product).tolist():
        record = records[position]
        warp = int(record["block"]), int(record["thread"]) // LANES
        if is_product[position]:
            if pending.get(warp):
                found[position] = pending.pop(warp)
        else:
            pending.setdefault(warp, []).append(int(record["shared"]))
    return found


def _ranges(records: RecordArray) -> tuple[tuple[int, int], ...]:
    """The bytes that records touch, as adjacent ranges."""
    return tuple(_joined(sorted(set(zip(records["offset"].tolist(), records["bytes"].tolist(), strict=True)))))


def _joined(pieces: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin = end = -1
    for offset, size in pieces:
        if offset > end:
            if end > begin:
                yield begin, end
            begin, end = offset, offset + size
        else:
            end = max(end, offset + size)
    if end > begin:
        yield begin, end
