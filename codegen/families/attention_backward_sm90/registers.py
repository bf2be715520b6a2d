"""Which tiles the registers of a consumer's thread have room for: dK and dV stay in them, beside S and dP first and then beside dQ."""

from __future__ import annotations

from typing import Any

from flashgen.codegen.attention import padded
from flashgen.codegen.modifier import adds_to_scores, collects_gradients, drops, maps_scores, modifiers_of, reads_scores
from flashgen.codegen.problem import Problem
from flashgen.codegen.seen_tiles import scatters

from .launch import panels

# By experiment, what compiles without spills and without products that wait for each other:
ACCUMULATORS = 208  # that these may take of a consumer's registers; the rest is what is beside
FEWEST_BESIDE_D_Q = 12  # of those, that dS and what adds dQ up take
WIDE = 128  # of dK and dV together
SPLIT = 16  # of those, that are lost if the product of dV is under way beside dQ, and not just P


def modifier_reasons(problem: Problem) -> list[str]:
    """Why there are no registers for a problem's modifiers together, by experiment, or no place in the order of work."""
    if any(one.bends_scores for one in modifiers_of(problem)):
        return ["score_mod must only add to the score in these kernels, which keep no scores for its derivative; got one that does more"]
    if not maps_scores(problem):
        return []
    reasons = ["a softcap must be without a bias and a mask in these kernels: they spill with both"] if reads_scores(problem) else []
    if collects_gradients(problem):
        reasons.append("a softcap must be without gradients of added terms in these kernels, which have no dS without its derivative")
    return reasons + ["a softcap must be without dropout in these kernels, which round P before dP is there"] * drops(problem)


def is_crowded(problem: Problem) -> bool:
    """Whether masks that hide keys of no range leave too few registers for tiles of 64 queries, where gradients are wide."""
    return scatters(problem) and (adds_to_scores(problem) or problem.deterministic)


def _reads_beside_others(problem: Problem) -> bool:
    """Whether scores have elements in memory beside other terms, or ones with a gradient: then nothing is left where tiles take all."""
    adding = [one for one in modifiers_of(problem) if one.adds_to_scores]
    return reads_scores(problem) and (len(adding) > 1 or any(one.learned for one in adding))


def widest_with_tensors(problem: Problem) -> int:
    """Queries of a tile, at most, where packed sequences have tensors of which each score has an element: where both end takes registers.

    By experiment, the fewer the more terms there are, and the wider gradients are, and fewer where additions have an order.
    """
    if not problem.is_packed or not reads_scores(problem):
        return 2**31
    gradients = (padded(problem.head_dim) + padded(problem.head_dim_v)) // 2
    several = sum(one.adds_to_scores for one in modifiers_of(problem)) > 1
    if gradients <= WIDE // 2:
        return (64 if problem.deterministic else 96) if several else 128
    if several:
        is_fp32 = any(one.reads_scores and one.learned and not one.fetched for one in modifiers_of(problem))
        return 32 if is_fp32 and gradients >= WIDE else 64
    return (64 if scatters(problem) else 80) if problem.deterministic else 128


def accumulators(problem: Problem, config: Any) -> int:
    """Registers a thread of dK and dV, with S and dP beside them or, if that is more, with dQ and dS, and P if it is still needed.

    Where a modifier maps scores, P is rounded while S and dP are still there. By experiment, the widest tiles then need a few more, the
    more the wider gradients are, as wide gradients leave too few where a modifier adds to scores, and the widest tiles where one also drops
    elements of P. So do masks that hide keys of no range: see `is_crowded`.
    """
    operand: int = config.block_q // 4  # of P or dS, as wgmma takes it
    score_registers: int = config.block_q + maps_scores(problem) * (operand + 4 * (config.block_q > 96))
    beside_d_q = max(operand, FEWEST_BESIDE_D_Q) + (operand + SPLIT if config.split else 0)
    gradients = (padded(problem.head_dim) + padded(problem.head_dim_v)) // 2
    score_registers += 20 * (drops(problem) and adds_to_scores(problem) and config.block_q > 96)
    if gradients > WIDE // 2 and config.block_q > 80:
        score_registers += 12 * maps_scores(problem)
    score_registers += 20 * (gradients > WIDE // 2 and is_crowded(problem))
    score_registers += 4 * (gradients == WIDE and config.block_q > 64 and _reads_beside_others(problem))
    if gradients > WIDE:
        score_registers += 4 * (adds_to_scores(problem) or drops(problem))
    return gradients + max(score_registers, d_q_registers(problem, config) + beside_d_q)


def d_q_registers(problem: Problem, config: Any) -> int:
    """Of a warpgroup's share of dQ: 64 of the queries or half of the panels of 64 columns."""
    return int(config.block_q) * panels(problem.head_dim) // 4 if config.transposes_d_q else padded(problem.head_dim) // 2
