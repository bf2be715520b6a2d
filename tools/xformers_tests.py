"""Runs a sample of xformers' own tests of memory_efficient_attention on flashgen, as `flashgen.integrations.xformers` puts it there.

    python -m tools.xformers_tests CHECKOUT/tests/test_mem_eff_attention.py --cases 300 --seed 1 --processes 16

The file is that of a checkout of xformers 0.0.35; it needs a GPU and pytest, of xformers its Python files alone. Its cases are made for
operators of xformers: two of the tool's stand in for these, and say what flashgen takes. A call that names one of them runs flashgen's
kernels. Each test function has an equal share of the cases, as far as it has so many. Cases are drawn with the seed, which is printed, from
those that the file itself does not skip. Counts of passed and failed cases are printed, and of skipped ones by their reason; failures with
their parameters and the beginning of what they say. Exit 1 if one fails, or has not been run.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import random
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import xformers.ops
from xformers.ops import fmha
from xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase, _is_bias_type_supported_in_BMK

from flashgen.integrations import xformers as ours
from flashgen.integrations.xformers_biases import _ROUTES

# What the file tests of a call; the rest is about xformers' operators, which it looks up and refuses by, and about biases alone.
FUNCTIONS = (
    "test_forward",
    "test_logsumexp",
    "test_logsumexp_mqa",
    "test_backward",
    "test_cuda_streams",
    "test_custom_scale",
    "test_grad_checkpointing",
    "test_forward_gqa",
    "test_backward_gqa",
    "test_forward_gqa_one_group",
    "test_mqa_decoding",
    "test_empty_tensors_empty_query",
    "test_empty_tensors_empty_kv",
    "test_empty_tensors_empty_b",
    "test_attn_bias_padded",
    "test_paged_attention_flash",
)
_FIRST_LINE = 400  # characters
_BIASES = (type(None), torch.Tensor, fmha.attn_bias.LowerTriangularMask, fmha.attn_bias.LowerTriangularMaskWithTensorBias, *_ROUTES)


class _Limits:
    """What flashgen takes, as xformers' operators say it."""

    OPERATOR = staticmethod(ours.memory_efficient_attention)
    SUPPORTED_DEVICES = {"cuda"}  # noqa: RUF012  # as in what this is mixed into
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)
    SUPPORTED_DTYPES = {torch.float16, torch.bfloat16}  # noqa: RUF012
    SUPPORTED_MIN_K = 8
    SUPPORTED_MAX_K = 256
    SUPPORTED_ATTN_BIAS_TYPES: tuple[Any, ...] = _BIASES
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        return [f"head dim {size}" for size in (K, Kv) if size % 8 or not cls.SUPPORTED_MIN_K <= size <= cls.SUPPORTED_MAX_K]

    @classmethod
    def not_supported_reasons(cls, d: fmha.Inputs) -> list[str]:
        reasons = cls.shape_not_supported_reasons(d.query.shape[1], d.key.shape[1], d.query.shape[-1], d.value.shape[-1])
        if d.query.dtype not in cls.SUPPORTED_DTYPES or type(d.attn_bias) not in cls.SUPPORTED_ATTN_BIAS_TYPES:
            reasons.append(f"{d.query.dtype}, {type(d.attn_bias).__name__}")
        return reasons


class StandInFw(_Limits, AttentionFwOpBase):  # type: ignore[misc]
    """In the place of an operator of the forward pass."""

    NAME = "flashgenF"


class StandInBw(_Limits, AttentionBwOpBase):  # type: ignore[misc]
    """In the place of one of the backward pass: keys in pages and gappy ones have no gradients."""

    NAME = "flashgenB"
    SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in _BIASES if "Paged" not in kind.__name__ and "Gappy" not in kind.__name__)


class Case(NamedTuple):
    """A test function, and the number of each parametrisation's value."""

    function: str
    values: tuple[int, ...]


class Outcome(NamedTuple):
    """What became of a case: passed, failed or skipped, why, and in how many seconds."""

    case: Case
    result: str
    reason: str
    seconds: float


_loaded: ModuleType | None = None  # a process has one


def load(path: Path) -> ModuleType:
    """The file as a module, with flashgen in xformers' place."""
    global _loaded
    if _loaded is None:
        try:
            import scipy.stats  # noqa: F401
        except ImportError:  # the file asks for it where it tests other kernels
            stats = types.ModuleType("scipy.stats")
            stats.binomtest = None  # type: ignore[attr-defined]
            sys.modules |= {"scipy": types.ModuleType("scipy"), "scipy.stats": stats}
        fmha.flash.FwOp, fmha.flash.BwOp = StandInFw, StandInBw
        fmha.ALL_FW_OPS[:], fmha.ALL_BW_OPS[:] = [StandInFw], [StandInBw]
        ours.install()
        for module in (xformers.ops, fmha):
            for name in (
                "memory_efficient_attention",
                "memory_efficient_attention_forward",
                "memory_efficient_attention_forward_requires_grad",
            ):
                setattr(module, name, _without_stand_ins(getattr(module, name)))
        sys.path.insert(0, str(path.parent.parent))
        _loaded = importlib.import_module(f"{path.parent.name}.{path.stem}")
    return _loaded


