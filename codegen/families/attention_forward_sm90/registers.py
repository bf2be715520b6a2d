"""How many registers threads have, and which K blocks those of a consumer have room for."""

from __future__ import annotations

from flashgen.codegen.attention import padded
from flashgen.codegen.linear_terms import is_linear_in_key
from flashgen.codegen.modifier import adds_to_scores, maps_scores, modifiers_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.score_tensors import fetches
from flashgen.codegen.seen_tiles import scatters

from .config import AttentionForwardSm90Config

# What a thread needs beside scores, probabilities of two key blocks and the output, by the number of consumers. By experiment: what is
# within compiles without spills, and what is 16 beyond does not. The more consumers, the fewer the compiler gets by with.
BESIDE = (48, 40, 32)
OF_MAP = (0, 0, 16)  # more, by consumers, where a modifier maps scores: its constants, and what a large score takes
OF_WIDE_MAP = 16  # still more, at head dims of v beyond 192
# K blocks, by consumers, whose map needs no more than that, if it is no part of the exponential but comes before it, from S to S.
WIDEST = (128, 128, 80)
WIDEST_SUM = 144  # the same where a modifier adds to scores
OF_HIDING_MAP = 8  # more, where a map is beside a window or the like, and consumers take turns
OF_LINEAR = (0, 0, 16)  # more, by consumers, where that is linear in the key
OF_FETCHED, OF_CLAIMED_FETCHED = 8, 24  # more, where elements of scores are fetched, and work tiles claimed
BESIDE_FETCHED = 32  # still more, beside other modifiers
OF_SCATTERED = 16  # more, where masks beside it hide keys of no range


def registers_needed(problem: Problem, config: AttentionForwardSm90Config) -> int:
    """An estimate of the registers of a consumer's thread; the compiler has the last word."""
    beside, block_kv = BESIDE[config.warpgroups - 1], config.block_kv
    if adds_to_scores(problem):
        beside += OF_LINEAR[config.warpgroups - 1] * is_linear_in_key(problem)
        beside += max(0, block_kv - WIDEST_SUM) + OF_SCATTERED * scatters(problem)
        if fetches(problem):
            beside += (OF_CLAIMED_FETCHED if config.dynamic else OF_FETCHED) + BESIDE_FETCHED * (len(problem.modifiers) > 1)
    if maps_scores(problem):
        beside += OF_MAP[config.warpgroups - 1] + OF_WIDE_MAP * (problem.head_dim_v > 192)
        beside += OF_HIDING_MAP * (config.ping_pong and any(modifier.hides_keys for modifier in modifiers_of(problem)))
        if adds_to_scores(problem) or scatters(problem):
            beside += max(0, block_kv - WIDEST[config.warpgroups - 1])
    return block_kv + padded(problem.head_dim_v) // 2 + beside


def registers_given(config: AttentionForwardSm90Config, of_block: int) -> tuple[int, int]:
    """Of a thread of the producer, and of a consumer: together no more than the launch bounds give out.

    A producer that claims tiles needs more than 24. A consumer that is alone on its SM has all that a thread can have, and moves none.
    """
    each = of_block // (128 * (config.warpgroups + 1)) // 8 * 8
    if each >= 255:
        return 255, 255
    producer = 32 if config.warpgroups == 3 else 40
    return producer, (each * (config.warpgroups + 1) - producer) // config.warpgroups // 8 * 8
