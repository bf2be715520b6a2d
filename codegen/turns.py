"""Turns: what a backward family needs where blocks add to dQ in one order. What they are: templates/tile/common/turns.cuh."""

from __future__ import annotations

from functools import cache

from .family import Family
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import Buffer

COUNTERS = Parameter("u32*", "d_q_turns")


def files_with_turns(family: Family, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`Family.files` of a backward family: for deterministic gradients turns, too."""
    if not problem.deterministic:
        return family.atoms, family.tiles
    after = family.tiles.index("common/score_chain") + 1
    return (*family.atoms, "atomic"), (*family.tiles[:after], "common/turns", *family.tiles[after:])


def files_with_keeper(family: Family, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The same for a family whose consumers leave their turns to another thread."""
    atoms, tiles = files_with_turns(family, problem)
    return atoms, (*tiles, "warpgroup/turn_keeper") if problem.deterministic else tiles


def with_counters(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The parameters of a kernel that sums up dQ or zeroes the sums: for deterministic gradients with a pointer to the counters."""
    return _with_counters(block) if problem.deterministic else block


@cache
def _with_counters(block: ParameterBlock) -> ParameterBlock:
    return block.with_fields(COUNTERS)


def counters(problem: Problem, tiles: int, of_tile: int) -> tuple[Buffer, ...]:
    """Memory of the counters, a u32 each, `of_tile` for each of so many query tiles. The first kernel zeroes it."""
    return (Buffer(COUNTERS.name, 4 * tiles * of_tile),) if problem.deterministic else ()
