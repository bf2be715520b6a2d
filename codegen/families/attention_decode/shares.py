"""How many persistent blocks there are, and what they divide: see templates/tile/common/key_shares.cuh and key_splits.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.attention import padded
from flashgen.codegen.devices import Device
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..attention_decode_sm90.boxes import PART_COST
from ..attention_decode_sm90.rows import blocks_for, most_parts, seen_key_tiles
from .config import AttentionDecodeConfig

LEAST_TILE, MOST_TILES = 16, 2**31 - 1
# Keys of a split, about, where results are batch invariant. A split costs the time of so many bytes; and with wide heads more, as what the
# warps of a block have of O is then added up in many steps.
SPLIT_KEYS, LONGER_SPLIT_KEYS = 1024, 2048
NARROW, WIDE_HEADS = 64, 128  # up to these head dims, and above those, splits are longer
FEW_ROWS = 32  # with more, an SM's products take longer than its keys, and all SMs should have some
MOST_SPLIT_ROWS = 64  # of a key/value head: with more, there are items enough without splits


@dataclass(frozen=True)
class Shares:
    """Sizes of the flattened key tiles.

    row_tiles: work items of a key/value head; items: those of all heads; key_tiles: of each item, one at least; blocks: with a share each;
    unit: tiles that shares count as one; are_splits: whether all parts are such units
    """

    row_tiles: int
    items: int
    key_tiles: int
    blocks: int
    unit: int = 1
    are_splits: bool = False

    @property
    def units(self) -> int:
        """Of each item."""
        return -(-self.key_tiles // self.unit)

    @property
    def are_whole(self) -> bool:
        """Whether no item is cut, so that nobody has partial outputs."""
        return self.units == 1 if self.are_splits else not self.items or self.items % self.blocks == 0


def shares_of(config: AttentionDecodeConfig, problem: Problem, workload: Workload, device: Device) -> Shares:
    """Those of a workload: from sizes and the number of SMs alone, so that results never depend on anything else."""
    group = workload.heads_q // max(1, workload.heads_kv)
    row_tiles = -(-workload.len_q * group // config.block_q)
    items, key_tiles = workload.batch * workload.heads_kv * row_tiles, _key_tiles(config, problem, workload, group)
    unit = 1
    if problem.batch_invariant:
        unit = _split_tiles(config, problem, workload.len_q * group) or key_tiles
    elif problem.is_cached and items * (key_tiles + PART_COST) > MOST_TILES:
        unit = -(-key_tiles // max(1, MOST_TILES // items - PART_COST))
    shares = Shares(row_tiles, items, key_tiles, 0, unit, problem.batch_invariant)
    of_sequence, most = workload.heads_kv * row_tiles, device.sm_count * config.blocks_per_sm
    parts, rows = shares.units, min(config.block_q, workload.len_q * group)
    if not shares.are_splits and rows <= FEW_ROWS:
        parts = most_parts(problem, key_tiles * config.block_kv, rows)
    blocks = blocks_for(of_sequence, workload.batch, shares.units, most, parts) if items else 0
    return Shares(row_tiles, items, key_tiles, blocks, unit, problem.batch_invariant)


def tiles_in_ints(problem: Problem, workload: Workload) -> tuple[str, int]:
    """What kernels of any config count in ints, and how many there may be: tiles, of the smallest ones.

    Of a cache, which no other family takes, shares count several tiles as one where they are too many, and of splits there are few.
    """
    w, rows = workload, workload.len_q * (workload.heads_q // max(1, workload.heads_kv))
    items, of_rows = w.batch * w.heads_kv * max(1, -(-rows // LEAST_TILE)), f"tiles of {LEAST_TILE} packed rows"
    if problem.batch_invariant:
        splits = 1 if rows > MOST_SPLIT_ROWS else max(1, -(-w.len_kv // SPLIT_KEYS))
        return f"{of_rows} by splits of keys", items * splits
    if problem.is_cached:
        return f"{of_rows}, {1 + PART_COST} times each,", items * (1 + PART_COST)
    return f"{of_rows} by {LEAST_TILE} keys", items * max(1, -(-w.len_kv // LEAST_TILE))


def _split_tiles(config: AttentionDecodeConfig, problem: Problem, rows: int) -> int:
    """Key tiles of a split, 0 for all of an item. They depend on nothing that differs between the batches of a sequence."""
    if rows > MOST_SPLIT_ROWS:
        return 0
    width = max(padded(problem.head_dim), padded(problem.head_dim_v))
    keys = SPLIT_KEYS if NARROW < width <= WIDE_HEADS else LONGER_SPLIT_KEYS
    return max(1, keys // config.block_kv)


def _key_tiles(config: AttentionDecodeConfig, problem: Problem, workload: Workload, group: int) -> int:
    """Key tiles of a work item, at most, from the first one that any of its rows sees."""
    queries = min(workload.len_q, (config.block_q - 1) // max(1, group) + 2)  # of an item, at most
    return seen_key_tiles(problem, workload, queries, config.block_kv)
