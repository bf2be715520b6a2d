"""Softmax kernels on the CPU: rows of any length and any values, the running maximum and sum, and planted faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.operation import find_operation
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from tests.support.examples import families_of
from tests.support.plan import planned, to_run
from tests.support.planted import Planted, rejected
from tests.support.runs import COMPILE_SECONDS, compile_ahead, emulated_kernel, emulated_text

TARGET = find_target("sm_90a")
RIGHT = [family.name for family in families_of("softmax") if family.correct]


def spec_of(family: str, dtype: Dtype = Dtype.FP32) -> KernelSpec:
    found, problem = find_family(family), Problem(dtype, operation="softmax")
    return KernelSpec(found, problem, found.default(problem, TARGET), TARGET)


@cache
def kernel_of(family: str, dtype: Dtype = Dtype.FP32) -> EmulatedKernel:
    return emulated_kernel(spec_of(family, dtype))


def drawn(workload: Workload, dtype: Dtype = Dtype.FP32, magnitude: float = 1.0) -> Tensors:
    tensors = Tensors.random(Problem(dtype, operation="softmax"), workload, torch.Generator().manual_seed(0))
    tensors["x"].mul_(magnitude)
    return tensors


@pytest.mark.parametrize(
    ("family", "dtype", "magnitude", "apart"),
    planned(
        itertools.product(RIGHT, Dtype, (1.0, 16.0), (False, True)),
        len(Dtype),  # each once
        family=lambda one: one[0],
        kinds=lambda one: (one[1], (one[2], one[3])),
        name=lambda one: f"{one[0]}-{one[1].value}-{one[2]:g}-{'apart' if one[3] else 'dense'}",
        seconds=lambda one: 1.0,
    ),
)
def test_rows_of_any_length(family: str, dtype: Dtype, magnitude: float, apart: bool) -> None:
    """One column, odd numbers of them, one off a warp, more than all warps of a block load at once, and none; 16 times the usual, too."""
    for columns in (0, 1, 5, 31, 32, 33, 257, 5000):
        tensors = drawn(Workload(2, 3, 3, 7 if columns < 1000 else 1, columns), dtype, magnitude)
        assert not rejected(kernel_of(family, dtype), tensors.apart() if apart else tensors), f"{columns} columns"


@pytest.mark.parametrize("family", RIGHT)
def test_no_rows_and_far_rows(family: str) -> None:
    assert not rejected(kernel_of(family), drawn(Workload(2, 3, 3, 0, 40)))
    assert not rejected(kernel_of(family), drawn(Workload(2, 2, 2, 3, 40)).far())


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("family", RIGHT)
def test_odd_values(family: str, dtype: Dtype) -> None:
    """A row of -inf gives 0, one with NaN or +inf gives NaN in all columns, as in PyTorch, and rows beside them are what they would be."""
    tensors = drawn(Workload(1, 1, 1, 7, 300), dtype)
    rows, huge = tensors["x"][0, 0], torch.finfo(tensors["x"].dtype).max
    rows[0] = -math.inf
    rows[1, :299] = -math.inf
    rows[2, 7] = math.nan
    rows[3, 299] = math.inf
    rows[4] = -huge
    rows[5, ::3], rows[5, 1::3] = huge, -huge
    run_on_cpu(kernel_of(family, dtype), tensors)
    y = tensors["y"][0, 0].clone()
    assert (y[0] == 0).all()
    assert (y[1, :299] == 0).all()
    assert y[1, 299] == 1
    assert y[2:4].isnan().all()
    expected = torch.softmax(rows[4:].double(), -1)
    torch.testing.assert_close(y[4:].double(), expected, rtol=1e-2 if dtype is Dtype.BF16 else 1e-3, atol=1e-7)


def test_the_running_maximum_and_sum() -> None:
    """Of the columns 3, 2, 5, 1, which are one lane's: the kernel is made to give each pair instead of the result."""
    usual_spec = spec_of("softmax_online")
    spec = KernelSpec(usual_spec.family, usual_spec.problem, usual_spec.config.replace_from_text({"warps": "1", "unroll": "1"}), TARGET)
    text, lanes = emulated_text(spec).text, 32
    for find, replace in (
        ("running.add<kUnroll>(row, column);", "{ running.add<kUnroll>(row, column); row.store(column, running.row_max); }"),
        ("row.store(column, exponential(row.load(column), row_max) * inverse);", "row.store(column, row.y[column]);"),
    ):
        assert text.count(find) == 1
        text = text.replace(find, replace)
    of_sums = text.replace("row.store(column, running.row_max)", "row.store(column, running.row_sum)")
    tensors, found = drawn(Workload(1, 1, 1, 1, 4 * lanes)), []
    tensors["x"].fill_(-math.inf)
    tensors["x"][..., ::lanes] = torch.tensor([3.0, 2.0, 5.0, 1.0])
    for one in (text, of_sums):
        run_on_cpu(emulated_kernel(spec, Source(spec.name, one)), tensors)
        found.append(tensors["y"][0, 0, 0, ::lanes].tolist())
    assert found[0] == [3.0, 3.0, 5.0, 5.0]
    assert found[1] == pytest.approx([1.0, 1.368, 1.185, 1.203], abs=5e-4)


