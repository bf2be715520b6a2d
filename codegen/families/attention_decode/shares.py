"""How many persistent blocks there are, and what they divide: see templates/tile/common/key_shares.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.devices import Device
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import OPEN, Workload

from ..attention_decode_sm90.rows import blocks_for
from .config import AttentionDecodeConfig


@dataclass(frozen=True)
class Shares:
    """Sizes of the flattened key tiles.

    row_tiles: work items of a key/value head; items: those of all heads; key_tiles: of each item, one at least; blocks: with a share each
    """

    row_tiles: int
    items: int
    key_tiles: int
    blocks: int

    @property
    def are_whole(self) -> bool:
        """Whether no item is cut, so that nobody has partial outputs."""
        return not self.items or self.items % self.blocks == 0


def shares_of(config: AttentionDecodeConfig, problem: Problem, workload: Workload, device: Device) -> Shares:
    """Those of a workload: from sizes and the number of SMs alone, so that results never depend on anything else."""
    group = workload.heads_q // max(1, workload.heads_kv)
    row_tiles = -(-workload.len_q * group // config.block_q)
    items, key_tiles = workload.batch * workload.heads_kv * row_tiles, _key_tiles(config, problem, workload, group)
    blocks = blocks_for(items, key_tiles, device.sm_count * config.blocks_per_sm) if items else 0
    return Shares(row_tiles, items, key_tiles, blocks)


def _key_tiles(config: AttentionDecodeConfig, problem: Problem, workload: Workload, group: int) -> int:
    """Key tiles of a work item, at most, from the first one that any of its rows sees."""
    w, keys = workload, workload.len_kv
    queries = min(w.len_q, (config.block_q - 1) // max(1, group) + 2)  # of an item, at most
    if w.window_left != OPEN:
        right = min(w.window_right, 0) if problem.mask is Mask.CAUSAL else w.window_right
        keys = min(keys, max(1, queries + w.window_left + right))
    if w.chunk != OPEN:
        keys = min(keys, queries + 2 * w.chunk)
    most = -(-w.len_kv // config.block_kv)
    return max(1, most if keys == w.len_kv else min(most, (keys + config.block_kv - 2) // config.block_kv + 1))
