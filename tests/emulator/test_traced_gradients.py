"""Gradients of captured tensors, and of scores that a score_mod bends, in the emulator: kernels by the numerics rule, and faults that show.

What callers see of them: test_learned_tensors.
"""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.tensors import Tensors
from tests.support.fault import Fault
from tests.support.learning import DIVIDES_BY_0_AT, learning_name
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_faults
from tests.support.plan import planned
from tests.support.runs import emulated_text

GENERIC, HOPPER = "attention_backward", "attention_backward_sm90"
SMALL = AttentionBackwardConfig(32, 32, 16, 4, 2, 32, 1)


def learning(family: str, head_dim: int, mask: Mask, functions: str, others: tuple[str, ...], config: Config | None) -> NamedKernel:
    return NamedKernel(family, head_dim, mask, False, (*others, learning_name(functions)), config)


KERNELS = {
    "distance": learning(GENERIC, 64, Mask.FULL, "distance", (), None),
    "distance-sm90": learning(HOPPER, 64, Mask.FULL, "distance", (), None),
    "slope": learning(GENERIC, 64, Mask.CAUSAL, "slope", (), None),
    "slope-sm90": learning(HOPPER, 128, Mask.FULL, "slope", ("window",), None),
    "key": learning(GENERIC, 64, Mask.FULL, "key", (), SMALL),
    "key-sm90": learning(HOPPER, 64, Mask.CAUSAL, "key", ("bias",), None),
    "query": learning(GENERIC, 128, Mask.CAUSAL, "query", ("dropout",), None),
    "query-sm90": learning(HOPPER, 64, Mask.FULL, "query", (), None),
    "of-another": learning(GENERIC, 64, Mask.FULL, "of-another", ("sinks",), None),
    "number-sm90": learning(HOPPER, 64, Mask.FULL, "number", (), None),
    "twice": learning(GENERIC, 64, Mask.FULL, "twice", (), None),
    "cap": learning(GENERIC, 64, Mask.CAUSAL, "cap", (), None),
    "cap-of-cap": learning(GENERIC, 64, Mask.FULL, "cap", ("bias", "softcap", "window"), SMALL),
    "factor": learning(GENERIC, 128, Mask.FULL, "factor", ("bias",), None),
    "gate": learning(GENERIC, 64, Mask.CAUSAL, "gate", ("sinks",), SMALL),
    "branch": learning(GENERIC, 256, Mask.FULL, "branch", (), None),
}
LENGTHS = ((90, 170), (140, 40))
CASES = [(kernel, lengths) for kernel in KERNELS for lengths in LENGTHS if kernel != "branch" or lengths[0] == DIVIDES_BY_0_AT]


def drawn(spec: KernelSpec, lengths: tuple[int, int]) -> Tensors:
    ends = (60, 20) if "window" in spec.problem.modifiers else (OPEN, OPEN)
    return Tensors.random(spec.problem, Workload(2, 4, 2, *lengths, *ends), torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    planned(
        CASES,
        2,
        family=lambda case: KERNELS[case[0]].family,
        kinds=lambda case: (case[0], KERNELS[case[0]].modifiers[-1]),
        name=lambda case: f"{case[0]}-{case[1]}",
        seconds=lambda case: 3.0,
    ),
)
def test_gradients_are_as_they_should(kernel: str, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, lengths))
    assert verdict.ok, verdict.message


_OF_KEY = "gradient.position(batch, head, first_query, position.row(i, h))"
_LAST = "if (lane_index() % 4 == 0 && total"
_SHUFFLE = "distance < 32; distance *= 2) "
_COLUMN = "query = first_query + j * 8 + e % 2;\n                if (dS"
_KEPT, _BENT = "keep_for<Links>(before, S)", "add_by(static_cast<const Links&>(chain), S, offset, position)"
_OF_HEAD = "dS, dS, unit, position, batch, heads[0]);"
_ROW = "position = position * tensor.sizes[dimension]"
FAULTS = [
    fault_of("no-factor", "dS[i][j][e] * gradient.factor(", "dS[i][j][e] + 0.0f * gradient.factor(", "slope"),
    fault_of("wrong-element", _ROW, "position = position * (tensor.sizes[dimension] - 1)", "query"),
    fault_of("other-index", _OF_KEY, "gradient.position(batch, head, position.row(i, h), first_query)", "key"),
    fault_of("queries-not-summed", f"{_SHUFFLE}of_query", "distance < 16; distance *= 2) of_query", "query"),
    fault_of("keys-not-summed", f"total += shfl_sync_bfly(total, 2);\n                {_LAST}", _LAST, "key-sm90"),
    fault_of("not-of-all", f"{_SHUFFLE}of_all", "distance < 16; distance *= 2) of_all", "slope-sm90"),
    fault_of("of-one-head", _OF_HEAD, "dS, dS, unit, position, batch, 0);", "of-another"),
    fault_of("of-one-entry", _OF_HEAD, "dS, dS, unit, position, 0, heads[0]);", "key"),
    fault_of("one-column-off", _COLUMN, _COLUMN.replace(" + e % 2", ""), "distance-sm90"),
    fault_of("all-in-one", "sums.first[Gradients::kSums]", "sums.first[1]", "number-sm90"),
    fault_of("last-sums-left", "n < count)", "n < count - 1)", "distance"),
    fault_of("no-slope", "dS[i][j][e] *= with_slope.slope(", "(void)with_slope.slope(", "cap"),
    fault_of("of-changed-scores", f"{_KEPT}, {_BENT}", f"{_BENT}, {_KEPT}", "gate"),
    fault_of("not-scaled", "with_slope.slope(before[i][j][e] * unit,", "with_slope.slope(before[i][j][e],", "cap"),
    fault_of("scores-for-gradients", "sums.first[Gradients::kSums], dS, S, unit", "sums.first[Gradients::kSums], S, S, unit", "factor"),
    fault_of("factor-of-product", "gradient.factor(S[i][j][e] * unit,", "gradient.factor(S[i][j][e],", "factor"),
    fault_of("hidden-too", "if (dS[i][j][e] != 0.0f) dS[i][j][e] *= with_slope", "dS[i][j][e] *= with_slope", "branch"),
    fault_of("past-the-end-too", "if (!Position::kRowsAreKeys || query < len_q)", "", "branch"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned_faults(FAULTS, KERNELS, 3.0),
)
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    assert not judged(spec, planted.apply(emulated_text(spec), Atoms.EMULATED), drawn(spec, (90, 170))).ok
