"""The configs that cases are launched with: a wider choice than the tuner's, so that whatever is legal is tried."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward.family import SPARE_REGISTERS, AttentionForward
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload


def _chosen(numbers: tuple[int, int, int, int, int], query: QueryPlace, first_product: FirstProduct) -> AttentionForwardConfig:
    return AttentionForwardConfig(*numbers, query, first_product)


# Head dims of q and v, and a config: numbers are block_q, block_kv, step_kv, warps, stages. Together they have every value of the enums,
# every number of stages, one step a tile and several, 16 and 32 rows a warp, 2 to 16 warps, v narrower and wider than q.
# Each is legal on every target.
CHOSEN = (
    ((64, 64), _chosen((64, 64, 16, 4, 2), QueryPlace.SHARED, FirstProduct.QK)),
    ((64, 64), _chosen((32, 32, 32, 2, 3), QueryPlace.REGISTERS, FirstProduct.PV)),
    ((64, 64), _chosen((128, 96, 48, 4, 3), QueryPlace.SHARED, FirstProduct.PV)),
    ((64, 64), _chosen((256, 48, 16, 16, 4), QueryPlace.SHARED, FirstProduct.QK)),
    ((32, 32), _chosen((512, 32, 16, 16, 2), QueryPlace.SHARED, FirstProduct.PV)),
    ((96, 96), _chosen((48, 80, 80, 3, 2), QueryPlace.REGISTERS, FirstProduct.QK)),
    ((40, 136), _chosen((80, 48, 16, 5, 3), QueryPlace.SHARED, FirstProduct.QK)),
    ((16, 200), _chosen((112, 32, 32, 7, 2), QueryPlace.REGISTERS, FirstProduct.PV)),
    ((136, 40), _chosen((64, 32, 16, 2, 4), QueryPlace.SHARED, FirstProduct.PV)),
    ((128, 128), _chosen((64, 64, 32, 4, 2), QueryPlace.REGISTERS, FirstProduct.PV)),
    ((64, 64), _chosen((64, 128, 64, 4, 2), QueryPlace.SHARED, FirstProduct.PV)),
    ((64, 64), _chosen((192, 64, 32, 12, 3), QueryPlace.REGISTERS, FirstProduct.QK)),
)


def _chosen_sm90(
    numbers: tuple[int, int, int, int, int], row_max: RowMax, scheduler: Scheduler, ping_pong: bool = False, packed: int = 1
) -> AttentionForwardSm90Config:
    return AttentionForwardSm90Config(*numbers, row_max, ping_pong, scheduler, packed)


# The same for Hopper; numbers are warpgroups, block_kv, stages, query_stages, out_panels. Together they have every value of the enums,
# each number of consumers, stages and panels, odd panels, v narrower and wider than q. Each is legal on sm_90a.
CHOSEN_SM90 = (
    ((64, 64), _chosen_sm90((1, 128, 2, 2, 1), RowMax.STALE, Scheduler.STATIC)),
    ((64, 64), _chosen_sm90((2, 160, 2, 2, 1), RowMax.STALE, Scheduler.DYNAMIC, ping_pong=True)),
    ((64, 64), _chosen_sm90((3, 96, 2, 2, 1), RowMax.EXACT, Scheduler.DYNAMIC, ping_pong=True)),
    ((96, 96), _chosen_sm90((2, 96, 3, 1, 2), RowMax.STALE, Scheduler.STATIC)),
    ((128, 128), _chosen_sm90((2, 128, 2, 2, 2), RowMax.STALE, Scheduler.DYNAMIC, ping_pong=True)),
    ((128, 128), _chosen_sm90((2, 64, 3, 2, 1), RowMax.EXACT, Scheduler.STATIC)),
    ((192, 128), _chosen_sm90((2, 112, 2, 1, 1), RowMax.STALE, Scheduler.DYNAMIC, ping_pong=True)),
    ((128, 192), _chosen_sm90((2, 96, 2, 1, 3), RowMax.STALE, Scheduler.STATIC, ping_pong=True)),
    ((40, 136), _chosen_sm90((2, 80, 2, 2, 3), RowMax.EXACT, Scheduler.STATIC, ping_pong=True)),
    ((256, 256), _chosen_sm90((2, 64, 2, 1, 2), RowMax.STALE, Scheduler.STATIC, ping_pong=True)),
    ((256, 256), _chosen_sm90((1, 48, 2, 1, 4), RowMax.STALE, Scheduler.DYNAMIC)),
    ((152, 152), _chosen_sm90((1, 48, 2, 1, 2), RowMax.EXACT, Scheduler.DYNAMIC)),
    ((16, 16), _chosen_sm90((3, 112, 4, 2, 1), RowMax.STALE, Scheduler.DYNAMIC)),
    ((128, 128), _chosen_sm90((1, 64, 2, 2, 2), RowMax.STALE, Scheduler.STATIC, packed=16)),
    ((64, 96), _chosen_sm90((2, 96, 2, 1, 1), RowMax.STALE, Scheduler.DYNAMIC, ping_pong=True, packed=2)),
)


def draw(family: Family, problem: Problem, target: Target, seed: int, workloads: Sequence[Workload]) -> Config:
    """A legal config that takes these workloads; the same for the same arguments.

    Raises IllegalConfigError if the family cannot do the problem.
    """
    rng = random.Random(seed)
    if not isinstance(family, AttentionForward):
        legal = family.legal_configs(problem, target)
        return rng.choice([config for config in legal if not any(family.config_refusals(config, w) for w in workloads)])
    family.require_legal(problem, family.default(problem, target), target)
    while True:
        config = _draw_attention_forward(rng)
        if not family.check(problem, config, target) and _leaves_registers(family, problem, config, target):
            return config


def _draw_attention_forward(rng: random.Random) -> AttentionForwardConfig:
    warps, step_kv = rng.randint(2, 16), rng.randrange(16, 129, 16)
    return AttentionForwardConfig(
        block_q=warps * rng.choice((16, 32)),
        block_kv=step_kv * rng.choice((1, 1, 2, 3, 4)),
        step_kv=step_kv,
        warps=warps,
        stages=rng.randint(2, 4),
        query=rng.choice(list(QueryPlace)),
        first_product=rng.choice(list(FirstProduct)),
        blocks_per_sm=rng.choice((1, 1, 1, 2)),
    )


def _leaves_registers(family: AttentionForward, problem: Problem, config: AttentionForwardConfig, target: Target) -> bool:
    """So that few of the kernels spill: one that does is not launched."""
    return family.registers_needed(problem, config) + SPARE_REGISTERS <= family.registers_cap(config, target)
