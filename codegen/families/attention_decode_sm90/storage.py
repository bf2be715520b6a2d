"""Shared memory of a block of the Hopper decode kernel: DecodeStorage in templates/tile/warpgroup/decode_storage.cuh."""

from __future__ import annotations

from flashgen.codegen.attention import padded
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import targets

from .boxes import box_bytes
from .config import BARRIER_BYTES, AttentionDecodeSm90Config

PANEL = 64  # columns of a tile that lie together: 128 bytes, what a tensor copy permutes within
PARTS_BYTES = 32  # for each sharer: kPartsBytes in decode_storage.cuh


def column_panels(width: int) -> int:
    """Of a tile so many columns wide."""
    return -(-width // PANEL)


def query_stages(problem: Problem, config: AttentionDecodeSm90Config) -> int:
    """Tiles of Q. Two with a cache, where they fit: a block may have many short heads, and Q of the next one comes meanwhile."""
    fits = _bytes(problem, config, 2) <= targets()["sm_90a"].shared_memory_per_block
    return 2 if problem.is_cached and fits else 1


def storage_bytes(problem: Problem, config: AttentionDecodeSm90Config) -> int:
    """All of it."""
    return _bytes(problem, config, query_stages(problem, config))


def _bytes(problem: Problem, config: AttentionDecodeSm90Config, of_queries: int) -> int:
    wide, wide_v = column_panels(problem.head_dim), column_panels(problem.head_dim_v)
    tiles = config.heads * (of_queries * config.rows * wide + config.stages * config.block_kv * (wide + wide_v))
    handed = min(padded(problem.head_dim_v) // 8, 16) * 128 * 16 + 64 * 8 if config.key_groups > 1 else 0
    beside = box_bytes(config) if problem.is_cached else 0
    barriers = (of_queries + config.stages) * BARRIER_BYTES
    return tiles * PANEL * problem.dtype.bytes + handed + barriers + config.sharers * PARTS_BYTES + beside
