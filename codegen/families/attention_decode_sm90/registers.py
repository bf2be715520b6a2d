"""Registers of a thread of the Hopper decode kernel: what it has, and what S, P, O and modifiers need."""

from __future__ import annotations

from flashgen.codegen.attention import padded
from flashgen.codegen.modifier import modifiers_of
from flashgen.codegen.operands import Element
from flashgen.codegen.problem import Problem
from flashgen.codegen.score_tensors import MOST_BESIDE_FETCHED, WIDEST_FETCHED, loads_ahead, score_tensors
from flashgen.codegen.target import targets

from .config import AttentionDecodeSm90Config

PRODUCER_REGISTERS = 40
# All by experiment: what is within compiles without spills.
BESIDE = 72  # that a consumer's thread needs beside S, P and O
BESIDE_KEY_GROUPS = 12  # more, with modifiers, where one key group adds the other one's O
BESIDE_SHARERS = 4  # more, with modifiers, where a thread has P of two tiles
BESIDE_TENSOR = 5  # more, for each tensor of scores: where a thread's rows begin in it
FREE = 29  # that scores leave to elements which are there a tile ahead
WIDEST_OF_KEY_GROUPS = 192  # columns of O that leave room for both


def registers(config: AttentionDecodeSm90Config) -> tuple[int, int]:
    """Of a thread of the producers, and of a consumer. One consumer has all that a thread can have, and moves none."""
    each = targets()["sm_90a"].registers_per_sm // (128 * (config.consumers + 1)) // 8 * 8
    if each >= 255:
        return 255, 255
    return PRODUCER_REGISTERS, (each * (config.consumers + 1) - PRODUCER_REGISTERS) // config.consumers // 8 * 8


def needed_registers(problem: Problem, config: AttentionDecodeSm90Config) -> int:
    """An estimate for a consumer's thread. It has elements of masks and biases a tile ahead, two neighbouring ones in a word.

    Two sharers have P of two tiles.
    """
    needed = config.block_kv * (2 + config.sharers) // 4 + padded(problem.head_dim_v) // 2 + BESIDE
    if problem.modifiers and config.key_groups > 1:
        needed += BESIDE_KEY_GROUPS
    if problem.modifiers and config.sharers > 1:
        needed += BESIDE_SHARERS
    ahead = [operand for one in modifiers_of(problem) if one.name in score_tensors(problem) for operand in one.operands(problem)]
    words = sum(2 if operand.element is Element.F32 else 1 for operand in ahead) * config.block_kv // 4
    return needed + BESIDE_TENSOR * sum(one.reads_scores for one in modifiers_of(problem)) + max(0, words - FREE)


def ahead_reasons(problem: Problem) -> list[str]:
    """Why registers do not do for the elements of a problem's masks and biases, whatever the config."""
    if not score_tensors(problem) or loads_ahead(problem):
        return []
    most = f"head_dim_v must be at most {WIDEST_FETCHED} with a mask or a bias, and modifiers at most {MOST_BESIDE_FETCHED + 1}"
    return [f"{most}: registers do for no more; got {problem.head_dim_v} and {len(problem.modifiers)}"]
