"""That `verify` without a GPU sees what dense tensors and short sequences hide."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.family import Family, families
from flashgen.codegen.operands import Call, View
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.verification.cases import COARSE, FAR, HUGE, LONG, SCREENING, SHAPES
from flashgen.verification.screen import Screen
from tests.support.examples import families_of, taken
from tests.support.plan import planned
from tests.support.runs import emulated_kernel, emulated_text

PROBLEM, TARGET = Problem(Dtype.BF16, 64, 64, Mask.FULL), find_target("sm_90a")
QUICK_STRIDES, QUICK_HIDDEN = 1, 0  # of each family for every run; --slow has all
COMPENSATION = {  # of the families whose sums are so long that they need it
    "attention_forward": "row.compensation[h] += partial[i][h] - (row.row_sum[h] - before);",
    "attention_forward_sm90": "compensation[h] += partial[h][0] - (row_sum[h] - before);",
}
NAMES, DIMS = ("q", "k", "v", "out"), ("batch", "row", "head")
INCREASED = "setmaxnreg_inc<kConsumerRegisters>"
DECREASED = "setmaxnreg_dec<kProducerRegisters>"


def kernel_text(family: Family, find: str = "", replace: str = "", problem: Problem = PROBLEM) -> tuple[KernelSpec, str]:
    spec = KernelSpec(family, problem, family.default(problem, TARGET), TARGET)
    text = emulated_text(spec).text
    assert not find or text.count(find) == 1, f"{family.name} must have this text once: {find!r}"
    return spec, text.replace(find, replace) if find else text


def kernel_of(family: Family, find: str = "", replace: str = "", problem: Problem = PROBLEM) -> EmulatedKernel:
    spec, text = kernel_text(family, find, replace, problem)
    return emulated_kernel(spec, Source(spec.name, text))


def why_rejected(screen: Screen, kernel: EmulatedKernel) -> str:
    try:
        return "; ".join(result.verdict.message for result in screen.judge(kernel) if not result.verdict.ok)
    except EmulatorFaultError as fault:
        return str(fault)


def listed(faults: Mapping[str, tuple[Any, ...]], seconds: float, each: int | Callable[[str], int] = QUICK_HIDDEN) -> list[object]:
    """Faults by their names as parameters: the first is the family, of which every run has `each`."""
    return planned(
        faults.values(),
        each,
        family=lambda fault: fault[0],
        kinds=lambda fault: fault[1:2],
        name=lambda fault: next(name for name, one in faults.items() if one == fault),
        seconds=lambda fault: seconds,
        fault=True,
    )


@cache
def screened(family: Family) -> tuple[Screen, EmulatedKernel]:
    """A screen of two batches and heads of each kind, and a kernel that it accepts."""
    w = taken(family, PROBLEM, Workload(2, 4, 2, 70, 100))
    shape = (w.batch, w.heads_q, w.heads_kv, w.len_q, w.len_kv)
    screen, kernel = Screen(PROBLEM, "cpu", [shape]), kernel_of(family)
    assert not why_rejected(screen, kernel)
    return screen, kernel


@cache
def special_screen(family: str, shape: tuple[int, int, int, int, int]) -> Screen:
    """A screen of one special case, which accepts the family's kernel: once for all faults that it is to see."""
    screen = Screen(PROBLEM, "cpu", (), special=[shape])
    assert not why_rejected(screen, kernel_of(families()[family]))
    return screen


@cache
def ordinary_screen() -> Screen:
    return Screen(PROBLEM, "cpu")


