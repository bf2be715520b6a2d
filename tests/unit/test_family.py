"""What every family owes to the rest of the project. A new one is covered by being there."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from flashgen import templates
from flashgen.codegen.attention import attention_call
from flashgen.codegen.config import Config
from flashgen.codegen.devices import device_of_target, find_device
from flashgen.codegen.errors import ArgumentError, IllegalConfigError
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, QueryPlace
from flashgen.codegen.family import Family, families, find_family
from flashgen.codegen.operands import Call, Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import BlockResources
from flashgen.codegen.target import Target, find_target, targets
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from tests.support.examples import examples
from tests.support.plan import every_case, planned
from tests.support.programs import program_of, values_of

PROBLEMS = tuple(
    Problem(Dtype.BF16, d, v, m) for (d, v), m in itertools.product(((8, 8), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256)), Mask)
)
FORWARD = find_family("attention_forward")
BF16_64 = Problem(Dtype.BF16, 64)
SM_80, H200 = find_target("sm_80"), find_device("h200")
ODD_WORKLOADS = (Workload(2, 8, 2, 300, 500), Workload(1, 1, 1, 1, 1), Workload(3, 2, 2, 70, 0))
QUICK_EXAMPLES = 2  # of each family for every run; --slow has all
every_family = pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
every_example = pytest.mark.parametrize(
    ("family", "problem", "target"),
    planned(
        dict.fromkeys((family, problem, target) for family in families().values() for problem, _, target in examples(family)),
        QUICK_EXAMPLES,
        family=lambda one: one[0].name,
        kinds=lambda one: (one[1], one[2].name),
        name=lambda one: f"{one[0].name}-{one[1].name}-{one[2].name}",
        seconds=lambda one: 0.3,
    ),
)


@pytest.fixture
def some_examples(pytestconfig: pytest.Config) -> slice:
    """All with --slow, else every fifth."""
    return slice(None, None, 1 if every_case(pytestconfig) else 5)


@dataclass(frozen=True)
class OtherConfig(Config):
    block_q: int = 64


def test_families_are_found_by_name() -> None:
    assert all(find_family(name) is family and family.name == name for name, family in families().items())
    with pytest.raises(ArgumentError, match=r"^family must be one of .*attention_forward.*; got 'attention_backward_2'$"):
        find_family("attention_backward_2")


@every_family
def test_one_that_is_wrong_on_purpose_goes_by_name_alone(family: Family) -> None:
    assert family.correct or not family.automatic


@every_family
def test_its_config_is_frozen_documented_and_typed(family: Family) -> None:
    kind = family.config_type
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for field in dataclasses.fields(kind):
        assert re.search(rf"^\s*{field.name}[:,]", inspect.getdoc(kind) or "", re.MULTILINE), f"{field.name} is not documented"
    assert family.template in templates.paths()
    assert family.revision >= 1


@every_family
def test_defaults_are_legal_and_of_the_space_s_type(family: Family, some_examples: slice) -> None:
    for problem, _, target in examples(family)[some_examples]:
        default = family.default(problem, target)
        assert isinstance(default, family.config_type)
        assert family.check(problem, default, target) == [], f"{problem.name} {target.name}"


@every_family
def test_the_space_has_no_duplicates_and_a_fixed_order(family: Family) -> None:
    for problem, target in itertools.product(PROBLEMS[:4], (SM_80, find_target("sm_90a"))):
        space = list(family.space(problem, target))
        assert space == list(family.space(problem, target))
        assert len({c.name for c in space}) == len(set(space)) == len(space)
        assert family.legal_configs(problem, target) == [c for c in space if not family.check(problem, c, target)]


@every_example
def test_legal_configs_fit_the_target(family: Family, problem: Problem, target: Target) -> None:
    configs = family.legal_configs(problem, target)
    assert configs
    for config in configs[::17]:
        assert family.resources(problem, config).keys() == {kernel.suffix for kernel in family.kernels(problem, config)}
        for block in family.resources(problem, config).values():
            assert block.shared_bytes <= target.shared_memory_per_block
            assert 32 <= block.threads <= 1024
            assert block.threads % 32 == 0


@every_family
def test_predictions_are_times(family: Family, some_examples: slice) -> None:
    small, large = Workload(1, 8, 8, 512, 512), Workload(4, 32, 32, 8192, 8192)
    for problem, _, target in examples(family)[some_examples]:
        device, config = device_of_target(target), family.default(problem, target)
        quick, slow = (family.predict(problem, config, w, device).seconds for w in (small, large))
        assert 0 < quick < slow < 10
        # No faster than the tensor cores alone would be.
        peak = device.sm_count * device.clock_hz * max(target.mma_flops_per_cycle * device.mma_rate, target.wgmma_flops_per_cycle)
        assert slow >= operation_of(problem).flops(problem, large) / peak * 0.999
        assert family.predict(problem, config, Workload(0, 8, 8, 0, 0), device).seconds == 0


def require_whole_programs(family: Family, problem: Problem, workload: Workload, target: Target) -> None:
    """Every parameter has a value, every operand a place, and every launch a size; nothing is launched for empty outputs alone."""
    device, config, operation = device_of_target(target), family.default(problem, target), operation_of(problem)
    call = operation.call(problem, workload, {}, dict.fromkeys(operation.scalars(problem, workload), 0.125))
    program, kernels = family.program(config, call, device), family.kernels(problem, config)
    blocks, resources = {kernel.suffix: kernel.parameters for kernel in kernels}, family.resources(problem, config)
    assert resources.keys() == blocks.keys()
    outputs = [operand for operand in operation.operands(problem) if operand.role is not Role.IN]
    if not program.launches:
        assert not any(math.prod(call.views[operand.name].sizes) for operand in outputs), "an output that nobody writes"
        return
    assert [launch.suffix for launch in program.launches] == list(blocks), "each kernel is launched, in their order"
    names = {operand.name for operand in operation.operands(problem)} | {buffer.name for buffer in program.buffers}
    for launch in program.launches:
        block = blocks[launch.suffix]
        assert 1 <= launch.grid < 2**31
        assert launch.maps.keys() == {place.name for place in block.tensor_maps} <= names
        assert len(block.pack(launch.values)) % block.alignment == 0
    places = [place.name for block in blocks.values() for place in (*block.tensor_maps, *block.pointers)]
    assert names <= set(places), "each is used"
    unused = {"tile_counter", "partials", "part_counters"}  # of kernels that claim no tiles, and that share no head among blocks
    assert set(places) - names <= unused, "a pointer by another name is null"


@every_family
def test_a_launch_has_all_that_the_parameters_ask_for(family: Family, some_examples: slice) -> None:
    for problem, workload, target in examples(family)[some_examples]:
        for one in (workload, *ODD_WORKLOADS):
            if not family.call_refusals(operation_of(problem).call(problem, one)):
                require_whole_programs(family, problem, one, target)


def test_a_family_that_can_do_nothing_is_not_taken_for_sound() -> None:
    class Idle(type(FORWARD)):  # type: ignore[misc]
        def refusals(self, problem: Problem, target: Target) -> list[str]:
            return ["it is idle"]

    with pytest.raises(AssertionError, match="computes no example of any operation"):
        examples(Idle())


@every_family
def test_a_config_of_another_family_is_refused(family: Family) -> None:
    with pytest.raises(ArgumentError, match=rf"^config must be one of {family.config_type.__name__}; got 'OtherConfig'$"):
        family.require_legal(BF16_64, OtherConfig(), SM_80)


def divide(n: int, reciprocal: int) -> int:
    """As in tile/common/tile_scheduler.cuh."""
    return n * reciprocal >> 64 if reciprocal else n


def find_work(block: int, values: dict[str, Any]) -> tuple[int, int, int]:
    """(query tile, head, batch) of a block, as in tile/common/tile_scheduler.cuh."""
    section = divide(block, values["l2_group_tiles_reciprocal"])
    within = block - section * values["l2_group_tiles"]
    tile = divide(within, values["l2_group_heads_reciprocal"])
    head_and_batch = section * values["l2_group_heads"] + within - tile * values["l2_group_heads"]
    batch = divide(head_and_batch, values["heads_q_reciprocal"])
    return values["query_tiles"] - 1 - tile, head_and_batch - batch * values["heads_q"], batch


class TestAttentionForward:
    """What the one family refuses, with numbers and the nearest legal value."""

    good = AttentionForwardConfig(128, 64, 32, 4, 2, QueryPlace.SHARED)

    def reasons(self, problem: Problem = BF16_64, target: str = "sm_80", **changes: Any) -> list[str]:
        config = dataclasses.replace(self.good, **changes)
        return FORWARD.check(problem, config, find_target(target))

    def test_legal(self) -> None:
        assert self.reasons() == []

    @pytest.mark.parametrize(
        ("problem", "expected"),
        [
            (Problem(Dtype.BF16, 60), ["head_dim must be a multiple of 8 from 8 to 256; got 60 (nearest: 64)"]),
            (Problem(Dtype.BF16, 264), ["head_dim must be a multiple of 8 from 8 to 256; got 264 (nearest: 256)"]),
            (Problem(Dtype.BF16, 64, 1), ["head_dim_v must be a multiple of 8 from 8 to 256; got 1 (nearest: 8)"]),
        ],
    )
    def test_head_dims(self, problem: Problem, expected: list[str]) -> None:
        named = [r for r in FORWARD.refusals(problem, SM_80) if r.startswith(expected[0].split()[0] + " ")]
        assert named == expected
        assert set(FORWARD.refusals(problem, SM_80)) <= set(self.reasons(problem))
        assert FORWARD.legal_configs(problem, SM_80) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"block_kv": 80}, "block_kv must be a multiple of step_kv 32, up to 256; got 80"),
            ({"block_kv": 0}, "block_kv must be a multiple of step_kv 32, up to 256; got 0"),
            ({"block_kv": 288}, "block_kv must be a multiple of step_kv 32, up to 256; got 288"),
            ({"step_kv": 8}, "step_kv must be a multiple of 16 from 16 to 256; got 8"),
            ({"step_kv": 0}, "step_kv must be a multiple of 16 from 16 to 256; got 0"),
            ({"stages": 1}, "stages must be from 2 to 4; got 1"),
            ({"stages": 5}, "stages must be from 2 to 4; got 5"),
            ({"warps": 0}, "warps must be from 2 to 16; got 0"),
            ({"warps": 1, "block_q": 32}, "warps must be from 2 to 16; got 1"),
            ({"warps": 17, "block_q": 272}, "warps must be from 2 to 16; got 17"),
            ({"blocks_per_sm": 9}, "blocks_per_sm must be from 1 to 8; got 9"),
            ({"block_q": 192}, "block_q must give each warp 16 or 32 rows, so 64 or 128 with warps 4; got 192"),
            ({"block_q": 32}, "block_q must give each warp 16 or 32 rows, so 64 or 128 with warps 4; got 32"),
            ({"block_q": 96}, "block_q must give each warp 16 or 32 rows, so 64 or 128 with warps 4; got 96"),
        ],
    )
    def test_fields(self, changes: dict[str, Any], reason: str) -> None:
        assert self.reasons(**changes) == [reason]

    def test_shared_memory(self) -> None:
        (reason,) = self.reasons(Problem(Dtype.BF16, 128), block_q=128, warps=8, block_kv=128)
        needed = 128 * 128 * 2 + 2 * 128 * 2 * 128 * 2 + 256 * 16  # queries, stages, sums
        assert reason == f"needs {needed} B of shared memory, sm_80 has 166912 B a block: lower block_kv, stages or block_q"
        assert self.reasons(Problem(Dtype.BF16, 128), "sm_90a", block_q=128, warps=8, block_kv=128) == []

    def test_blocks_of_one_sm(self) -> None:
        reasons = self.reasons(block_kv=128, blocks_per_sm=8)
        shared = FORWARD.resources(BF16_64, dataclasses.replace(self.good, block_kv=128))[""].shared_bytes
        assert any(f"blocks_per_sm 8 needs {8 * (shared + 1024)} B of shared memory, sm_80 has {164 * 1024} B an SM" in r for r in reasons)
        assert any("registers" in r for r in reasons), "all the reasons, not the first"

    def test_threads_of_one_sm(self) -> None:
        reasons = self.reasons(Problem(Dtype.BF16, 8), target="sm_86", block_q=128, warps=8, block_kv=32, blocks_per_sm=7)
        assert any(r.startswith("blocks_per_sm 7 needs 1792 threads, sm_86 has 1536 an SM") for r in reasons)

    @pytest.mark.parametrize(
        ("problem", "changes", "needed"),
        [
            (BF16_64, {}, 2 * (64 // 2 + 32) + 46),  # output and scores of two row tiles
            (BF16_64, {"block_q": 64}, 64 // 2 + 32 + 46),  # of one
            (BF16_64, {"block_kv": 128, "stages": 3}, 2 * (64 // 2 + 32) + 46),
            (BF16_64, {"query": QueryPlace.REGISTERS}, 2 * (64 // 2 + 32 + 64 // 4) + 46),
            (Problem(Dtype.FP16, 192, 72), {"query": QueryPlace.REGISTERS, "block_q": 64}, 80 // 2 + 32 + 192 // 4 + 46),
        ],
    )
    def test_registers_needed(self, problem: Problem, changes: dict[str, Any], needed: int) -> None:
        assert FORWARD.registers_needed(problem, dataclasses.replace(self.good, **changes)) == needed  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("warps", "blocks", "cap"),
        [(2, 4, 255), (4, 2, 255), (4, 3, 168), (8, 1, 255), (8, 2, 128), (12, 1, 168), (16, 1, 128), (16, 2, 64)],
    )
    def test_registers_that_are_left(self, warps: int, blocks: int, cap: int) -> None:
        """65536 an SM, given to a thread by eights, and 255 at most."""
        config = dataclasses.replace(self.good, warps=warps, block_q=16 * warps, blocks_per_sm=blocks)
        assert FORWARD.registers_cap(config, SM_80) == cap  # type: ignore[attr-defined]

    def test_the_default_is_the_model_s_pick_of_those_that_leave_registers_to_spare(self) -> None:
        """36 of them."""
        long = Workload(4, 16, 16, 4096, 4096)
        for problem in (BF16_64, Problem(Dtype.FP16, 128, 128, Mask.CAUSAL), Problem(Dtype.BF16, 256)):
            legal = FORWARD.legal_configs(problem, H200.target)
            spare = {c: FORWARD.registers_cap(c, H200.target) - FORWARD.registers_needed(problem, c) for c in legal}  # type: ignore[attr-defined]
            left = [config for config in legal if spare[config] >= 36]
            default = FORWARD.default(problem, H200.target)
            assert default in left
            seconds = {config: FORWARD.predict(problem, config, long, H200).seconds for config in left}
            assert seconds[default] == min(seconds.values())
            assert len(left) < len(legal), "else it would say nothing"

    def test_registers(self) -> None:
        """What is needed may be all that is left, and no more."""
        (reason,) = self.reasons(blocks_per_sm=3, block_kv=32)
        has = "168 are available with 128 threads and blocks_per_sm 3"
        assert reason == f"needs about 174 registers a thread, {has}: lower block_kv, blocks_per_sm or the rows of a warp"
        for needed, reasons in ((168, 0), (169, 1)):
            beside = needed - (174 - 46)
            changed = type("Changed", (type(FORWARD),), {"registers_beside": beside})()
            config = dataclasses.replace(self.good, blocks_per_sm=3, block_kv=32)
            assert len(changed.check(BF16_64, config, SM_80)) == reasons

    @pytest.mark.parametrize(
        ("problem", "changes", "needed"),
        [
            (BF16_64, {}, (128 * 64 + 2 * 64 * 2 * 64) * 2 + 2 * 128 * 16),  # queries, two stages of K and V, sums of two row tiles
            (BF16_64, {"block_q": 64, "stages": 4, "block_kv": 32}, (64 * 64 + 4 * 32 * 2 * 64) * 2 + 128 * 16),
            (Problem(Dtype.BF16, 192, 128), {}, (128 * 192 + 2 * 64 * (192 + 128)) * 2 + 2 * 128 * 16),
            (Problem(Dtype.BF16, 64, 120), {}, (128 * 128 + 2 * 64 * (64 + 128)) * 2 + 2 * 128 * 16),  # the output takes the queries' place
            (Problem(Dtype.FP16, 72, 8), {}, (128 * 80 + 2 * 64 * (80 + 16)) * 2 + 2 * 128 * 16),
        ],
    )
    def test_shared_memory_needed(self, problem: Problem, changes: dict[str, Any], needed: int) -> None:
        assert FORWARD.resources(problem, dataclasses.replace(self.good, **changes))[""].shared_bytes == needed

    @pytest.mark.parametrize(("available", "reasons"), [(53248, 0), (53247, 1)])
    def test_shared_memory_may_be_used_up(self, available: int, reasons: int) -> None:
        assert FORWARD.resources(BF16_64, self.good) == {"": BlockResources(128, 53248)}
        for target in (
            dataclasses.replace(SM_80, shared_memory_per_block=available),
            dataclasses.replace(SM_80, shared_memory_per_sm=available + 1024),
        ):
            assert len(FORWARD.check(BF16_64, self.good, target)) == reasons

    @pytest.mark.parametrize(("available", "reasons"), [(256, 0), (255, 1)])
    def test_threads_may_be_used_up(self, available: int, reasons: int) -> None:
        target = dataclasses.replace(SM_80, threads_per_sm=available)
        config = dataclasses.replace(self.good, blocks_per_sm=2)
        assert len(FORWARD.check(BF16_64, config, target)) == reasons

    def test_targets_before_sm_80_are_refused(self) -> None:
        old = dataclasses.replace(SM_80, name="sm_75", capability=(7, 5))
        assert FORWARD.refusals(BF16_64, old) == ["target must be sm_80 or newer; got sm_75"]

    @pytest.mark.parametrize(
        ("target", "counts"),
        [
            ("sm_80", [534, 354, 320, 200, 152, 50]),
            ("sm_86", [534, 302, 264, 98, 68, 20]),
            ("sm_90a", [534, 382, 342, 220, 208, 72]),
        ],
    )
    def test_how_many_configs_are_legal(self, target: str, counts: list[int]) -> None:
        """Of the problems with a full mask. Another count is a change of what may be chosen: right only if that was meant."""
        assert [len(FORWARD.legal_configs(problem, find_target(target))) for problem in PROBLEMS[::2]] == counts

    def test_all_reasons_at_once(self) -> None:
        reasons = self.reasons(Problem(Dtype.BF16, 60), warps=0, step_kv=24, block_kv=7, stages=9, blocks_per_sm=0)
        assert [r.split()[0] for r in reasons] == ["head_dim", "head_dim_v", "warps", "step_kv", "stages", "blocks_per_sm", "block_kv"]
        config = dataclasses.replace(self.good, warps=0, step_kv=24, block_kv=7, stages=9, blocks_per_sm=0)
        with pytest.raises(IllegalConfigError) as error:
            FORWARD.require_legal(Problem(Dtype.BF16, 60), config, SM_80)
        assert list(error.value.reasons) == reasons
        assert all(r in str(error.value) for r in reasons)
        assert str(error.value).startswith(f"config {config.name} is illegal: ")

    @pytest.mark.parametrize(("head_dims", "fits"), [((64, 64), True), ((192, 128), True), ((72, 80), True), ((64, 72), False)])
    def test_the_output_takes_the_queries_place_where_it_fits(self, head_dims: tuple[int, int], fits: bool) -> None:
        assert FORWARD.context(Problem(Dtype.BF16, *head_dims), self.good, SM_80)["output_over_queries"] is fits

    def test_grid_covers_every_row_once(self) -> None:
        for len_q, grid in ((1, 24), (128, 24), (129, 48), (0, 0)):
            assert cast(Any, FORWARD).grid(self.good, Workload(3, 8, 2, len_q, 99)) == grid

    def values(self, workload: Workload, scale: float = 0.125, mask: Mask = Mask.FULL, block_q: int = 64) -> dict[str, Any]:
        config = dataclasses.replace(self.good, block_q=block_q)
        return values_of(FORWARD, Problem(Dtype.BF16, 64, mask=mask), config, workload, scale=scale)

    @pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 12, 48, 64, 641, 2**16 - 1, 2**16, 2**24 + 1, 2**31 - 1])
    def test_reciprocals_divide_exactly(self, divisor: int) -> None:
        """The kernel's `divide`: the upper 64 bits of n * reciprocal, or n where that is 0."""
        by_blocks = self.values(Workload(2, 8, 2, 64 * min(divisor, 2**25) - 63, 99))
        by_heads = self.values(Workload(1, divisor, divisor, 100, 99))
        by_group = self.values(Workload(1, divisor, 1, 100, 99))
        assert by_blocks["l2_group_tiles"] == min(divisor, 2**25)
        for number, reciprocal in (
            (by_blocks["l2_group_tiles"], by_blocks["l2_group_tiles_reciprocal"]),
            (divisor, by_heads["heads_q_reciprocal"]),
            (divisor, by_group["group_reciprocal"]),
        ):
            exact = [number * k + off for k in (0, 1, 2, 3, 1000, 2**31 // int(number) - 1) for off in (-1, 0, 1)]
            for n in [n for n in (*exact, 2**31 - 1) if 0 <= n < 2**31]:
                assert divide(n, reciprocal) == n // number, f"{n} / {number}"
            assert 0 <= reciprocal < 2**64

    @pytest.mark.parametrize(
        ("workload", "section"),
        [
            (Workload(4, 6, 2, 300, 300), 24),  # all heads' K and V fit
            (Workload(2, 16, 16, 4096, 4096), 16),  # 1 MiB a head, and 30 MiB for a section: 30 would fit, 16 divide 32
            (Workload(1, 31, 31, 3000, 5000), 1),  # 24 would fit, but 31 has no divisor below
            (Workload(1, 32, 4, 2000, 65536), 8),  # groups of 8 share their 16 MiB: 15 would fit
            (Workload(1, 3, 3, 100, 0), 3),
            (Workload(1, 2, 2, 64, 2**20), 1),  # not even one fits
            (Workload(4096, 1, 1, 8, 8), 1024),  # more would fit
        ],
    )
    def test_order_takes_every_block_once_and_the_longest_first(self, workload: Workload, section: int) -> None:
        values = self.values(workload, mask=Mask.CAUSAL)
        assert values["l2_group_heads"] == section
        config = dataclasses.replace(self.good, block_q=64)
        (launch,) = program_of(FORWARD, Problem(Dtype.BF16, 64), config, workload).launches
        blocks = [find_work(block, values) for block in range(launch.grid)]
        assert set(blocks) == set(itertools.product(range(-(-workload.len_q // 64)), range(workload.heads_q), range(workload.batch)))
        assert len(set(blocks)) == len(blocks)
        for begin in range(0, len(blocks), values["l2_group_tiles"]):
            of_section = [tile for tile, _, _ in blocks[begin : begin + values["l2_group_tiles"]]]
            assert of_section == sorted(of_section, reverse=True)

    def test_without_a_mask_blocks_of_a_head_are_neighbours(self) -> None:
        assert self.values(Workload(4, 6, 2, 300, 300))["l2_group_heads"] == 1

    @pytest.mark.parametrize("scale", [0.125, 64**-0.5 * 1.7, 256**-0.5, 1e-6, 3.0])
    def test_natural_turns_base_2_back_into_scaled_scores(self, scale: float) -> None:
        """scale_log2 is rounded to fp32 before it is used, so their ratio is not ln 2; in two parts it is exact to more than fp32.

        The scale itself is an fp32 number, as it is in plain PyTorch.
        """
        values = self.values(Workload(1, 8, 2, 100, 99), scale)
        scale = float(np.float32(scale))
        scale_log2, natural, low = (float(np.float32(values[name])) for name in ("scale_log2", "ln2_hi", "ln2_lo"))
        assert scale_log2 == values["scale_log2"]
        assert scale_log2 == pytest.approx(scale * math.log2(math.e), rel=2**-24)
        assert (natural + low) * scale_log2 == pytest.approx(scale, rel=2**-46)
        assert abs(low) <= 2**-24 * natural


def some_legal_configs(family: Family, problem: Problem, target: Target) -> list[Config]:
    """The default, and of the space every seventh that is legal."""
    sampled = itertools.islice(family.space(problem, target), 0, None, 7)
    return [family.default(problem, target), *(config for config in sampled if not family.check(problem, config, target))]


def refusals_beyond_the_group(family: Family) -> Iterator[str]:
    """Configs that take a workload and not its bucket, or the other way round: one kernel is chosen for both."""
    sizes = itertools.product((1, 3), (1, 5), (1, 3, 8, 12), (1, 100), (0, 1, 3000))
    workloads = [Workload(batch, heads_kv * group, heads_kv, *lengths) for batch, heads_kv, group, *lengths in sizes]
    for problem, target in ((p, t) for p in PROBLEMS[2:4] for t in targets().values() if not family.refusals(p, t)):
        calls = [attention_call(problem, workload) for workload in workloads]
        asked = [(call, family.call_refusals(call), bucket(call.workload)) for call in calls]
        for config in some_legal_configs(family, problem, target):
            for call, of_family, its_bucket in asked:
                workload, reasons = call.workload, family.config_refusals(config, call.workload)
                if bool(reasons) != bool(family.config_refusals(config, its_bucket)):
                    yield f"{config.name} {workload.name}"
                if family.call_refusals(call, config) != of_family + reasons:
                    yield f"{config.name} {workload.name}: a reason that config_refusals does not know"


@every_family
def test_whether_a_config_takes_a_workload_depends_on_the_group_alone(family: Family) -> None:
    assert list(refusals_beyond_the_group(family)) == []


@every_example
def test_a_config_takes_groups_that_are_multiples_of_its_unit(family: Family, problem: Problem, target: Target) -> None:
    for config in some_legal_configs(family, problem, target):
        unit = family.group_unit(config)
        for group in (1, 2, 3, 8, 12, 16, 48):
            assert bool(family.config_refusals(config, Workload(2, 5 * group, 5, 100, 300))) == bool(group % unit)


def test_a_refusal_that_depends_on_a_length_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusals(config: Config, workload: Workload) -> list[str]:
        return [] if workload.len_kv % 128 == 0 else ["k must have a multiple of 128 rows"]

    monkeypatch.setattr(FORWARD, "config_refusals", refusals)
    assert any(refusals_beyond_the_group(FORWARD))


def test_a_refusal_of_a_config_that_only_a_call_gets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusals(call: Call, config: Config | None = None) -> list[str]:
        return ["k must be dense"] if config is not None and call.views["k"].strides[1] > 1 else []

    monkeypatch.setattr(FORWARD, "call_refusals", refusals)
    assert any(refusals_beyond_the_group(FORWARD))
