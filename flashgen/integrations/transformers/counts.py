"""How many calls of transformers' layers flashgen has run, and refused, in this process: what `report` tells."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from flashgen.codegen.errors import ArgumentError

run: Counter[str] = Counter()
"""Calls by the function of flashgen that they became."""
refused: Counter[str] = Counter()
"""Calls by the argument that the error names."""


class AttentionReport(NamedTuple):
    """Calls of attention layers since the start of the process, or the last `report(reset=True)`."""

    run: dict[str, int]
    """By the function of flashgen that they became: attention, attention_with_kvcache, attention_varlen."""
    refused: dict[str, int]
    """By the argument for which flashgen has refused a call or a mask, with an ArgumentError that begins with it: nothing else has computed
    it. What flashgen's own calls refuse has transformers' name where it is an argument there: attention_mask for bias, but head_dim."""


def count_refusal(error: ArgumentError) -> None:
    """Counts a call that is refused, by the argument that its message begins with."""
    from torch.compiler import is_compiling  # here, as a report needs no PyTorch

    if not is_compiling():
        refused[str(error).partition(" ")[0].rstrip(",:")] += 1


def refused_error(message: str, kind: type[ArgumentError] = ArgumentError) -> ArgumentError:
    """The error to raise for what is refused outside of a layer's call, counted."""
    error = kind(message)
    count_refusal(error)
    return error


def report(reset: bool = False) -> AttentionReport:
    """What flashgen has run and refused. Calls in graphs of torch.compile are not counted: their Python runs once, for all calls.

    reset: whether to count from 0 on from now
    """
    found = AttentionReport(dict(run), dict(refused))
    if reset:
        run.clear()
        refused.clear()
    return found