def test_the_wrong_control_is_wrong_beyond_a_tile_alone() -> None:
    """And only what compares and judges runs it."""
    kernel = kernel_of("softmax_tilewise")
    assert not rejected(kernel, drawn(Workload(1, 1, 1, 9, 128)))
    assert "y max error" in rejected(kernel, drawn(Workload(1, 1, 1, 9, 129)))
    with pytest.raises(
        ArgumentError, match=r"^family must be one whose results are right; got softmax_tilewise, which is wrong on purpose$"
    ):
        kernel.spec.family.require_correct()


def test_more_than_a_kernel_can_count_is_refused() -> None:
    family, operation, problem = find_family("softmax_safe"), find_operation("softmax"), Problem(Dtype.FP32, operation="softmax")
    many = family.call_refusals(operation.call(problem, Workload(2**10, 2**10, 1, 2**11, 1)))
    wide = family.call_refusals(operation.call(problem, Workload(1, 1, 1, 1, 2**31 - 1)))
    assert many == [f"x must have at most {2**31 - 1024} rows, over batch and heads; got {2**31}"]
    assert wide == [f"x must have at most {2**31 - 2**16} columns; got {2**31 - 1}"]


def test_a_problem_of_softmax_has_no_head_dim_and_no_mask() -> None:
    family = find_family("softmax_safe")
    for problem, reason in (
        (Problem(Dtype.FP32, 64, operation="softmax"), "head_dim must be left out for softmax, which has none; got 64"),
        (Problem(Dtype.FP32, mask=Mask.CAUSAL, operation="softmax"), "mask must be full for softmax, which has none; got causal"),
        (Problem(Dtype.BF16, 64), "pass must be softmax; got forward"),
    ):
        assert reason in family.refusals(problem, TARGET)


def usual() -> Tensors:
    return drawn(Workload(2, 3, 3, 7, 300)).apart()


def short() -> Tensors:
    return drawn(Workload(2, 3, 3, 7, 40))


def large() -> Tensors:
    return drawn(Workload(1, 1, 1, 7, 300), magnitude=100.0)


def rising() -> Tensors:
    """Each lane's columns rise, so that the running sum is rescaled again and again."""
    tensors = drawn(Workload(1, 1, 1, 7, 3000))
    tensors["x"].add_(torch.arange(3000) / 300)
    return tensors


def unseen() -> Tensors:
    tensors = drawn(Workload(1, 1, 1, 7, 300))
    tensors["x"][0, 0, 3] = -math.inf
    return tensors


def in_each(name: str, find: str, replace: str, make: Callable[[], Tensors] = usual) -> list[Planted]:
    return [Planted(f"{family}-{name}", spec_of(family), find, replace, make) for family in RIGHT]


