"""Shared memory of a block: what templates/tile/warpgroup/forward_storage.cuh lays out, in bytes."""

from __future__ import annotations

from flashgen.codegen import far_keys, seen_tiles
from flashgen.codegen.problem import Problem
from flashgen.codegen.score_tensors import fetches

from .config import STAGE_BYTES, TILE_BYTES, AttentionForwardSm90Config
from .launch import PANEL

SUM_BYTES = 8  # of the statistics of each row: kStatisticsBytes


def shared_bytes(problem: Problem, config: AttentionForwardSm90Config) -> int:
    """Of queries, the stages of K and V, panels of the output, sums, barriers."""
    panel, of_k, of_v = PANEL * problem.dtype.bytes, width_in_panels(problem.head_dim), width_in_panels(problem.head_dim_v)
    tiles = config.query_stages * config.block_q * of_k + config.stages * config.block_kv * (of_k + of_v)
    tiles += config.block_q * width_in_panels(config.block_kv) if problem.modifiers and fetches(problem) else 0  # fetched_bytes
    words = seen_tiles.word_bytes(problem, config.stages, 1) if problem.modifiers else 0
    if problem.is_packed or problem.is_cached:
        words += (config.work_slots + 2) * TILE_BYTES  # sequences of tiles, and the tile found last
    words += config.work_slots * TILE_BYTES if far_keys.leaves_out_far_keys(problem, config.pack_gqa) else 0  # first keys that count
    words += STAGE_BYTES if problem.is_cached else 0  # of values that the producer zeroes rows of
    words += TILE_BYTES if problem.is_packed else 0  # where the values lie that are loaded next
    return (tiles + config.block_q * config.out_panels) * panel + config.block_q * SUM_BYTES + config.barrier_bytes + words


def width_in_panels(width: int) -> int:
    """Of 64 columns each, as tensor copies lay tiles out."""
    return -(-width // PANEL)
