"""Terms of scores that are linear in the key, as a part of the exponential: templates/tile/warpgroup/linear_terms.cuh."""

from __future__ import annotations

from functools import cache

from .modifier import modifiers_of
from .problem import Mask, Problem

MOST_PACKED = 8  # query heads that may share a tile, so that a lane's two rows are of one head
_TILE_FILE, _BEHIND = "warpgroup/linear_terms", "warpgroup/row_sums"


def with_linear_terms(tiles: tuple[str, ...], problem: Problem) -> tuple[str, ...]:
    """Files of tile operations, with that of linear terms where a problem has some."""
    behind = tiles.index(_BEHIND) + 1
    return (*tiles[:behind], _TILE_FILE, *tiles[behind:]) if has_linear_terms(problem) else tiles


@cache
def is_linear_in_key(problem: Problem) -> bool:
    """Whether all that a problem's modifiers do to scores is linear in the key, on either side of the diagonal."""
    modifiers = modifiers_of(problem)
    return len(modifiers) == 1 and modifiers[0].linear_in_key


def has_linear_terms(problem: Problem) -> bool:
    """Whether that holds for all keys that a row sees, as they come before it."""
    return problem.mask is Mask.CAUSAL and is_linear_in_key(problem)
