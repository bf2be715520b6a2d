"""Runs a sample of PyTorch's own tests of scaled_dot_product_attention with flashgen activated, on this machine's GPU.

    python -m tools.pytorch_sdpa_tests PYTORCH/test/test_transformers.py --count 500 --seed 1

PYTORCH is a checkout of the version that is installed. Tests are drawn by the seed from those whose name has a match of --names and none
of --but, which leaves out causal ones of different lengths: PyTorch's file skips them. It draws until `count` have run; those that the file
skips are counted by reason, and others are drawn in their place. --without runs the same tests without flashgen. Exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import random
import re
import sys
import unittest
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What became of a test. why: a failure's last line, or the reason of a skip; counts: what flashgen has run and passed on."""

    name: str
    result: str
    why: str
    counts: tuple[dict[str, int], dict[str, int]]


def load(path: Path) -> Any:
    """The module of a file of tests, beside which others of its folder can be imported."""
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def cases(module: Any) -> dict[str, type[unittest.TestCase]]:
    """The tests of a module for CUDA, by "class.name"."""
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, unittest.TestCase)]
    of_cuda = [kind for kind in classes if kind.__name__.endswith("CUDA")]
    return {f"{kind.__name__}.{name}": kind for kind in of_cuda for name in unittest.defaultTestLoader.getTestCaseNames(kind)}


_module: Any = None
_is_active = True


def _begin(path: Path, is_active: bool) -> None:
    global _module, _is_active
    _module, _is_active = load(path), is_active


def _run(name: str) -> Outcome:
    from flashgen.integrations import sdpa

    kind, result = cases(_module)[name], unittest.TestResult()
    sdpa.report(reset=True)
    with sdpa.enabled() if _is_active else contextlib.nullcontext():
        kind(name.partition(".")[2]).run(result)
    counts = tuple(sdpa.report())
    if result.skipped:
        return Outcome(name, "skipped", result.skipped[0][1], counts)  # type: ignore[arg-type]
    bad = [*result.failures, *result.errors]
    return Outcome(name, "failed" if bad else "passed", _error_of(bad[0][1]) if bad else "", counts)  # type: ignore[arg-type]


def _error_of(traceback: str) -> str:
    """The line that names the exception: PyTorch's tests say more behind it."""
    lines = [line for line in traceback.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return lines[-1] if lines else traceback[-300:]


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--names", default="flash|fused", help="a regular expression")
    parser.add_argument("--but", default=r"seq_len_q_(\d+)_seq_len_k_(?!\1_).*is_causal_True", help="the same, of names that are left out")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--without", action="store_true", help="leave flashgen inactive")
    options = parser.parse_args(argv)
    wanted = sorted(name for name in cases(load(options.tests)) if re.search(options.names, name) and not re.search(options.but, name))
    drawn = random.Random(options.seed).sample(wanted, len(wanted))
    found: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, _begin, (options.tests, not options.without)) as pool:
        for outcome in pool.imap(_run, drawn):  # in the order in which they were drawn
            found.append(outcome)
            if sum(each.result != "skipped" for each in found) == options.count:
                break
        pool.terminate()
    results = Counter(outcome.result for outcome in found)
    print(f"seed {options.seed}: {len(wanted)} tests match; {dict(results)}")
    for reason, count in Counter(outcome.why for outcome in found if outcome.result == "skipped").items():
        print(f"skipped by PyTorch {count}: {reason}")
    for i, what in enumerate(("run", "passed on")):
        counts: Counter[str] = Counter()
        for outcome in found:
            counts.update(outcome.counts[i])
        print(f"{what}: {dict(counts)}")
    for outcome in found:
        if outcome.result == "failed":
            print(f"FAILED {outcome.name}: {outcome.why}")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
