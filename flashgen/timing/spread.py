"""What is said of a value that was measured in several rounds: its median and its spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 7  # unless asked otherwise


@dataclass(frozen=True)
class Spread:
    """Median, 10 % and 90 % over the rounds. With fewer than 10 rounds the last two are the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value, in any order and unit."""
        ordered = sorted(values)
        edge = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[edge], ordered[-1 - edge])
