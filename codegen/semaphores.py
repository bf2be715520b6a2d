"""What a backward family needs where blocks add to dQ in one order: see templates/tile/common/semaphore.cuh."""

from __future__ import annotations

from functools import cache

from .family import Family
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import Buffer

SEMAPHORES = Parameter("u32*", "d_q_semaphores")


def files_with_semaphores(family: Family, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`Family.files` of a backward family: with semaphores for deterministic gradients."""
    if not problem.deterministic:
        return family.atoms, family.tiles
    after = family.tiles.index("common/score_chain") + 1
    return (*family.atoms, "atomic"), (*family.tiles[:after], "common/semaphore", *family.tiles[after:])


def files_with_keeper(family: Family, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The same for a family where another thread acquires and releases them for the consumers."""
    atoms, tiles = files_with_semaphores(family, problem)
    return atoms, (*tiles, "warpgroup/semaphore_keeper") if problem.deterministic else tiles


def with_semaphores(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The parameters of a kernel that sums up dQ or zeroes the sums: for deterministic gradients with a pointer to the semaphores."""
    return _with_semaphores(block) if problem.deterministic else block


@cache
def _with_semaphores(block: ParameterBlock) -> ParameterBlock:
    return block.with_fields(SEMAPHORES)


def semaphores(problem: Problem, tiles: int, of_tile: int) -> tuple[Buffer, ...]:
    """Their memory, a u32 each, `of_tile` for each of so many query tiles. The first kernel zeroes it."""
    return (Buffer(SEMAPHORES.name, 4 * tiles * of_tile),) if problem.deterministic else ()
