"""Which configs of the Hopper decode kernel are worth a look."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.attention import padded
from flashgen.codegen.problem import Problem

from .config import AttentionDecodeSm90Config
from .registers import WIDEST_OF_KEY_GROUPS
from .storage import PANEL, column_panels

LEAST_KEYS = 32  # of a tile
LEAST_TILE = 16384  # bytes of a tile of K and V: a producer takes a while to copy a smaller one, too
SHALLOWEST = 65536  # bytes of K and V on their way that keep an SM's share of the memory busy


def bytes_of_key(problem: Problem) -> int:
    """Of shared memory, for K and V."""
    return (column_panels(problem.head_dim) + column_panels(problem.head_dim_v)) * PANEL * problem.dtype.bytes


def configs(problem: Problem) -> Iterator[AttentionDecodeSm90Config]:
    """Of stages, so many that 96 KB are on their way, and up to twice as many, as far as they fit.

    Tiles of two heads are of powers of two: pages of most caches then are whole tiles, or whole parts of one.
    """
    of_key = bytes_of_key(problem)
    key_groups_of_one = 1 if problem.modifiers and padded(problem.head_dim_v) > WIDEST_OF_KEY_GROUPS else 2
    for row_groups, key_groups, heads in ((1, key_groups_of_one, 1), (2, 1, 1), (1, 1, 2)):
        for block_kv in (32, 64, 128) if heads > 1 else (32, 48, 64, 96, 128):
            if (tile := heads * block_kv * of_key) < LEAST_TILE:
                continue
            fewest = max(2, -(-SHALLOWEST // tile))
            counts = {min(16, -(-count // key_groups) * key_groups) for count in (fewest * 3 // 2, fewest * 2, fewest * 3)}
            for stages in sorted(counts):
                yield AttentionDecodeSm90Config(row_groups, key_groups, block_kv, stages, heads)
