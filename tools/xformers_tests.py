"""Runs a sample of xformers' own tests of memory_efficient_attention on flashgen, as `flashgen.integrations.xformers` puts it there.

    python -m tools.xformers_tests CHECKOUT/tests/test_mem_eff_attention.py --cases 300 --seed 1 --processes 16

The file is that of a checkout of xformers 0.0.35; it needs a GPU and pytest, of xformers its Python files alone. Its cases are made for
operators of xformers: two of the tool's stand in for these, and say what flashgen takes. A call that names one of them runs flashgen's
kernels. Each test function has an equal share of the cases, as far as it has so many. Cases are drawn with the seed, which is printed, from
those that the file itself does not skip. Counts of passed and failed cases are printed, and of skipped ones by their reason; failures with
their parameters and the beginning of what they say. Exit 1 if one fails, or has not been run.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import xformers.ops
from xformers.ops import fmha
from xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase, _is_bias_type_supported_in_BMK

from flashgen.integrations import xformers as ours
from flashgen.integrations.xformers_biases import _ROUTES
from tools.upstream_tests import Case, Outcome, in_turns, outcome_of, parameters, parametrisations, parsed_options, run_all

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
    of_functions = []
    for name in FUNCTIONS:
        numbers = itertools.product(*(range(len(values)) for _, values in parametrisations(getattr(tests, name))))
        cases = [case for case in (Case(name, values) for values in numbers) if is_run(parameters(tests, case))]
        generator.shuffle(cases)
        of_functions.append(cases)
    return in_turns(of_functions, count)


def run(path: Path, case: Case) -> Outcome:
    """Runs one case, in this process."""
    random.seed(str(case))
    return outcome_of(load(path), case)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    options = parsed_options(__doc__, 300, argv)
    drawn = drawn_cases(load(options.file), options.cases, options.seed)
    return run_all(partial(run, options.file), drawn, FUNCTIONS, options)


if __name__ == "__main__":
    sys.exit(main())
