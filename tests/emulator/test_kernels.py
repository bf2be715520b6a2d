"""Every family's kernels in the emulator: right by the numerics rule, and by its checks, in every order of threads and copies."""

from __future__ import annotations

import dataclasses
import itertools
import random
from functools import partial

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder, Schedule
from flashgen.build.nvrtc import compile_many
from flashgen.codegen.config import Config
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, targets
from flashgen.codegen.workload import Workload
from tests.support.cases import Case, Layout
from tests.support.configs import CHOSEN, CHOSEN_SM90
from tests.support.programs import H200
from tests.support.runs import compiled, emulated_kernel, emulated_texts, launch, why_rejected

PADDED = (Layout.PADDED,) * 4
ALL_CHOSEN: tuple[tuple[tuple[int, int], Config], ...] = (*CHOSEN, *CHOSEN_SM90)
QUICK = (*CHOSEN[::3], *CHOSEN_SM90[::4])  # for every run; --slow has all


def case(problem: Problem, workload: Workload, **more: object) -> Case:
    return Case(workload.name, problem, workload, problem.head_dim**-0.5, **more)  # type: ignore[arg-type]


EVERY_RUN = ("sm_80", "sm_90a")  # --slow, which CI runs, has all targets


def contract() -> list[object]:
    """Every family on every target, with its default config there, full and causal."""
    return [
        pytest.param(
            family,
            target,
            mask,
            id=f"{family.name}-{target.name}-{mask.value}",
            marks=() if target.name in EVERY_RUN else pytest.mark.slow,
        )
        for family in families().values()
        for target in targets().values()
        for mask in Mask
        if not family.refusals(Problem(Dtype.FP16, 64, 64, mask), target)
    ]


def test_no_family_is_left_out() -> None:
    """One that computes nothing of this would pass all that follows."""
    assert {param.values[0].name for param in contract()} == families().keys()  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All kernels of this module, on all cores: one after the other they would take most of the time."""
    slow = request.config.getoption("--slow")
    specs = [spec_of(*param.values) for param in contract() if slow or not param.marks]  # type: ignore[attr-defined]
    specs += [param.values[0] for param in many_tiles()]  # type: ignore[attr-defined]
    specs += [chosen_spec(width, config) for width, config in (ALL_CHOSEN if slow else QUICK)]
    sources = [source for spec in dict.fromkeys(specs) for source in emulated_texts(spec)]
    list(compile_many((source.digest, partial(compiled, source)) for source in sources))


def spec_of(family: Family, target: Target, mask: Mask) -> KernelSpec:
    problem = Problem(Dtype.FP16, 64, 64, mask)
    return KernelSpec(family, problem, family.default(problem, target), target)


def chosen_spec(width: tuple[int, int], config: Config) -> KernelSpec:
    (family,) = [f for f in families().values() if isinstance(config, f.config_type)]
    return KernelSpec(family, Problem(Dtype.BF16, *width, Mask.CAUSAL), config, targets()["sm_90a"])


@pytest.mark.parametrize(("family", "target", "mask"), contract())
def test_right_in_every_order(family: Family, target: Target, mask: Mask) -> None:
    spec = spec_of(family, target, mask)
    kernel = emulated_kernel(spec)
    assert not why_rejected(kernel, case(spec.problem, Workload(1, 2, 1, 150, 330), layouts=PADDED), ORDERS)
    seeds = [EmulationOrder(Schedule.RANDOM, late_copies=True, seed=seed) for seed in (1, 2)]
    small = [case(spec.problem, Workload(1, 4, 2, *lengths)) for lengths in ((1, 1), (70, 20), (33, 0))]
    for some in small:
        assert some.refusals(family, target) or not why_rejected(kernel, some, seeds)


@pytest.mark.parametrize(
    ("width", "config"),
    [
        pytest.param(*chosen, marks=() if chosen in QUICK else pytest.mark.slow, id=f"{chosen[0][0]}x{chosen[0][1]}-{chosen[1].name}")
        for chosen in ALL_CHOSEN
    ],
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
    (family,) = [f for f in families().values() if any(place.name == "tile_counter" for place in f.parameters.pointers)]
    uneven = next(chosen_spec(width, config) for width, config in CHOSEN_SM90 if width == (152, 152))
    return [pytest.param(spec, id=spec.name) for spec in (spec_of(family, targets()["sm_90a"], Mask.FULL), uneven)]


@pytest.mark.parametrize("spec", many_tiles())
def test_blocks_that_work_on_many_tiles(spec: KernelSpec) -> None:
    """Few blocks for all tiles, of one key block each: what belongs to one tile must not be written over by the next ones."""
    orders = [EmulationOrder(schedule, late) for schedule in (Schedule.ROUND_ROBIN, Schedule.REVERSED) for late in (False, True)]
    assert not why_rejected(emulated_kernel(spec), case(spec.problem, Workload(2, 6, 2, 70, 20)), orders, sm_count=2)


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_without_lse(family: Family) -> None:
    """The same output, and nothing else is written."""
    spec = spec_of(family, targets()["sm_90a"], Mask.CAUSAL)
    some = case(spec.problem, Workload(1, 2, 1, 150, 200))
    tensors, kernel = some.make("cpu"), emulated_kernel(spec)
    launch(kernel, some, tensors)
    expected = tensors.out.view.clone()
    for order in ORDERS:
        launch(kernel, some, tensors, order, sm_count=2, with_lse=False)
        assert torch.equal(tensors.out.view, expected)
        assert tensors.lse.buffer.isnan().all()


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_shared_memory_is_all_taken_and_no_more(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that claims too little would have regions overlap whatever lies behind on a GPU; one that claims too much wastes it."""
    spec = spec_of(family, targets()["sm_90a"], Mask.FULL)
    small, kernel = case(spec.problem, Workload(1, 1, 1, 40, 100)), emulated_kernel(spec)
    tensors, right = small.make("cpu"), small.program(family, spec.config, H200)
    launch(kernel, small, tensors)
    assert spec.largest_block.shared_bytes == max(one.shared_bytes for one in right.launches)
    changes = itertools.product(range(len(right.launches)), (-4096, -16, 16, 4096))
    for at, wrong in [(at, wrong) for at, wrong in changes if right.launches[at].shared_bytes + wrong >= 0]:
        claimed = right.launches[at].shared_bytes + wrong
        launches = (dataclasses.replace(one, shared_bytes=claimed) if i == at else one for i, one in enumerate(right.launches))
        wrongly = dataclasses.replace(right, launches=tuple(launches))
        monkeypatch.setattr(family, "program", lambda *_, made=wrongly: made)
        says = rf"takes \d+ bytes of shared memory in \d+ regions; the launch gives the block {claimed}$"
        with pytest.raises(EmulatorFaultError, match=says) as caught:
            launch(kernel, small, tensors)
        assert caught.value.check == "shared memory claim"


def test_the_text_differs_in_the_atoms_alone() -> None:
    spec = spec_of(next(iter(families().values())), targets()["sm_90a"], Mask.FULL)
    kernels = [render(spec, atoms).text.partition("// ---- what this kernel is specialised for")[2] for atoms in Atoms]
    assert kernels[1].startswith(kernels[0])
