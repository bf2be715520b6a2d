"""Runs a sample of PyTorch's own tests of FlexAttention with flashgen in the place of its compiled kernels.

    python -m tools.flex_attention_tests CHECKOUT/test/inductor/test_flex_attention.py --cases 300 --seed 1 --processes 16

The file is that of a checkout of PyTorch; it needs a GPU. Its tests compare compiled calls of flex_attention with the same calls in eager
mode, in their dtype and in float64: the compiled ones in 16 bits become those of `flashgen.integrations.flex_attention`, all others stay.
Cases of other dtypes, and those that look at PyTorch's own generated code, are not drawn. A case in which flashgen ran nothing counts as
skipped. Each test function has an equal share of the cases, as far as it has so many; they are drawn with the seed, which is printed.
Counts of passed and failed cases are printed, and of skipped ones by their reason. Exit 1 if one fails, or has not been run.
"""

from __future__ import annotations

import random
import re
import sys
import time
import unittest
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as theirs

from flashgen.integrations import flex_attention as ours
from tools.upstream_tests import Outcome, in_turns, loaded, parsed_options, run_all

# Names of tests that are not about what a call gives: generated code, tuning, the operator itself, kernels for CPUs, other dtypes.
_NOT_OF_CALLS = re.compile(
    r"float32|float64|fp8|tf32|_cpu|logging|codegen|fusion|autotune|kernel_options|inputs_are_realized|make_fx|fx_|graph|aot|"
    r"metrics|dynamic|recompile|num_warps|block_m|backend|cudagraph|multi_?gpu|determinism|num_stages|inductor|lowering|joint"
)
_FIRST_LINE = 400  # characters
_calls = [0]  # of flashgen, in this process


def flex_attention(query: Any, key: Any, value: Any, *given: Any, **named: Any) -> Any:
    """PyTorch's, but flashgen's where it is compiled in 16 bits."""
    if is_compiling() and query.dtype in (torch.float16, torch.bfloat16):
        _calls[0] += 1
        return ours.flex_attention(query, key, value, *given, **named)
    return theirs.flex_attention(query, key, value, *given, **named)


_loaded: ModuleType | None = None  # a process has one


def load(path: Path) -> ModuleType:
    """The file as a module, with flashgen's function by the name of PyTorch's."""
    global _loaded
    if _loaded is None:
        torch._inductor.config.compile_threads = 1  # a process has many others beside it
        _loaded = loaded(path)
        _loaded.flex_attention = flex_attention  # type: ignore[attr-defined]
    return _loaded


def cases_of(tests: ModuleType) -> dict[str, list[str]]:
    """The names of cases by test function; a case is Class.method."""
    found: dict[str, list[str]] = {}
    for each in vars(tests).values():
        if isinstance(each, type) and issubclass(each, unittest.TestCase) and each.__module__ == tests.__name__:
            for name in unittest.TestLoader().getTestCaseNames(each):
                if not _NOT_OF_CALLS.search(name):
                    found.setdefault(_function(name), []).append(f"{each.__name__}.{name}")
    return found


def _function(case: str) -> str:
    """The name without parameters: dtypes, and names of others with the number of their value."""
    return re.split(r"_(?:b?float16|cuda|batch:|score_mod\d|score_mask_mod\d|batch_dims\d|head_dims\d|BLOCK_SIZE\w|q_s\d|mode_)", case)[0]


def drawn_cases(of_functions: dict[str, list[str]], count: int, seed: int) -> list[str]:
    """As many different cases, the same number of each function as far as it has so many."""
    generator = random.Random(seed)
    return in_turns([generator.sample(cases, len(cases)) for _, cases in sorted(of_functions.items())], count)


def run(path: Path, case: str) -> Outcome:
    """Runs one case, in this process."""
    tests, start, before = load(path), time.monotonic(), _calls[0]
    kind, name = case.split(".")
    torch._dynamo.reset()
    result = unittest.TestResult()
    getattr(tests, kind)(name).run(result)
    torch.cuda.empty_cache()
    seconds = time.monotonic() - start
    if result.skipped:
        return Outcome(_function(name), case, "skipped", result.skipped[0][1], seconds)
    if wrong := result.errors + result.failures:
        return Outcome(_function(name), case, "failed", _error(wrong[0][1]), seconds)
    if _calls[0] == before:
        return Outcome(_function(name), case, "skipped", "flashgen was not called", seconds)
    return Outcome(_function(name), case, "passed", "", seconds)


def _error(report: str) -> str:
    """The beginning of what an error says, from unittest's report of it."""
    lines = [line for line in report.partition("To execute this test")[0].splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Unsupported|Failure)\b", line)]
    return " / ".join(lines[errors[-1] if errors else -1 :])[:_FIRST_LINE]


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    options = parsed_options(__doc__, 300, argv)
    of_functions = cases_of(load(options.file))
    drawn = drawn_cases(of_functions, options.cases, options.seed)
    return run_all(partial(run, options.file), drawn, sorted(of_functions), options, lambda case: _function(case.split(".")[1]))


if __name__ == "__main__":
    sys.exit(main())
