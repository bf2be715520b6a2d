"""Every family's kernels in the emulator: right by the numerics rule, and by its checks, in every order of threads and copies."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder, Schedule
from flashgen.codegen.config import Config
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, targets
from flashgen.codegen.workload import Workload
from flashgen.selection.families import family_of
from tests.support.cases import Case, Layout
from tests.support.configs import CHOSEN, CHOSEN_SM90
from tests.support.examples import families_of, taken
from tests.support.plan import every_case, planned, to_run
from tests.support.runs import compile_ahead, emulated_kernel, emulated_text, launch, why_rejected

PADDED = (Layout.PADDED,) * 4
ALL_CHOSEN: tuple[tuple[tuple[int, int], Config], ...] = (*CHOSEN, *CHOSEN_SM90)
QUICK_CONTRACT, QUICK_CHOSEN = 1, 1  # of each family for every run; --slow has all


def case(problem: Problem, workload: Workload, **more: object) -> Case:
    return Case(workload.name, problem, workload, problem.head_dim**-0.5, **more)  # type: ignore[arg-type]


CONTRACT = [  # every family on every target, with its default config there, full and causal
    (family, target, mask)
    for family in families_of()
    for target in targets().values()
    for mask in Mask
    if not family.refusals(Problem(Dtype.FP16, 64, 64, mask), target)
]
SMALL = ((1, 1), (70, 20), (33, 0))


def test_no_family_is_left_out() -> None:
    """One that computes nothing of this would pass all that follows."""
    assert {family.name for family, _, _ in CONTRACT} == {family.name for family in families_of()}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All kernels of this module, on all cores: one after the other they would take most of the time."""
    specs = []
    for params in to_run(request):
        match params:
            case {"spec": KernelSpec() as spec}:
                specs.append(spec)
            case {"width": width, "config": config}:
                specs.append(chosen_spec(width, config))
            case {"family": family, "target": target, "mask": mask}:
                specs.append(spec_of(family, target, mask))
            case {"family": family, "mask": mask}:
                specs.append(shared_spec(family, mask))
    compile_ahead(map(emulated_text, dict.fromkeys(specs)))


def target_of(family: Family) -> Target:
    """sm_90a if the family runs there, else another one."""
    return max((target for one, target, _ in CONTRACT if one is family), key=lambda target: target.name == "sm_90a")


def spec_of(family: Family, target: Target, mask: Mask) -> KernelSpec:
    problem = Problem(Dtype.FP16, 64, 64, mask)
    return KernelSpec(family, problem, family.default(problem, target), target)


def shared_spec(family: Family, mask: Mask = Mask.FULL) -> KernelSpec:
    """In its text, where nothing is masked, that of other files: it is compiled once for all of them."""
    problem, target = Problem(Dtype.BF16, 64, 64, mask), target_of(family)
    return KernelSpec(family, problem, family.default(problem, target), target)


def chosen_spec(width: tuple[int, int], config: Config) -> KernelSpec:
    return KernelSpec(family_of(config), Problem(Dtype.BF16, *width, Mask.CAUSAL), config, targets()["sm_90a"])


@pytest.mark.parametrize(
    ("family", "target", "mask"),
    planned(
        CONTRACT,
        QUICK_CONTRACT,
        family=lambda one: one[0].name,
        kinds=lambda one: (one[1].name, one[2]),
        name=lambda one: f"{one[0].name}-{one[1].name}-{one[2].value}",
        seconds=lambda one: 2.5,
    ),
)
def test_right_in_every_order(family: Family, target: Target, mask: Mask, pytestconfig: pytest.Config) -> None:
    """With --slow in each order, else in every third of them."""
    orders = ORDERS if every_case(pytestconfig) else ORDERS[::3]
    spec = spec_of(family, target, mask)
    kernel = emulated_kernel(spec)
    assert not why_rejected(kernel, case(spec.problem, taken(family, spec.problem, Workload(1, 2, 1, 150, 330)), layouts=PADDED), orders)
    seeds = [EmulationOrder(Schedule.RANDOM, late_copies=True, seed=seed) for seed in (1, 2)]
    small = [case(spec.problem, Workload(1, 4, 2, *lengths)) for lengths in SMALL]
    for some in small:
        assert some.refusals(family, target) or not why_rejected(kernel, some, seeds)


