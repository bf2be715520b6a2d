"""Online softmax over the statistics of a row's tiles, as the page of `flashgen explain` computes it: what tests compare that with."""

from __future__ import annotations

import numpy as np

from flashgen.explain.rows import TileStatistics


def running_statistics(tiles: list[TileStatistics]) -> list[tuple[float, float, float]]:
    """Row max, row sum and the factor that rescales what came before, after each of these tiles of a row."""
    row_max, row_sum, found = -np.inf, 0.0, []
    for statistics in tiles:
        factor = 1.0
        if statistics is not None:
            maximum, total = statistics
            risen = max(row_max, maximum)
            factor = float(np.exp(row_max - risen))
            row_sum = row_sum * factor + total * float(np.exp(maximum - risen))
            row_max = risen
        found.append((row_max, row_sum, factor))
    return found
