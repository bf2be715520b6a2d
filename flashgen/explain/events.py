"""From records of threads to tile operations: what the warps of a block do at one line between two barriers is one `TileOperation`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.build.emulator.trace import LaunchTrace

from .lines import CallLines, ShownText

LANES = 32
_Array = np.ndarray[Any, np.dtype[Any]]


class OperationKind(enum.StrEnum):
    """What warps do."""

    COPY = "copy"  # asynchronously, from device memory to shared memory
    LOAD = "load"  # from device memory to registers
    STORE = "store"  # from registers to device memory
    ADD = "add"  # from registers to sums in device memory, atomically
    PRODUCT = "product"
    REDUCE = "reduce"  # lanes of a row find its maximum, or its sum
    STAGE = "stage"  # from registers to shared memory
    WAIT = "wait"  # for copies, and for the other warps


_OF_OPS = {
    "cp_async": OperationKind.COPY,
    "shfl_sync_bfly": OperationKind.REDUCE,
    "vote_sync_any": OperationKind.REDUCE,
    "store_shared": OperationKind.STAGE,
    "red_add": OperationKind.ADD,
    "cp_async_wait_group": OperationKind.WAIT,
    "barrier_sync": OperationKind.WAIT,
}
_KINDS = tuple(OperationKind)
# What backward kernels do in case a row has huge scores is left out, as in their byte formulas: an operand, and a function that reads lse.
_GUARD_OPERAND, _GUARD = "huge_tiles", "any_huge_row"


@dataclass(frozen=True)
class TileOperation:
    """What warps of a block do to tiles at one line of the kernel, between two barriers.

    segment:     how many barriers the block has passed
    operand:     what is loaded or stored; empty for other kinds
    offsets:     bytes of the operand that are touched, from its first one: (begin, end) of each adjacent range
    bytes:       that move between device memory and the SM, a warp's load of the same bytes by several lanes counted once
    warps:       that take part
    shared:      addresses in shared memory that are written or, by a product, read
    group:       of copies, how many groups their threads had committed before; of a wait, how many groups have landed after it
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
    lines: CallLines
    function: str


def tile_operations(trace: LaunchTrace, text: ShownText) -> list[TileOperation]:
    """Those of one launch: block by block, in the order of the first warp's program."""
    launch = _Launch(trace, text)
    return [launch.operation(group) for group in launch.groups()]


