"""The numbers of softmax's rows, from the inputs: no register is recorded. A page goes through them in the order of the recorded tiles."""

from __future__ import annotations

import numpy as np

from .run import SmallProblem

TileStatistics = tuple[float, float] | None  # the maximum of scale * S in a tile, and the sum of exp(scale * S - it); None: no key is seen


def tile_statistics(small: SmallProblem) -> list[list[TileStatistics]]:
    """Of each query and key tile. Products of fp16 numbers, scaled, in float64."""
    products = small.scaled_products()

    def of_tile(query: int, tile: int) -> TileStatistics:
        of_row = products[query, tile * small.block : (tile + 1) * small.block]
        seen = of_row[of_row > -np.inf]
        return (float(seen.max()), float(np.exp(seen - seen.max()).sum())) if len(seen) else None

    return [[of_tile(query, tile) for tile in range(small.tiles)] for query in range(small.length)]
