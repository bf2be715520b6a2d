"""What a backward family needs to take the key tiles that the most queries see first, where masks hide keys of no range.

The preprocess kernel finds that order. See templates/tile/common/key_order.cuh.
"""

from __future__ import annotations

from functools import cache

from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import Buffer
from .seen_tiles import WORD_BYTES, TileLaunch, scatters
from .sizes import whole
from .workload import Workload

_ORDER, _COUNTS = Parameter("u32*", "key_order"), Parameter("u32*", "key_counts")
_OF_PREPROCESS = (
    *(Parameter("u32*", "seen_tiles"), _COUNTS, _ORDER),
    *(Parameter("int", name) for name in ("seen_words", "seen_rows", "ordered_heads", "heads_together")),
)
_COUNT_BYTES = 4
MOST_RANKED = 1024  # key tiles of a head: a block compares each with all others, and so many times as many as SMs end evenly anyway


@cache
def orders_keys(problem: Problem) -> bool:
    """Whether key tiles are ordered so. Packed ones come in the order of a list, deterministic additions to dQ have one of their own."""
    return scatters(problem) and not (problem.is_packed or problem.deterministic)


def with_key_order(block: ParameterBlock, problem: Problem, main: bool = False) -> ParameterBlock:
    """The parameters of the preprocess kernel, or of the main one, with those of the order."""
    return _with_order(block, main) if orders_keys(problem) else block


@cache
def _with_order(block: ParameterBlock, main: bool) -> ParameterBlock:
    return block.with_fields(*([_ORDER] if main else _OF_PREPROCESS))


def order_values(problem: Problem, seen: TileLaunch, w: Workload) -> dict[str, int | float]:
    """Of the preprocess kernel beside `TileLaunch.values`: heads with an order of their own, each of so many query heads together."""
    if not orders_keys(problem):
        return {}
    values = seen.launches[0].values
    rows, together = whole(values["seen_rows"]), w.heads_q // w.heads_kv if values["seen_heads"] != 1 else 1
    ordered = _all_rows(seen) // rows // together if _are_few(seen) else 0
    return {"seen_rows": rows, "ordered_heads": ordered, "heads_together": together}


def order_buffers(problem: Problem, seen: TileLaunch) -> tuple[Buffer, ...]:
    """A number for each row of tiles: how many query tiles see it, and which row comes at its place."""
    if not orders_keys(problem) or not _are_few(seen):
        return ()
    return tuple(Buffer(each.name, _COUNT_BYTES * _all_rows(seen)) for each in (_COUNTS, _ORDER))


def _are_few(seen: TileLaunch) -> bool:
    """Whether a head has so few key tiles that a block ranks them while others read dO."""
    return whole(seen.launches[0].values["seen_rows"]) <= MOST_RANKED


def _all_rows(seen: TileLaunch) -> int:
    """Rows of all heads and entries of the batch that differ."""
    return seen.buffers[0].bytes // (whole(seen.values["seen_words"]) * WORD_BYTES)