SAFE, ONLINE = spec_of("softmax_safe"), spec_of("softmax_online")
FAULTS = [
    *in_each("row-of-the-first-head", "p.x + batch * p.x_batch + head * p.x_head", "p.x + batch * p.x_batch"),
    *in_each("row-of-the-first-batch", "p.x + batch * p.x_batch +", "p.x +"),
    *in_each("written-to-the-row-before", "head * p.y_head + query * p.y_row", "head * p.y_head + max(0, query - 1) * p.y_row"),
    *in_each("strides-of-x-for-y", "head * p.y_head", "head * p.x_head"),
    *in_each("one-column-too-many", "row < p.rows ? p.columns : 0", "row < p.rows ? p.columns + 1 : 0"),
    *in_each("one-column-too-few", "row < p.rows ? p.columns : 0", "row < p.rows ? p.columns - 1 : 0"),
    *in_each("rows-that-are-not-there", "row < p.rows ? p.columns : 0", "p.columns", short),
    *in_each("columns-of-the-first-warp", "row_warp * 32 + lane_index(),", "lane_index(),"),
    *in_each("sum-of-half-the-lanes", "for (int distance = 16;", "for (int distance = 8;"),
    *in_each("sum-of-one-warp", "if (row_warps == 1) return value;", "return value;"),
    *in_each(
        "no-barrier-between-the-warps-of-a-row", "    barrier_sync();\n    const SharedAddress of_row", "    const SharedAddress of_row"
    ),
    *in_each("maxima-and-sums-in-one-place", ", sums = regions.take(kWarps * 4)", ", sums = maxima; regions.take(kWarps * 4)"),
    *in_each("maximum-not-subtracted", "(row_max == -infinity() ? 0.0f : row_max)", "0.0f", large),
    *in_each("row-of-minus-infinity-not-looked-for", "(row_max == -infinity() ? 0.0f : row_max)", "row_max", unseen),
    *in_each("base-2", "kLog2E = 1.44269504f", "kLog2E = 1.0f"),
    *in_each("log2-of-e-in-half-precision", "kLog2E = 1.44269504f", "kLog2E = 1.4423828f"),
    *in_each("not-divided", "row_max) * inverse", "row_max)"),
    *in_each("nothing-in-a-row-without-a-sum", "total == 0.0f ? 0.0f : y", "y", unseen),
    Planted("safe-maximum-of-the-last-column", SAFE, "row_max = fmaxf(row_max, row.load(column));", "row_max = row.load(column);", large),
    Planted("safe-sum-of-the-last-column", SAFE, "row_sum += exponential", "row_sum = exponential", short),
    Planted("online-sum-not-rescaled", ONLINE, "row_sum *= exponential(before, row_max);", "", rising),
    Planted("online-rescaled-the-wrong-way", ONLINE, "exponential(before, row_max)", "exponential(row_max, before)", rising),
    Planted("online-stale-maximum", ONLINE, "row_sum += exponential(x[i], row_max);", "row_sum += exponential(x[i], before);", rising),
    Planted(
        "online-lanes-not-brought-together", ONLINE, "running.row_sum * exponential(running.row_max, row_max)", "running.row_sum", usual
    ),
]
QUICK = 1  # of each family for every run


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    texts = [params["fault"].text() for params in to_run(request) if "fault" in params]
    compile_ahead([*texts, *(emulated_text(spec_of(family.name, dtype)) for family in families_of("softmax") for dtype in Dtype)])


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        QUICK,
        family=lambda fault: fault.spec.family.name,
        kinds=lambda fault: (fault.name.split("-")[0], fault.make.__name__),
        name=lambda fault: fault.name,
        seconds=lambda fault: COMPILE_SECONDS,
        fault=True,
    ),
)
def test_caught(fault: Planted) -> None:
    assert fault.caught_by(), f"fault {fault.name} was accepted"


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
