"""How many calls of transformers' layers flashgen has run, and refused, in this process: what `report` tells."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

run: Counter[str] = Counter()
"""Calls by the function of flashgen that they became."""
refused: Counter[str] = Counter()
"""Calls by what was asked for and is not there."""


class AttentionReport(NamedTuple):
    """Calls of attention layers since the start of the process, or the last `report(reset=True)`."""

    run: dict[str, int]
    """By the function of flashgen that they became: attention, attention_with_kvcache, attention_varlen."""
    refused: dict[str, int]
    """By the argument for which flashgen has refused a call, with an ArgumentError: nothing else has computed it."""


def report(reset: bool = False) -> AttentionReport:
    """What flashgen has run and refused. Calls in graphs of torch.compile are not counted: their Python runs once, for all calls.

    reset: whether to count from 0 on from now
    """
    found = AttentionReport(dict(run), dict(refused))
    if reset:
        run.clear()
        refused.clear()
    return found
