"""How often threads have done something before each record of a trace, and which loads of lanes count."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.build.emulator.trace import LaunchTrace

LANES = 32
RecordArray = np.ndarray[Any, np.dtype[Any]]  # an element for each record


def counts_before(block: RecordArray, party: RecordArray, what: RecordArray) -> RecordArray:
    """Of each record: how many of its party's records before it are `what`. A party is a thread, or a warpgroup, of a block."""
    by_party = np.lexsort((np.arange(len(block)), party, block))
    flags = what[by_party].astype(np.int64)
    before = np.cumsum(flags) - flags
    owner = (block * 4096 + party)[by_party]
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    before -= np.repeat(before[begins], np.diff(np.append(begins, len(owner))))
    counts = np.empty_like(before)
    counts[by_party] = before
    return counts


def counted_once(trace: LaunchTrace, block: RecordArray, thread: RecordArray) -> RecordArray:
    """Which records count. A load that lanes of a warp issue together at the same address reads it once, and the first lane's counts."""
    records = trace.records
    counts = np.ones(len(records), bool)
    loads = np.flatnonzero((records["op"] == (trace.ops.index("global") if "global" in trace.ops else -1)) & (records["written"] == 0))
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