@pytest.mark.parametrize(
    ("width", "config"),
    planned(
        ALL_CHOSEN,
        QUICK_CHOSEN,
        family=lambda chosen: family_of(chosen[1]).name,
        kinds=lambda chosen: (chosen[0], *chosen[1].to_json().items()),
        name=lambda chosen: f"{chosen[0][0]}x{chosen[0][1]}-{chosen[1].name}",
        seconds=lambda chosen: 1.5,
    ),
)
def test_chosen_configs(width: tuple[int, int], config: Config) -> None:
    """Each at lengths around its tiles, in an order of its own."""
    spec = chosen_spec(width, config)
    kernel, rng = emulated_kernel(spec), random.Random(spec.name)
    rows, keys = spec.config.block_q, spec.config.block_kv  # type: ignore[attr-defined]
    packed = spec.family.group_unit(config)
    for off in (-1, 1):
        workload = Workload(1, 2 * packed, 1, rows // packed + off, 2 * keys + off)
        order = EmulationOrder(rng.choice(list(Schedule)), rng.random() < 0.5, rng.getrandbits(32))
        assert not why_rejected(kernel, case(spec.problem, workload, rising=40.0), [order])


def many_tiles() -> list[object]:
    """Kernels whose blocks stay. One has its output's panels in a ring that they do not go round evenly."""
    counting = [f for f in families_of() if any(place.name == "tile_counter" for place in f.parameters.pointers)]
    uneven = next(chosen_spec(width, config) for width, config in CHOSEN_SM90 if width == (152, 152))
    return [pytest.param(spec, id=spec.name) for spec in (*map(shared_spec, counting), uneven)]


@pytest.mark.parametrize("spec", many_tiles())
def test_blocks_that_work_on_many_tiles(spec: KernelSpec) -> None:
    """Few blocks for all tiles, of one key block each: what belongs to one tile must not be written over by the next ones."""
    orders = [EmulationOrder(schedule, late) for schedule in (Schedule.ROUND_ROBIN, Schedule.REVERSED) for late in (False, True)]
    assert not why_rejected(emulated_kernel(spec), case(spec.problem, Workload(2, 6, 2, 70, 20)), orders, sm_count=2)


@pytest.mark.parametrize(
    ("mask", "orders"),
    [
        pytest.param(Mask.FULL, ORDERS[:: len(ORDERS) - 1], id="full-two-orders"),
        pytest.param(Mask.CAUSAL, ORDERS, id="causal", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", families_of(), ids=lambda family: family.name)
def test_without_lse(family: Family, mask: Mask, orders: tuple[EmulationOrder, ...]) -> None:
    """The same output, and nothing else is written."""
    spec = shared_spec(family, mask)
    some = case(spec.problem, taken(family, spec.problem, Workload(1, 2, 1, 150, 200)))
    tensors, kernel = some.make("cpu"), emulated_kernel(spec)
    launch(kernel, some, tensors, sm_count=2)  # shares of keys, and so the order of sums, may depend on the number of SMs
    expected = tensors.out.view.clone()
    for order in orders:
        launch(kernel, some, tensors, order, sm_count=2, with_lse=False)
        assert torch.equal(tensors.out.view, expected)
        assert tensors.lse.buffer.isnan().all()


@pytest.mark.parametrize("family", families_of(), ids=lambda family: family.name)
def test_shared_memory_is_all_taken_and_no_more(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that claims too little would have regions overlap whatever lies behind on a GPU; one that claims too much wastes it."""
    spec = shared_spec(family)
    small, kernel = case(spec.problem, taken(family, spec.problem, Workload(1, 1, 1, 40, 100))), emulated_kernel(spec)
    tensors, right = small.make("cpu"), spec.resources
    launch(kernel, small, tensors)
    changes = itertools.product(right, (-4096, -16, 16, 4096))
    for suffix, wrong in [(suffix, wrong) for suffix, wrong in changes if right[suffix].shared_bytes + wrong >= 0]:
        claimed = right[suffix].shared_bytes + wrong
        wrongly = {**right, suffix: dataclasses.replace(right[suffix], shared_bytes=claimed)}
        monkeypatch.setattr(family, "resources", lambda *_, made=wrongly: made)
        says = rf"takes \d+ bytes of shared memory in \d+ regions; the launch gives the block {claimed}$"
        with pytest.raises(EmulatorFaultError, match=says) as caught:
            launch(kernel, small, tensors)
        assert caught.value.check == "shared memory claim"


def test_the_text_differs_in_the_atoms_alone() -> None:
    spec = spec_of(families_of()[0], targets()["sm_90a"], Mask.FULL)
    kernels = [render(spec, atoms).text.partition("// ---- what this kernel is specialised for")[2] for atoms in Atoms]
    assert kernels[1].startswith(kernels[0])
