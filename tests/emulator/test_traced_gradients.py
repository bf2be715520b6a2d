"""Gradients of captured tensors, and of scores that a score_mod bends, in the emulator: kernels by the numerics rule, and faults that show.

What callers see of them: test_learned_tensors.
"""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.fault import Fault, Setting
from tests.support.learning import DIVIDES_BY_0_AT, learning_name
from tests.support.plan import planned, to_run
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text

GENERIC, HOPPER = "attention_backward", "attention_backward_sm90"
SMALL = AttentionBackwardConfig(32, 32, 16, 4, 2, 32, 1)
# Family, head dim, mask, functions, other modifiers, a config other than the default.
KERNELS: dict[str, tuple[str, int, Mask, str, tuple[str, ...], Config | None]] = {
    "distance": (GENERIC, 64, Mask.FULL, "distance", (), None),
    "distance-sm90": (HOPPER, 64, Mask.FULL, "distance", (), None),
    "slope": (GENERIC, 64, Mask.CAUSAL, "slope", (), None),
    "slope-sm90": (HOPPER, 128, Mask.FULL, "slope", ("window",), None),
    "key": (GENERIC, 64, Mask.FULL, "key", (), SMALL),
    "key-sm90": (HOPPER, 64, Mask.CAUSAL, "key", ("bias",), None),
    "query": (GENERIC, 128, Mask.CAUSAL, "query", ("dropout",), None),
    "query-sm90": (HOPPER, 64, Mask.FULL, "query", (), None),
    "of-another": (GENERIC, 64, Mask.FULL, "of-another", ("sinks",), None),
    "number-sm90": (HOPPER, 64, Mask.FULL, "number", (), None),
    "twice": (GENERIC, 64, Mask.FULL, "twice", (), None),
    "cap": (GENERIC, 64, Mask.CAUSAL, "cap", (), None),
    "cap-of-cap": (GENERIC, 64, Mask.FULL, "cap", ("bias", "softcap", "window"), SMALL),
    "factor": (GENERIC, 128, Mask.FULL, "factor", ("bias",), None),
    "gate": (GENERIC, 64, Mask.CAUSAL, "gate", ("sinks",), SMALL),
    "branch": (GENERIC, 256, Mask.FULL, "branch", (), None),
}
LENGTHS = ((90, 170), (140, 40))
CASES = [(kernel, lengths) for kernel in KERNELS for lengths in LENGTHS if kernel != "branch" or lengths[0] == DIVIDES_BY_0_AT]


def spec_of(kernel: str) -> KernelSpec:
    name, head_dim, mask, functions, others, config = KERNELS[kernel]
    family, target = find_family(name), find_target("sm_90a")
    modifiers = (*others, learning_name(functions))
    problem = Problem(Dtype.FP16, head_dim, head_dim, mask, "backward", False, modifiers)
    return KernelSpec(family, problem, config or family.default(problem, target), target)


def judged(spec: KernelSpec, text: Source, lengths: tuple[int, int]) -> Verdict:
    ends = (60, 20) if "window" in spec.problem.modifiers else (OPEN, OPEN)
    tensors = Tensors.random(spec.problem, Workload(2, 4, 2, *lengths, *ends), torch.Generator().manual_seed(5))
    run_on_cpu(emulated_kernel(spec, text), tensors, limits=LIMITS)
    return Expected.of(tensors).judge(tensors)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    wanted = {params["kernel"] for params in to_run(request) if "kernel" in params}
    compile_ahead(emulated_text(spec_of(kernel)) for kernel in KERNELS if kernel in wanted)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    planned(
        CASES,
        3,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: (case[0], KERNELS[case[0]][3]),
        name=lambda case: f"{case[0]}-{case[1]}",
        seconds=lambda case: 3.0,
    ),
)
def test_gradients_are_as_they_should(kernel: str, lengths: tuple[int, int]) -> None:
    spec = spec_of(kernel)
    verdict = judged(spec, emulated_text(spec), lengths)
    assert verdict.ok, verdict.message


def fault(name: str, find: str, replace: str, kernel: str) -> tuple[str, Fault]:
    return kernel, Fault(f"{name}-{kernel}", find, replace, Setting(KERNELS[kernel][5] or SMALL, ()))


_OF_KEY = "gradient.position(batch, head, first_query, position.row(i, h))"
_LAST = "if (lane_index() % 4 == 0 && total"
_SHUFFLE = "distance < 32; distance *= 2) "
_COLUMN = "query = first_query + j * 8 + e % 2;\n                if (dS"
_KEPT, _BENT = "keep_for<Links>(before, S)", "add_by(static_cast<const Links&>(chain), S, offset, position)"
_OF_HEAD = "dS, dS, unit, position, batch, heads[0]);"
_ROW = "position = position * tensor.sizes[dimension]"
FAULTS = [
    fault("no-factor", "dS[i][j][e] * gradient.factor(", "dS[i][j][e] + 0.0f * gradient.factor(", "slope"),
    fault("wrong-element", _ROW, "position = position * (tensor.sizes[dimension] - 1)", "query"),
    fault("other-index", _OF_KEY, "gradient.position(batch, head, position.row(i, h), first_query)", "key"),
    fault("queries-not-summed", f"{_SHUFFLE}of_query", "distance < 16; distance *= 2) of_query", "query"),
    fault("keys-not-summed", f"total += shfl_sync_bfly(total, 2);\n                {_LAST}", _LAST, "key-sm90"),
    fault("not-of-all", f"{_SHUFFLE}of_all", "distance < 16; distance *= 2) of_all", "slope-sm90"),
    fault("of-one-head", _OF_HEAD, "dS, dS, unit, position, batch, 0);", "of-another"),
    fault("of-one-entry", _OF_HEAD, "dS, dS, unit, position, 0, heads[0]);", "key"),
    fault("one-column-off", _COLUMN, _COLUMN.replace(" + e % 2", ""), "distance-sm90"),
    fault("all-in-one", "sums.first[Gradients::kSums]", "sums.first[1]", "number-sm90"),
    fault("last-sums-left", "n < count)", "n < count - 1)", "distance"),
    fault("no-slope", "dS[i][j][e] *= with_slope.slope(", "(void)with_slope.slope(", "cap"),
    fault("of-changed-scores", f"{_KEPT}, {_BENT}", f"{_BENT}, {_KEPT}", "gate"),
    fault("not-scaled", "with_slope.slope(before[i][j][e] * unit,", "with_slope.slope(before[i][j][e],", "cap"),
    fault("scores-for-gradients", "sums.first[Gradients::kSums], dS, S, unit", "sums.first[Gradients::kSums], S, S, unit", "factor"),
    fault("factor-of-product", "gradient.factor(S[i][j][e] * unit,", "gradient.factor(S[i][j][e],", "factor"),
    fault("hidden-too", "if (dS[i][j][e] != 0.0f) dS[i][j][e] *= with_slope", "dS[i][j][e] *= with_slope", "branch"),
    fault("past-the-end-too", "if (!Position::kRowsAreKeys || query < len_q)", "", "branch"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned(
        FAULTS,
        0,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: [case[1].find],
        name=lambda case: case[1].name,
        seconds=lambda case: 3.0,
        fault=True,
    ),
)
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    spec = spec_of(kernel)
    assert not judged(spec, planted.apply(emulated_text(spec), Atoms.EMULATED), (90, 170)).ok