@cache
def edge_screen(family: str) -> Screen:
    """The same of shapes with a key at the edge of a step."""
    causal, edges = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL), [shape for shape in SHAPES if 641 <= sum(shape[3:]) // 2 <= 642]
    assert len(edges) == 2
    screen = Screen(causal, "cpu", edges)
    assert not why_rejected(screen, kernel_of(families()[family], problem=causal))
    return screen


@pytest.mark.parametrize(
    ("family", "taken", "of", "dim"),
    planned(
        [(f, *two, dim) for f, two, dim in itertools.product(families_of(), itertools.permutations(range(4), 2), range(3))],
        QUICK_STRIDES,
        family=lambda one: one[0].name,
        kinds=lambda one: enumerate(one),
        name=lambda one: f"{one[0].name}-{DIMS[one[3]]}-of-{NAMES[one[1]]}-from-{NAMES[one[2]]}",
        seconds=lambda one: 0.2,
    ),
)
def test_a_stride_taken_for_another_is_seen(family: Family, taken: int, of: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor's batch, head and row with the strides of each other one."""
    (screen, kernel), made = screened(family), Tensors.call

    def mixed(tensors: Tensors, scalars: Mapping[str, float] | None = None) -> Call:
        call = made(tensors, scalars)
        strides = list(call.views[NAMES[taken]].strides)
        strides[dim] = call.views[NAMES[of]].strides[dim]
        view = View(call.views[NAMES[taken]].sizes, tuple(strides))
        return call._replace(views={**call.views, NAMES[taken]: view})

    monkeypatch.setattr(Tensors, "call", mixed)
    assert why_rejected(screen, kernel), f"{NAMES[taken]}'s stride of its {DIMS[dim]} was taken from {NAMES[of]}, and accepted"


@pytest.mark.parametrize("family", listed({family.name: (family.name,) for family in families_of()}, seconds=4.0, each=0))
def test_sums_without_compensation_are_seen(family: str) -> None:
    screen, found = Screen(PROBLEM, "cpu", (), special=[LONG]), families()[family]
    assert [case.workload.len_kv for case in screen.cases(1)] == [LONG[-1]]
    assert not why_rejected(screen, kernel_of(found))
    if family in COMPENSATION:
        assert why_rejected(screen, kernel_of(found, COMPENSATION[family])).startswith("lse max error")


def truncated(low: str, high: str) -> str:
    """Two numbers as bf16, rounded towards 0."""
    return f"(__float_as_uint({low}) >> 16 | (__float_as_uint({high}) & 0xffff0000u))"


def address_in_32_bits(function: str, dim: str) -> tuple[str, str]:
    """The body of a function of DenseSequences, and one that multiplies an index of `dim` by its stride in 32 bits."""
    find = (
        f"{function}(Element* tensor, const Strides& strides, int batch, int head, int row) const {{\n"
        "        return tensor + batch * strides.batch + head * strides.head + row * strides.row;"
    )
    return find, find.replace(f"{dim} * strides.{dim}", f"static_cast<int>({dim} * strides.{dim})")


_PAIR = "pair[i % 2 * 2] * normalisers[i % 2]", "pair[i % 2 * 2 + 1] * normalisers[i % 2]"
_OUT = "out[i][j][h * 2]", "out[i][j][h * 2 + 1]"
_MOVED = "move_origin(origin, maximum[{0}], scale_log2, ln2_hi)"
# What shapes with ordinary scores and dense tensors hide: the family, which special case sees it, and the fault.
HIDDEN = {
    "queries-32-bits": ("attention_forward", FAR, *address_in_32_bits("query_row", "row")),
    "heads-32-bits": ("attention_forward", FAR, *address_in_32_bits("query_row", "head")),
    "batches-32-bits": ("attention_forward", FAR, *address_in_32_bits("key_row", "batch")),
    "values-32-bits": ("attention_forward", FAR, "v + last * kBlockKv * v_row,", "v + static_cast<int>(last * kBlockKv * v_row),"),
    "passes-32-bits": (
        "attention_forward",
        FAR,
        "source -= Passes::kRowsPerPass * row_stride;",
        "source -= static_cast<int>(Passes::kRowsPerPass * row_stride);",
    ),
    "output-32-bits": (
        "attention_forward",
        FAR,
        "rows + partition.row * row_stride +",
        "rows + static_cast<int>(partition.row * row_stride) +",
    ),
    "shift-of-another-row": (
        "attention_forward",
        HUGE,
        "S[i][j][h * 2 + 1] -= shift[i][h];",
        "S[i][j][h * 2 + 1] -= shift[i][0];",
    ),
    "huge-sums-not-rescaled": (
        "attention_forward",
        HUGE,
        f"factor[i][h] = {_MOVED.format('i][h')};",
        f"{_MOVED.format('i][h')}, factor[i][h] = 1.0f;",
    ),
    "sm90-huge-sums-not-rescaled": (
        "attention_forward_sm90",
        HUGE,
        f"rescale_sum(h, {_MOVED.format('h')});",
        f"{_MOVED.format('h')}, factor[h] = 1.0f;",
    ),
    "sm90-shift-not-kept": ("attention_forward_sm90", HUGE, "            shift[h] = origin.shift;\n", ""),
    "sm90-huge-forgotten": ("attention_forward_sm90", HUGE, "huge |= vote_sync_any(any_huge);", "huge = vote_sync_any(any_huge);"),
    "sm90-huge-told-by-another-row": ("attention_forward_sm90", HUGE, "(huge) && shift[h] != 0.0f)", "(huge) && shift[0] != 0.0f)"),
    "output-truncated": ("attention_forward", COARSE, f"cvt_rn_x2<Element>({', '.join(_OUT)})", truncated(*_OUT)),
    "probabilities-truncated": (
        "attention_forward",
        COARSE,
        "P[i][e] = cvt_rn_x2<Element>(low, high)",
        f"P[i][e] = {truncated('low', 'high')}",
    ),
    "sm90-output-truncated": ("attention_forward_sm90", COARSE, f"cvt_rn_x2<Element>({', '.join(_PAIR)})", truncated(*_PAIR)),
    "sm90-probabilities-truncated": (
        "attention_forward_sm90",
        COARSE,
        "P[j / 2][j % 2 * 2 + h] = cvt_rn_x2<Element>(low, high)",
        f"P[j / 2][j % 2 * 2 + h] = {truncated('low', 'high')}",
    ),
}


def test_every_fault_finds_its_place() -> None:
    """Those that only --slow runs, too: a kernel that is written anew must not leave them behind."""
    causal = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL)
    places = [(PROBLEM, family, find) for family, _, find, _ in HIDDEN.values()]
    places += [(PROBLEM, family, find) for family, find in COMPENSATION.items()]
    places += [(causal, family, find) for family, find, _ in EDGES.values()]
    for problem, family, find in places:
        kernel_text(families()[family], find, problem=problem)


@pytest.mark.parametrize(("family", "shape", "find", "replace"), listed(HIDDEN, seconds=2.5))
def test_what_ordinary_cases_hide_is_seen(family: str, shape: tuple[int, int, int, int, int], find: str, replace: str) -> None:
    screen, faulty = special_screen(family, shape), kernel_of(families()[family], find, replace)
    assert why_rejected(screen, faulty)
    assert not why_rejected(ordinary_screen(), faulty), "it is not hidden"


_LAST, _SHORT = "keys(first_query + kBlockQ - 1);", "keys(first_query + kBlockQ - 2);"
EDGES = {
    "first": ("attention_forward", "of_first = keys(first_query),", "of_first = keys(first_query + 2),"),
    "last": ("attention_forward", _LAST, _SHORT),
    "sm90-last": ("attention_forward_sm90", _LAST, _SHORT),
}


@pytest.mark.parametrize(("family", "find", "replace"), listed(EDGES, seconds=2.5, each=0))
def test_a_key_at_the_edge_of_a_step_is_seen(family: str, find: str, replace: str) -> None:
    screen = edge_screen(family)
    assert why_rejected(screen, kernel_of(families()[family], find, replace, screen.problem))


@pytest.mark.parametrize(
    ("find", "change", "says"),
    [
        (INCREASED, "+ 8", "have 520 registers together, a thread of each; the launch gives them 504"),
        pytest.param(INCREASED, "- 8", "have 488 registers together, a thread of each; the launch gives them 504", marks=pytest.mark.slow),
        pytest.param(DECREASED, "+ 8", "have 512 registers together", marks=pytest.mark.slow),
        pytest.param(DECREASED, "+ 136", "is at setmaxnreg_dec to have 176 registers a thread, and has 168", marks=pytest.mark.slow),
    ],
)
def test_registers_that_do_not_add_up_are_seen(find: str, change: str, says: str) -> None:
    kernel = kernel_of(families()["attention_forward_sm90"], find, find[:-1] + f" {change}>")
    assert says in why_rejected(Screen(PROBLEM, "cpu", SCREENING[1:]), kernel)


def test_threads_that_the_launch_bounds_do_not_say_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(families()["attention_forward"])
    monkeypatch.setattr(kernel.spec.family, "threads", lambda config: 160)
    assert "launch: the block has 160 threads, the kernel's launch bounds say 128" in why_rejected(Screen(PROBLEM, "cpu"), kernel)
