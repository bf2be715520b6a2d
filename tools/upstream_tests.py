"""What the tools share that run samples of other projects' own tests on flashgen: options, loading, drawing and counts."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from tools.case_processes import run_in_processes

T = TypeVar("T")
_FIRST_LINE = 400  # characters
_QUIET_SECONDS = 15.0  # between lines that say how far it is


class Case(NamedTuple):
    """A test function, and of each of its parametrisations the number of a value."""

    function: str
    values: tuple[int, ...]


class Outcome(NamedTuple):
    """What became of a case of a test function: passed, failed, skipped or stopped, why, in how many seconds; its case with parameters."""

    function: str
    case: str
    result: str
    reason: str
    seconds: float


def parsed_options(description: str | None, cases: int, argv: Sequence[str] | None) -> argparse.Namespace:
    """A tool's options; cases: how many are drawn where nobody says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=lambda text: Path(text).resolve())
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--parts", type=parts, default=([0], 1), metavar="P,Q/N", help="every N-th case alone, from numbers P and Q on")
    parser.add_argument("--seconds", type=float, default=86400.0, help="stop all cases after so long")
    parser.add_argument("--case-seconds", type=float, default=180.0, help="a case that takes longer has failed")
    return parser.parse_args(argv)


def parts(text: str) -> tuple[list[int], int]:
    """Which parts, and of how many."""
    numbers, _, count = text.partition("/")
    return [int(number) for number in numbers.split(",")], int(count)


def loaded(path: Path) -> ModuleType:
    """The file as a module, beside which it can import others of its folder."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parametrisations(function: Any) -> list[tuple[tuple[str, ...], list[Any]]]:
    """Of a test function the names that each one has, and its values."""
    found = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            values = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
            found.append((tuple(mark.args[0].replace(" ", "").split(",")), list(values)))
    return found


def parameters(tests: ModuleType, case: Case) -> dict[str, Any]:
    """By name."""
    found: dict[str, Any] = {}
    for (names, values), number in zip(parametrisations(getattr(tests, case.function)), case.values, strict=True):
        found |= {names[0]: values[number]} if len(names) == 1 else dict(zip(names, values[number], strict=True))
    return found


def in_turns(of_functions: Iterable[Iterable[T]], count: int) -> list[T]:
    """The first cases, of each function by turns: the same number of each, as far as it has so many."""
    rounds = itertools.zip_longest(*of_functions)
    return list(itertools.islice((case for case in itertools.chain.from_iterable(rounds) if case is not None), count))


def outcome_of(tests: ModuleType, case: Case) -> Outcome:
    """Runs a case of a module of pytest's, in this process."""
    given, start = parameters(tests, case), time.monotonic()
    result, reason = "passed", ""
    try:
        getattr(tests, case.function)(**given)
    except pytest.skip.Exception as skipped:
        result, reason = "skipped", str(skipped) or "the file skips this combination of parameters"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.line for frame in reversed(frames) if frame.filename == tests.__file__), "")
        result, reason = "failed", f"{type(error).__name__}: {str(error)[:_FIRST_LINE]} at {line}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(case.function, f"{case.function} {given}", result, reason, time.monotonic() - start)


def run_all(
    run: Callable[[T], Outcome],
    drawn: Sequence[T],
    functions: Iterable[str],
    options: argparse.Namespace,
    function_of: Callable[[T], str] = attrgetter("function"),
) -> int:
    """Runs the drawn cases in processes, and prints what becomes of them. 1 if one fails or has not been run, else 0.

    Those that fail are printed at once, and how far it is at most every 15 s.
    function_of: the name of a case's test function
    """
    chosen, count = options.parts
    cases = [case for i, case in enumerate(drawn) if i % count in chosen]
    functions = list(functions)
    print(f"seed {options.seed}: {len(cases)} cases of {len(drawn)} drawn, of {len(functions)} test functions", flush=True)
    outcomes: list[Outcome] = []
    start = said = time.monotonic()
    for ended in run_in_processes(run, cases, options.processes, options.case_seconds, options.seconds):
        last = ended.returned
        if last is None:
            result = "failed" if time.monotonic() - start < options.seconds else "stopped"
            last = Outcome(function_of(ended.case), str(ended.case), result, ended.why, ended.seconds)
        outcomes.append(last)
        if last.result in ("failed", "stopped"):
            print(f"{last.result} {last.case} after {last.seconds:.0f} s: {last.reason}", flush=True)
        if time.monotonic() - said > _QUIET_SECONDS:
            said = time.monotonic()
            print(f"after {said - start:.0f} s: {_counts(outcomes)}", flush=True)
    print(f"{_counts(outcomes)}, not begun {len(cases) - len(outcomes)}, in {time.monotonic() - start:.0f} s")
    for reason, number in Counter(outcome.reason for outcome in outcomes if outcome.result == "skipped").most_common():
        print(f"  skipped {number}: {reason}")
    for name in functions:
        own = [outcome for outcome in outcomes if outcome.function == name]
        slowest = max((outcome.seconds for outcome in own), default=0.0)
        print(f"  {name}: {_counts(own)}; the slowest took {slowest:.1f} s")
    return 0 if {outcome.result for outcome in outcomes} <= {"passed", "skipped"} and len(outcomes) == len(cases) else 1


def _counts(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    stopped = f", stopped {counts['stopped']}" * bool(counts["stopped"])
    return f"passed {counts['passed']}, failed {counts['failed']}, skipped {counts['skipped']}{stopped}"