class _Launch:
    """A trace, with what each of its records belongs to."""

    def __init__(self, trace: LaunchTrace, text: ShownText) -> None:
        self.trace, self.text, records = trace, text, trace.records
        storing = [number for number, stack in trace.stacks.items() if text.operation(stack).startswith("store_")]
        self.kinds = _kinds(trace, storing)
        self.block, thread = records["block"].astype(np.int64), records["thread"].astype(np.int64)
        self.segment = _counts_before(self.block, thread, _is(trace, "barrier_sync"))
        self.committed = _counts_before(self.block, thread, _is(trace, "cp_async_commit_group"))
        self.calls = {number: text.call(stack) for number, stack in trace.stacks.items()}
        self.reads = _operand_reads(trace)
        self.once = _counted_once(trace, self.block, thread)

    def groups(self) -> list[_Array]:
        """The positions of the records of each operation."""
        chains: dict[tuple[int, ...], int] = {}
        chain_of = np.zeros(max(self.calls, default=0) + 1, np.int64)
        for number, call in self.calls.items():
            chain_of[number] = chains.setdefault(call.kernel, len(chains))
        wait = self.kinds == _KINDS.index(OperationKind.WAIT)
        chain = np.where(wait, -1, chain_of[self.trace.records["stack"]])  # a wait and the barrier behind it are one
        columns = (self.block, self.segment, self.kinds, chain, self.trace.records["operand"].astype(np.int64))
        positions = np.flatnonzero(self.kinds >= 0)
        if not len(positions):
            return []
        keys = np.stack(columns, axis=1)[positions]
        by_key = np.lexsort(keys.T)  # stable
        begins = np.flatnonzero((np.diff(keys[by_key], axis=0) != 0).any(axis=1)) + 1
        groups = np.split(positions[by_key], begins)
        return sorted(groups, key=lambda group: (self.block[group[0]], self.segment[group[0]], wait[group[0]], group[0]))

    def operation(self, group: _Array) -> TileOperation:
        """What the records at these positions are together."""
        trace, records = self.trace, self.trace.records[group]
        first, kind = records[0], _KINDS[self.kinds[group[0]]]
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
        elif kind in (OperationKind.COPY, OperationKind.STAGE):
            shared = tuple(np.unique(records["shared"] // 16 * 16).tolist())
        elif kind is OperationKind.WAIT:
            waits = records[records["op"] == _op(trace, "cp_async_wait_group")]
            committed = committed - int(waits["shared"].min()) if len(waits) else 0
        return TileOperation(
            block=int(first["block"]),
            segment=int(self.segment[group[0]]),
            kind=kind,
            operand=operand,
            offsets=_ranges(records) if operand else (),
            bytes=int(records["bytes"][self.once[group]].sum()) if operand else 0,
            warps=tuple(np.unique(records["thread"] // LANES).tolist()),
            shared=shared,
            group=committed,
            lines=lines,
            function=next(filter(None, (self.text.operation(trace.stacks[number]) for number in stacks)), ""),
        )


def _op(trace: LaunchTrace, name: str) -> int:
    return trace.ops.index(name) if name in trace.ops else -1


def _is(trace: LaunchTrace, name: str) -> _Array:
    found: _Array = trace.records["op"] == _op(trace, name)
    return found


def _kinds(trace: LaunchTrace, storing: list[int]) -> _Array:
    """Of each record the place of its kind in `_KINDS`, -1 for what no operation counts. A copy of zeros touches no device memory."""
    kinds = np.full(len(trace.records), -1, np.int64)
    for name in trace.ops:
        kind = OperationKind.PRODUCT if name.startswith("mma_sync") else _OF_OPS.get(name)
        if kind is not None:
            kinds[_is(trace, name)] = _KINDS.index(kind)
    written = trace.records["written"] == 1
    kinds[_is(trace, "global") & ~written] = _KINDS.index(OperationKind.LOAD)
    kinds[_is(trace, "global") & written] = _KINDS.index(OperationKind.STORE)
    kinds[_is(trace, "cp_async") & (trace.records["operand"] < 0)] = -1
    guards = [number for number, stack in trace.stacks.items() if any(_GUARD in frame.function for frame in stack)]
    words = [number for number, name in enumerate(trace.operands) if name == _GUARD_OPERAND]
    kinds[np.isin(trace.records["stack"], guards) | np.isin(trace.records["operand"], words)] = -1
    # Lanes also trade what they are about to store.
    kinds[np.isin(trace.records["stack"], storing) & (kinds == _KINDS.index(OperationKind.REDUCE))] = -1
    return kinds


def _counts_before(block: _Array, thread: _Array, what: _Array) -> _Array:
    """Of each record: how many of its thread's records before it are `what`."""
    by_thread = np.lexsort((np.arange(len(block)), thread, block))
    flags = what[by_thread].astype(np.int64)
    before = np.cumsum(flags) - flags
    owner = (block * 4096 + thread)[by_thread]
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    before -= np.repeat(before[begins], np.diff(np.append(begins, len(owner))))
    counts = np.empty_like(before)
    counts[by_thread] = before
    return counts


def _counted_once(trace: LaunchTrace, block: _Array, thread: _Array) -> _Array:
    """Which records count. A load that lanes of a warp issue together at the same address reads it once, and the first lane's counts."""
    records = trace.records
    counts = np.ones(len(records), bool)
    loads = np.flatnonzero(_is(trace, "global") & (records["written"] == 0))
    if not len(loads):
        return counts
    stack = records["stack"][loads].astype(np.int64)
    # How often the thread has executed this instruction before: lanes of a warp execute it equally often.
    by_thread = np.lexsort((loads, stack, thread[loads], block[loads]))
    owner = np.stack([block[loads], thread[loads], stack], axis=1)[by_thread]
    begins = np.flatnonzero(np.append(True, (np.diff(owner, axis=0) != 0).any(axis=1)))
    times = np.arange(len(loads)) - np.repeat(begins, np.diff(np.append(begins, len(loads))))
    repeated = np.empty_like(times)
    repeated[by_thread] = times
    where = records["offset"][loads].astype(np.int64)
    together = np.stack([block[loads], thread[loads] // LANES, stack, repeated, records["operand"][loads].astype(np.int64), where], axis=1)
    _, first = np.unique(together, axis=0, return_index=True)
    counts[loads] = False
    counts[loads[first]] = True
    return counts


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


def _ranges(records: _Array) -> tuple[tuple[int, int], ...]:
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
