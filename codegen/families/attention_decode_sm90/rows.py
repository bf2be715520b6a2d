"""How rows are packed and keys are shared in a call: templates/tile/common/packed_rows.cuh and key_shares.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from flashgen.codegen.modifier import opens_keys
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.sizes import common_divisor, of_sizes
from flashgen.codegen.workload import OPEN, Workload

LEAST_SHARE = 0.75  # of the SMs: so many copy nearly as fast as all of them, and lose less than cutting heads costs calls of some 100 us
NEARLY_ALL = 0.9  # of the SMs: fewer blocks than that are sooner done on half of the SMs, probably as two SMs share a way to the L2

COUNTED_ROWS = 2**31 - 1 - 1024  # of keys, and of packed queries: so that the end of a tile that they begin is an int, too


def size_reasons(w: Workload) -> list[str]:
    """Why a decode kernel, which counts rows and keys in ints, cannot take a call's lengths."""
    rows = w.len_q * (w.heads_q // max(1, w.heads_kv))
    sizes = (("len_kv", w.len_kv), ("len_q * heads_q / heads_kv", rows))
    return [f"{name} must be at most {COUNTED_ROWS} in a decode kernel; got {size}" for name, size in sizes if size > COUNTED_ROWS]


@dataclass(frozen=True)
class RowTiles:
    """How the rows of a key/value head are divided: `heads` query heads by `queries` queries a tile.

    head_sets, query_tiles: of a group
    """

    heads: int
    queries: int
    head_sets: int
    query_tiles: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.heads * self.queries

    @property
    def count(self) -> int:
        """Tiles of a group."""
        return self.head_sets * self.query_tiles


def row_tiles(group: int, len_q: int, most_rows: int) -> RowTiles:
    """Tiles of equal size, as few as may be. A group's heads come first: all of them, if they fit."""
    head_sets = -(-group // most_rows)
    heads = -(-group // head_sets)
    query_tiles = max(1, -(-len_q // (most_rows // heads)))
    return RowTiles(heads, max(1, -(-len_q // query_tiles)), head_sets, query_tiles)


def tiles_of(workload: Workload, most_rows: int) -> RowTiles:
    """Those of a workload."""
    return row_tiles(workload.heads_q // max(1, workload.heads_kv), workload.len_q, most_rows)


def seen_key_tiles(problem: Problem, workload: Workload, queries: int, block_kv: int, front: int = 0) -> int:
    """Key tiles of so many neighbouring queries, at most, from the first one that any of them sees: one at least.

    front: rows of tiles before the first key, at most
    """
    w, keys, most = workload, workload.len_kv, -(-(workload.len_kv + front) // block_kv)
    if opens_keys(problem):  # from the first key on
        w = replace(w, window_left=OPEN, window_right=OPEN, chunk=OPEN)
    if w.window_left != OPEN:
        right = min(w.window_right, 0) if problem.mask is Mask.CAUSAL else w.window_right
        keys = min(keys, max(1, queries + w.window_left + right))
    if w.chunk != OPEN:  # what lies behind a chunk's last query is keys of other queries, where a causal mask does not hide it
        behind = 0 if problem.mask is Mask.CAUSAL else min(w.chunk, max(0, w.len_q - queries))
        keys = min(keys, queries + w.chunk + behind)
    return max(1, most if keys == w.len_kv else min(most, (keys + block_kv - 2) // block_kv + 1))


def partial_bytes(problem: Problem, rows: int) -> int:
    """What a part of a head leaves in memory: O in fp32, and four numbers for each row."""
    return rows * (problem.head_dim_v + 4) * 4


def most_parts(problem: Problem, keys: int, rows: int) -> int:
    """Of a head with so many keys and rows: with more, what blocks save of reading keys costs more in the block that adds parts up.

    An SM reads what others left in the L2 about as fast as its keys. So of p parts each takes the time of the head's bytes / p, and then
    one takes that of p times what a part leaves: least in all where both are as long. Keys of one byte take it about as long as of two,
    as it converts them.
    """
    return _whole_root(keys * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes // partial_bytes(problem, max(1, rows)))


@of_sizes
def _whole_root(ratio: int) -> int:
    return max(1, math.isqrt(ratio))


def blocks_for(heads: int, batch: int, key_tiles: int, sm_count: int, parts: int) -> int:
    """Thread blocks among which `heads` heads of `batch` sequences, `key_tiles` each, are shared: at most one an SM, and a tile at least.

    parts: how many a head is cut into, at most; rounding the number of blocks may add some

    Where every share would end inside a head, blocks would have two parts each, whose outputs go through memory. So it is a number that
    divides the heads of all sequences, or that they divide, unless that leaves more than a quarter of the SMs idle. Else it is a multiple
    of a sequence's heads, so that all of them are cut at the same keys, unless that leaves as many idle.
    """
    most, wanted = min(sm_count, heads * batch * key_tiles), heads * batch * parts
    if wanted < NEARLY_ALL * most:
        most = min(wanted, max(sm_count // 2, heads * batch))
    return _shared_by(heads, batch, most)


@of_sizes
@lru_cache(maxsize=2**12)
def _shared_by(heads: int, batch: int, most: int) -> int:
    too_few, in_all = int(LEAST_SHARE * most), heads * batch
    divisors = (blocks for blocks in range(most, too_few, -1) if not in_all % blocks)
    whole = most - most % in_all if in_all <= most else next(divisors, 0)
    if whole > too_few:
        return whole
    alike = most - most % heads
    return alike if alike > too_few else most


def aligned_shares(heads: int, blocks: int) -> int:
    """How many shares begin at the same key of different heads of a sequence: see `own_share`."""
    return max(1, common_divisor(heads, blocks))
