"""Every backward family's kernels in the emulator: right by the numerics rule, and by its checks, in every order of threads and copies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cache

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulatedKernel, EmulationOrder, Schedule
from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig, Hoisted
from flashgen.codegen.families.flash1_backward.config import Flash1BackwardConfig
from flashgen.codegen.families.flash2_backward.config import Flash2BackwardConfig
from flashgen.codegen.family import Family
from flashgen.codegen.ladder import GridOrder, WarpSplit
from flashgen.codegen.operands import Call, View
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target, targets
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from flashgen.selection.families import family_of
from flashgen.verification.cases import COARSE, FAR, HUGE, LONG
from flashgen.verification.expected import Expected
from flashgen.verification.screen import Screen
from tests.support.examples import families_of
from tests.support.plan import every_case, planned

FAMILIES = families_of("backward")
SM_90 = find_target("sm_90a")
NAMES, DIMS = ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"), ("batch", "row", "head")


def each(family: str) -> int:
    """How many of its cases are for every run: the Hopper families and the ladder have files of their own."""
    return 1 if family == "attention_backward" else 0


every_family = pytest.mark.parametrize(
    "family",
    planned([(f,) for f in FAMILIES], each, lambda one: one[0].name, lambda one: (), lambda one: one[0].name, lambda one: 6.0),
)
# Lengths of queries and keys: one, around tiles, rows that see no key under a causal mask, keys that no row sees, and none at all.
LENGTHS = ((1, 1), (63, 65), (129, 127), (200, 40), (40, 200), (0, 70), (70, 0))


def _chosen(
    block_q: int, block_kv: int, step_q: int, warps: int, groups: int, rows_dq: int, stages: int, hoisted: Hoisted = Hoisted.NONE
) -> AttentionBackwardConfig:
    return AttentionBackwardConfig(block_q, block_kv, step_q, warps, groups, rows_dq, stages, hoisted)


# Head dims of q and v, and a config: block_q, block_kv, step_q, warps, column_groups, rows_dq, stages. Together they have every value of
# each field, v narrower and wider than q, and widths that the warps cannot divide evenly. The ladder's: block_q, block_kv, warps.
CHOSEN: tuple[tuple[tuple[int, int], Config], ...] = (
    ((64, 64), _chosen(64, 64, 64, 4, 1, 16, 1, hoisted=Hoisted.BOTH)),
    ((64, 64), _chosen(128, 128, 32, 4, 1, 32, 2)),
    ((80, 48), _chosen(128, 64, 32, 4, 2, 32, 2, hoisted=Hoisted.VALUES)),
    ((72, 40), _chosen(64, 64, 16, 8, 2, 16, 2)),
    ((144, 16), _chosen(64, 64, 32, 8, 2, 32, 1)),
    ((40, 136), _chosen(32, 32, 32, 2, 1, 16, 2)),
    ((8, 8), _chosen(32, 128, 16, 8, 1, 16, 2)),
    ((128, 128), _chosen(64, 128, 16, 8, 2, 32, 1)),
    ((256, 256), _chosen(64, 64, 16, 8, 2, 16, 1)),
    ((64, 64), Flash1BackwardConfig(64, 128, 4, stages=3)),
    ((80, 48), Flash2BackwardConfig(128, 128, 8)),
    ((72, 40), Flash1BackwardConfig(32, 64, 2)),
    ((40, 72), Flash2BackwardConfig(64, 256, 8, stages=4)),
    ((8, 8), Flash1BackwardConfig(64, 128, 8)),
    ((128, 128), Flash2BackwardConfig(32, 32, 2, grid_order=GridOrder.BATCH_HEAD_TILE)),
    ((64, 64), Flash2BackwardConfig(128, 32, 8, warp_split=WarpSplit.QUERIES)),
    ((40, 72), Flash2BackwardConfig(32, 16, 2, stages=4, warp_split=WarpSplit.QUERIES, grid_order=GridOrder.BATCH_HEAD_TILE)),
    ((128, 128), Flash2BackwardConfig(64, 16, 4, warp_split=WarpSplit.QUERIES)),
    ((8, 32), Flash2BackwardConfig(64, 48, 4, stages=4, warp_split=WarpSplit.QUERIES)),
)


def spec_of(family: Family, problem: Problem, target: Target = SM_90) -> KernelSpec:
    return KernelSpec(family, problem, family.default(problem, target), target)


@cache
def loaded(spec: KernelSpec) -> EmulatedKernel:
    return cpu.load_emulated(spec)


def problem_of(mask: Mask, dtype: Dtype = Dtype.BF16, width: tuple[int, int] = (64, 64)) -> Problem:
    return Problem(dtype, *width, mask, "backward")


def problem_for(family: Family, mask: Mask, dtype: Dtype = Dtype.BF16) -> Problem:
    """The first of a few widths that the family computes."""
    problems = (problem_of(mask, dtype, width) for width in ((64, 64), (136, 72), (200, 72)))
    return next(problem for problem in problems if not family.refusals(problem, SM_90))


def tensors_of(problem: Problem, workload: Workload) -> Tensors:
    return Tensors.random(problem, workload, torch.Generator().manual_seed(0))


def require_right(spec: KernelSpec, tensors: Tensors, order: EmulationOrder | None = None) -> None:
    cpu.run_on_cpu(loaded(spec), tensors, interleaving=order)
    verdict = Expected.of(tensors).judge(tensors)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("family", "target", "mask"),
    planned(
        [(f, t, m) for f in FAMILIES for t in targets().values() for m in Mask if not f.refusals(problem_for(f, m), t)],
        each,
        family=lambda one: one[0].name,
        kinds=lambda one: (one[1].name, one[2]),
        name=lambda one: f"{one[0].name}-{one[1].name}-{one[2].value}",
        seconds=lambda one: 8.0,
    ),
)
def test_right_in_every_order(family: Family, target: Target, mask: Mask, pytestconfig: pytest.Config) -> None:
    """With --slow in each order, else in every third. d_k and d_v are the same to the bit in each; d_q is a sum in whatever order."""
    spec = spec_of(family, problem_for(family, mask, Dtype.FP16), target)
    tensors = tensors_of(spec.problem, Workload(1, 2, 1, 150, 200)).apart()
    found = []
    orders = ORDERS if every_case(pytestconfig) else ORDERS[::3]
    for order in (*orders, EmulationOrder(Schedule.RANDOM, late_copies=True, seed=1)):
        require_right(spec, tensors, order)
        found.append((tensors["d_k"].clone(), tensors["d_v"].clone()))
    assert all(torch.equal(one, other) for some in found for one, other in zip(some, found[0], strict=True))


@pytest.mark.parametrize(
    ("family", "mask"),
    planned(
        itertools.product(FAMILIES, Mask),
        each,
        family=lambda one: one[0].name,
        kinds=lambda one: one[1:],
        name=lambda one: f"{one[0].name}-{one[1].value}",
        seconds=lambda one: 6.0,
    ),
)
def test_lengths(family: Family, mask: Mask) -> None:
    spec = spec_of(family, problem_for(family, mask))
    for index, lengths in enumerate(LENGTHS):
        tensors = tensors_of(spec.problem, Workload(2, 2, 1, *lengths))
        if not family.call_refusals(tensors.call(), spec.config):
            require_right(spec, tensors.apart() if index % 2 else tensors.without_optional_inputs())


def test_some_family_takes_every_length() -> None:
    for lengths in LENGTHS:
        call = tensors_of(problem_of(Mask.FULL), Workload(3, 4, 2, *lengths)).call()
        assert any(not family.refusals(call.problem, SM_90) and not family.call_refusals(call) for family in FAMILIES)


@every_family
def test_a_scale_of_its_own(family: Family) -> None:
    spec = spec_of(family, problem_for(family, Mask.CAUSAL))
    tensors, scalars = tensors_of(spec.problem, Workload(1, 2, 1, 100, 130)), {"scale": 0.3}
    tensors.derive(scalars)
    cpu.run_on_cpu(loaded(spec), tensors, scalars)
    verdict = Expected.of(tensors, scalars).judge(tensors)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("width", "config"),
    planned(
        CHOSEN,
        0,
        family=lambda chosen: family_of(chosen[1]).name,
        kinds=lambda chosen: (chosen[0], *chosen[1].to_json().items()),
        name=lambda chosen: f"{chosen[0][0]}x{chosen[0][1]}-{chosen[1].name}",
        seconds=lambda chosen: 7.0,
    ),
)
def test_chosen_configs(width: tuple[int, int], config: Config) -> None:
    for mask, order in zip(Mask, (EmulationOrder(Schedule.REVERSED, late_copies=True), EmulationOrder(Schedule.ROUND_ROBIN)), strict=True):
        spec = KernelSpec(family_of(config), problem_of(mask, width=width), config, SM_90)
        require_right(spec, tensors_of(spec.problem, Workload(1, 2, 1, 131, 140)).apart(), order)


def test_chosen_configs_have_every_value() -> None:
    space = families_of("backward")[0].space(problem_of(Mask.FULL), SM_90)
    known = {(name, value) for config in space for name, value in config.to_json().items()}
    missing = known - {item for _, config in CHOSEN for item in config.to_json().items()}
    assert missing == {("blocks_per_sm", 2)}, "which changes nothing but registers"


@pytest.mark.parametrize(
    ("family", "case"),
    planned(
        itertools.product(FAMILIES, (HUGE, COARSE, FAR, LONG)),
        each,
        family=lambda one: one[0].name,
        kinds=lambda one: one[1:],
        name=lambda one: f"{one[0].name}-{dict(zip((HUGE, COARSE, FAR, LONG), ('huge', 'coarse', 'far', 'long'), strict=True))[one[1]]}",
        seconds=lambda one: 15.0,
    ),
)
def test_special_cases(family: Family, case: tuple[int, int, int, int, int]) -> None:
    problem = problem_for(family, Mask.CAUSAL)
    (result,) = Screen(problem, "cpu", (), special=(case,)).judge(loaded(spec_of(family, problem)))
    assert result.verdict.ok, result.verdict.message


@cache
def apart(spec: KernelSpec) -> Tensors:
    """Of which no stride is one of another, and of which the kernel makes what is right: once for all strides that are mixed up."""
    tensors = tensors_of(spec.problem, Workload(2, 4, 2, 70, 90)).apart()
    require_right(spec, tensors)
    return tensors


@pytest.mark.parametrize(
    ("family", "taken", "of", "dim"),
    planned(
        [(f, *two, dim) for f, two, dim in itertools.product(FAMILIES, itertools.permutations(range(len(NAMES)), 2), range(3))],
        lambda family: 3 * each(family),
        family=lambda one: one[0].name,
        kinds=lambda one: enumerate(one),
        name=lambda one: f"{one[0].name}-{DIMS[one[3]]}-of-{NAMES[one[1]]}-from-{NAMES[one[2]]}",
        seconds=lambda one: 0.5,
    ),
)
def test_a_stride_taken_for_another_is_seen(family: Family, taken: int, of: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, made = spec_of(family, problem_for(family, Mask.FULL)), Tensors.call
    tensors = apart(spec)

    def mixed(tensors: Tensors, scalars: Mapping[str, float] | None = None) -> Call:
        call = made(tensors, scalars)
        strides = list(call.views[NAMES[taken]].strides)
        strides[dim] = call.views[NAMES[of]].strides[dim]
        return call._replace(views={**call.views, NAMES[taken]: View(call.views[NAMES[taken]].sizes, tuple(strides))})

    monkeypatch.setattr(Tensors, "call", mixed)
    try:
        cpu.run_on_cpu(loaded(spec), tensors)
    except EmulatorFaultError:
        return
    assert not Expected.of(tensors).judge(tensors).ok


@every_family
def test_shared_memory_is_all_taken_and_no_more(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(family, problem_for(family, Mask.FULL))
    tensors, right = tensors_of(spec.problem, Workload(1, 1, 1, 40, 100)), spec.resources
    require_right(spec, tensors)
    for suffix, wrong in itertools.product((suffix for suffix, block in right.items() if block.shared_bytes), (-16, 16)):
        claimed = right[suffix].shared_bytes + wrong
        wrongly = {**right, suffix: dataclasses.replace(right[suffix], shared_bytes=claimed)}
        monkeypatch.setattr(family, "resources", lambda *_, made=wrongly: made)
        with pytest.raises(EmulatorFaultError, match=rf"; the launch gives the block {claimed}$"):
            cpu.run_on_cpu(loaded(spec), tensors)