def _without_stand_ins(function: Any) -> Any:
    def call(*given: Any, op: Any = None, **named: Any) -> Any:
        operators = op if isinstance(op, tuple) else (op,)
        return function(*given, op=None if {*operators} <= {None, StandInFw, StandInBw} else op, **named)

    return call


def parametrisations(function: Any) -> list[tuple[tuple[str, ...], list[Any]]]:
    """The names that each one has, and its values."""
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


def is_run(given: dict[str, Any]) -> bool:
    """Whether a case is one of the stand-ins', of a GPU, and of a combination that the file does not skip."""
    flat = list(itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in given.values()))
    operators = {value for value in flat if isinstance(value, type) and issubclass(value, (AttentionFwOpBase, AttentionBwOpBase))}
    if not operators <= {StandInFw, StandInBw} or "cpu" in flat:
        return False
    shape = next((value for value in given.values() if isinstance(value, tuple) and len(value) == 10), None)
    if shape is None:
        bias = next((value for value in flat if value in _BIASES), None) if "Mq" in given else None
        return (
            bias is None
            or given["Mq"] > 1
            or not issubclass(bias, (fmha.attn_bias.LowerTriangularMask, fmha.attn_bias.BlockDiagonalCausalMask))
        )
    bias, len_q, len_kv, head_dim, head_dim_v = shape[3], shape[5], shape[6], *shape[8:]
    if given.get("packed") and (head_dim != head_dim_v or len_q != len_kv or "Paged" in bias.__name__):
        return False
    return given.get("fmt") != "BMK" or bool(_is_bias_type_supported_in_BMK(bias))


def drawn_cases(tests: ModuleType, count: int, seed: int) -> list[Case]:
    """As many different cases, the same number of each function as far as it has so many."""
    generator = random.Random(seed)
    left: dict[str, list[Case]] = {}
    for name in FUNCTIONS:
        sizes = [range(len(values)) for _, values in parametrisations(getattr(tests, name))]
        cases = [
            case
            for case in itertools.starmap(Case, ((name, values) for values in itertools.product(*sizes)))
            if is_run(parameters(tests, case))
        ]
        generator.shuffle(cases)
        left[name] = cases
    rounds = itertools.zip_longest(*left.values())
    return [case for case in itertools.chain.from_iterable(rounds) if case is not None][:count]


def run(path: Path, case: Case) -> Outcome:
    """Runs one case, in this process."""
    tests, start = load(path), time.monotonic()
    result, reason = "passed", ""
    random.seed(str(case))
    try:
        getattr(tests, case.function)(**parameters(tests, case))
    except pytest.skip.Exception as skipped:
        result, reason = "skipped", str(skipped)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.line for frame in reversed(frames) if frame.filename == str(path)), "")
        result, reason = "failed", f"{type(error).__name__}: {str(error)[:_FIRST_LINE]} at {line}"
    torch.cuda.empty_cache()
    return Outcome(case, result, reason, time.monotonic() - start)


def _run(arguments: tuple[Path, Case]) -> Outcome:
    return run(*arguments)


def _begin() -> None:
    """Of a process of the pool: what tests print goes nowhere."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the life of the process


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("PART", "OF"), help="every OF-th case alone, from PART on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="do not wait longer for results")
    options = parser.parse_args(argv)
    path = options.file.resolve()
    tests = load(path)
    drawn = drawn_cases(tests, options.cases, options.seed)
    cases = drawn[options.part[0] :: options.part[1]]
    print(f"seed {options.seed}: {len(cases)} cases of {len(drawn)} drawn, of {len(FUNCTIONS)} test functions", flush=True)
    outcomes: list[Outcome] = []
    start = time.monotonic()
    pool = multiprocessing.get_context("spawn").Pool(options.processes, _begin)
    try:
        results = pool.imap_unordered(_run, [(path, case) for case in cases])
        for _ in cases:
            outcomes.append(results.next(timeout=max(0.1, options.seconds - (time.monotonic() - start))))
            last = outcomes[-1]
            if last.result == "failed":
                print(f"failed {last.case.function} {parameters(tests, last.case)}: {last.reason}", flush=True)
    except multiprocessing.TimeoutError:
        print(f"stopped after {options.seconds:.0f} s: {len(cases) - len(outcomes)} cases have not been run")
    finally:
        pool.terminate()
    counts = Counter(outcome.result for outcome in outcomes)
    print(f"passed {counts['passed']}, failed {counts['failed']}, skipped {counts['skipped']}, in {time.monotonic() - start:.0f} s")
    for reason, number in Counter(outcome.reason for outcome in outcomes if outcome.result == "skipped").most_common():
        print(f"  skipped {number}: {reason}")
    for name in FUNCTIONS:
        own = [outcome for outcome in outcomes if outcome.case.function == name]
        by_result = Counter(outcome.result for outcome in own)
        slowest = max((outcome.seconds for outcome in own), default=0.0)
        print(f"  {name}: {', '.join(f'{by_result[r]} {r}' for r in sorted(by_result))}; the slowest took {slowest:.1f} s")
    return 1 if counts["failed"] or len(outcomes) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
