"""Runs a sample of FlashAttention's own tests on flashgen, which `flashgen.integrations.flash_attn.install` puts in flash_attn's place.

    python -m tools.flash_attn_tests CHECKOUT/tests/test_flash_attn.py --cases 500 --seed 1 --processes 16

The file is that of a checkout of FlashAttention 2.8; it needs a GPU, pytest and einops. Each test function has an equal share of the cases,
as far as it has so many: nearly all combinations of parameters are those of three functions, and the file skips many of these. Cases are
drawn with the seed, which is printed, and is all that is needed to draw them again. Counts of passed and failed cases are printed, and of
skipped ones by their reason; failures with their parameters and the beginning of what they say. Exit 1 if one fails, or has not been run.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from flashgen.integrations import flash_attn

_FIRST_LINE = 300  # characters
_tests: ModuleType | None = None  # a process has one


class Case(NamedTuple):
    """A test function and its parameters, each as the number of its value."""

    function: str
    values: tuple[int, ...]


class Outcome(NamedTuple):
    """What became of a case: passed, failed or skipped, why, and in how many seconds."""

    case: Case
    result: str
    reason: str
    seconds: float


def load(path: Path) -> ModuleType:
    """The file as a module, with flashgen in flash_attn's place."""
    global _tests
    if _tests is None:
        flash_attn.install(force=True)
        spec = importlib.util.spec_from_file_location("flash_attn_tests_of_theirs", path)
        assert spec is not None
        assert spec.loader is not None
        _tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_tests)
    return _tests


def functions(tests: ModuleType) -> dict[str, list[tuple[tuple[str, ...], list[Any]]]]:
    """Of each test function the names that a parametrisation has, and its values."""
    found = {}
    for name, function in vars(tests).items():
        if name.startswith("test_") and callable(function):
            marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
            found[name] = [(tuple(mark.args[0].replace(" ", "").split(",")), list(mark.args[1])) for mark in marks]
    return found


def drawn_cases(sizes: dict[str, list[int]], count: int, seed: int) -> list[Case]:
    """As many different cases, the same number of each function as far as it has so many. sizes: how many values each parameter has."""
    generator = random.Random(seed)
    shares: dict[str, Iterator[Case]] = {name: _shuffled(name, own, generator) for name, own in sizes.items()}
    found: list[Case] = []
    while shares and len(found) < count:
        for name in list(shares):
            case = next(shares[name], None)
            if case is None:
                del shares[name]
            elif len(found) < count:
                found.append(case)
    return found


def _shuffled(name: str, sizes: list[int], generator: random.Random) -> Iterator[Case]:
    total, seen = math.prod(sizes), set[Case]()
    while len(seen) < total:
        case = Case(name, tuple(generator.randrange(size) for size in sizes))
        if case not in seen:
            seen.add(case)
            yield case


def parameters(tests: ModuleType, case: Case) -> dict[str, Any]:
    """By name."""
    found: dict[str, Any] = {}
    for (names, values), number in zip(functions(tests)[case.function], case.values, strict=True):
        found |= {names[0]: values[number]} if len(names) == 1 else dict(zip(names, values[number], strict=True))
    return found


def run(path: Path, case: Case) -> Outcome:
    """Runs one case, in this process."""
    tests, start = load(path), time.monotonic()
    result, reason = "passed", ""
    try:
        getattr(tests, case.function)(**parameters(tests, case))
    except pytest.skip.Exception as skipped:
        result, reason = "skipped", str(skipped) or "the file skips this combination of parameters"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        line = next((frame.line for frame in reversed(where) if frame.filename == str(path)), "")
        result, reason = "failed", f"{type(error).__name__}: {str(error)[:_FIRST_LINE]} at {line}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(case, result, reason, time.monotonic() - start)


def _run(arguments: tuple[Path, Case]) -> Outcome:
    return run(*arguments)


def _begin() -> None:
    """Of a process of the pool: what tests print goes nowhere."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the life of the process


def _parts(text: str) -> tuple[list[int], int]:
    """Which parts, and of how many."""
    numbers, _, count = text.partition("/")
    return [int(number) for number in numbers.split(",")], int(count)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--parts", type=_parts, default=([0], 1), metavar="P,Q/N", help="every N-th case alone, from numbers P and Q on")
    parser.add_argument("--seconds", type=float, default=86400.0, help="do not wait longer for results")
    options = parser.parse_args(argv)
    found = functions(load(options.file.resolve()))
    drawn = drawn_cases({name: [len(values) for _, values in marks] for name, marks in found.items()}, options.cases, options.seed)
    parts, count = options.parts
    cases = [case for i, case in enumerate(drawn) if i % count in parts]
    print(f"seed {options.seed}: {len(cases)} cases of {len(drawn)} drawn, of {len(found)} test functions", flush=True)
    outcomes: list[Outcome] = []
    start = time.monotonic()
    pool = multiprocessing.get_context("spawn").Pool(options.processes, _begin)
    try:
        results = pool.imap_unordered(_run, [(options.file.resolve(), case) for case in cases])
        for _ in cases:
            outcomes.append(results.next(timeout=max(0.1, options.seconds - (time.monotonic() - start))))
            last = outcomes[-1]
            if last.result == "failed":
                print(f"failed {last.case.function} {parameters(load(options.file), last.case)}: {last.reason}", flush=True)
    except multiprocessing.TimeoutError:
        print(f"stopped after {options.seconds:.0f} s: {len(cases) - len(outcomes)} cases have not been run")
    finally:
        pool.terminate()
    counts = Counter(outcome.result for outcome in outcomes)
    print(f"passed {counts['passed']}, failed {counts['failed']}, skipped {counts['skipped']}, in {time.monotonic() - start:.0f} s")
    for reason, number in Counter(outcome.reason for outcome in outcomes if outcome.result == "skipped").most_common():
        print(f"  skipped {number}: {reason}")
    for name in found:
        own = [outcome for outcome in outcomes if outcome.case.function == name]
        results_of = Counter(outcome.result for outcome in own)
        slowest = max((outcome.seconds for outcome in own), default=0.0)
        print(f"  {name}: {', '.join(f'{results_of[r]} {r}' for r in sorted(results_of))}; the slowest took {slowest:.1f} s")
    return 1 if counts["failed"] or len(outcomes) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
