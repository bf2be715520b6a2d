"""Terms of scores that are linear in the key, as a further step of Q K^T: templates/tile/warpgroup/linear_terms.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .modifier import Modifier, modifiers_of
from .problem import Problem

_COLUMNS, _WIDEST = 16, 192  # those of a step of a product; head dim of v
_TILE_FILE, _PRODUCTS = "warpgroup/linear_terms", "warpgroup/gemm"


def with_linear_terms(tiles: tuple[str, ...], problem: Problem) -> tuple[str, ...]:
    """Files of tile operations, with that of linear terms where a problem has some."""
    after = tiles.index(_PRODUCTS) + 1
    return (*tiles[:after], _TILE_FILE, *tiles[after:]) if linear_columns(problem) else tiles


@cache
def linear_columns(problem: Problem) -> int:
    """How many further columns Q and K have. Registers of wide heads do not do for them."""
    return _COLUMNS * (problem.head_dim_v <= _WIDEST and has_linear_terms(modifiers_of(problem)))


def has_linear_terms(modifiers: Sequence[Modifier]) -> bool:
    """Whether a product can add all that these modifiers do to scores. Beside other modifiers registers do not do for it."""
    return len(modifiers) == 1 and modifiers[0].linear_in_key
