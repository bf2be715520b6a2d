"""Runs a sample of FlashAttention's own tests on flashgen, which `flashgen.integrations.flash_attn.install` puts in flash_attn's place.

    python -m tools.flash_attn_tests CHECKOUT/tests/test_flash_attn.py --cases 500 --seed 1 --processes 16

The file is that of a checkout of FlashAttention 2.8; it needs a GPU, pytest and einops. Each test function has an equal share of the cases,
as far as it has so many: nearly all combinations of parameters are those of three functions, and the file skips many of these. Cases are
drawn with the seed, which is printed, and is all that is needed to draw them again. Counts of passed and failed cases are printed, and of
skipped ones by their reason; failures with their parameters and the beginning of what they say. Exit 1 if one fails, or has not been run.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from flashgen.integrations import flash_attn
from tools.upstream_tests import Case, Outcome, in_turns, loaded, outcome_of, parametrisations, parsed_options, run_all

_tests: ModuleType | None = None  # a process has one


def load(path: Path) -> ModuleType:
    """The file as a module, with flashgen in flash_attn's place."""
    global _tests
    if _tests is None:
        flash_attn.install(force=True)
        _tests = loaded(path)
    return _tests


def functions(tests: ModuleType) -> dict[str, list[tuple[tuple[str, ...], list[Any]]]]:
    """The parametrisations of each test function."""
    return {name: parametrisations(each) for name, each in vars(tests).items() if name.startswith("test_") and callable(each)}


def drawn_cases(sizes: dict[str, list[int]], count: int, seed: int) -> list[Case]:
    """As many different cases, the same number of each function as far as it has so many. sizes: how many values each parameter has."""
    generator = random.Random(seed)
    return in_turns([_shuffled(name, own, generator) for name, own in sizes.items()], count)


def _shuffled(name: str, sizes: list[int], generator: random.Random) -> Iterator[Case]:
    total, seen = math.prod(sizes), set[Case]()
    while len(seen) < total:
        case = Case(name, tuple(generator.randrange(size) for size in sizes))
        if case not in seen:
            seen.add(case)
            yield case


def run(path: Path, case: Case) -> Outcome:
    """Runs one case, in this process."""
    return outcome_of(load(path), case)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    options = parsed_options(__doc__, 500, argv)
    found = functions(load(options.file))
    drawn = drawn_cases({name: [len(values) for _, values in marks] for name, marks in found.items()}, options.cases, options.seed)
    return run_all(partial(run, options.file), drawn, found, options)


if __name__ == "__main__":
    sys.exit(main())
