"""Which expressions depend on positions by query - key alone, and which of their elements stand in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.codegen.expressions.build import apply
from flashgen.codegen.expressions.canonical_text import text_of
from flashgen.codegen.expressions.distances import is_of_distance, lines_of
from flashgen.codegen.expressions.recognition import added_term
from flashgen.codegen.expressions.tree import INT32, KEY, QUERY, Expression, constant, load_node, loads_of, node, rewritten
from flashgen.traced.evaluation import evaluated
from flashgen.traced.modifier import modifier_in_call
from tests.support.random_trees import RandomTrees
from tests.traced.test_random_trees import SEEDS, VALUES, differs, inputs, tensors, written

TABLE, BUCKETS, SEEN = torch.rand(4, 100), torch.zeros(100, dtype=torch.int64), torch.zeros(100, dtype=torch.bool)
SLOPES, OFFSET, STARTS = torch.rand(4), 41, torch.zeros(4, dtype=torch.int16)
Function = Callable[..., Any]


def added(function: Function) -> Expression:
    score = modifier_in_call(function).modifier.score
    assert score is not None
    tree = added_term(score)
    assert tree is not None
    return tree


OF_DISTANCE: dict[str, Function] = {
    "a-table": lambda s, b, h, q, k: s + TABLE[h, q - k + OFFSET],
    "the-other-way": lambda s, b, h, q, k: s + TABLE[h, 3 + k - q],
    "64-bits": lambda s, b, h, q, k: s + TABLE[h, (q - k + 5).long()],
    "starts-of-heads": lambda s, b, h, q, k: s + TABLE[h, q + STARTS[h] - k],
    "clamped": lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q - k, -20, 20) + 20],
    "buckets": lambda s, b, h, q, k: s + TABLE[h, BUCKETS[(q - k).abs()]],
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "multiples": lambda s, b, h, q, k: s + torch.sin((2 * q - 2 * k + 1) * 0.1) * b,
    "before-and-after": lambda s, b, h, q, k: s + torch.where(q > k, TABLE[h, q - k], torch.where(q + 3 == k, 1.0, TABLE[h, k - q])),
    "a-look-at-bools": lambda s, b, h, q, k: s + SEEN[q - k + 50].float(),
}
NOT_OF_DISTANCE: dict[str, Function] = {
    "no-positions": lambda s, b, h, q, k: s + SLOPES[h],
    "a-query": lambda s, b, h, q, k: s + TABLE[h, q],
    "a-sum": lambda s, b, h, q, k: s + TABLE[h, q + k],
    "both": lambda s, b, h, q, k: s + TABLE[h, q - k + 30] * TABLE[h, k],
    "another-multiple": lambda s, b, h, q, k: s + TABLE[h, q - 2 * k + 70],
    "a-look-at-bools": lambda s, b, h, q, k: s + torch.where(SEEN[q], TABLE[h, q - k], 0.0),
    "of-two-dimensions": lambda s, b, h, q, k: s + TABLE[q, k],
    "floats": lambda s, b, h, q, k: s + (q * 0.1 - k * 0.1),
    "halves": lambda s, b, h, q, k: s + TABLE[h, q // 2 - k // 2 + 30],
    "a-limit-of-the-query": lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q, max=50) - k],
    "a-comparison": lambda s, b, h, q, k: s + torch.where(q > 2 * k, TABLE[h, q - k], 0.0),
}


@pytest.mark.parametrize("name", OF_DISTANCE)
def test_functions_of_the_distance(name: str) -> None:
    assert is_of_distance(added(OF_DISTANCE[name]))


@pytest.mark.parametrize("name", NOT_OF_DISTANCE)
def test_functions_of_more(name: str) -> None:
    assert not is_of_distance(added(NOT_OF_DISTANCE[name]))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a-table", [(1, 1, "n0:int32")]),
        ("the-other-way", [(1, -1, "3")]),
        ("64-bits", [(1, 1, "5")]),
        ("starts-of-heads", [(1, 1, "t0:int16[head]")]),
        ("clamped", []),
        ("buckets", []),
        ("a-look-at-bools", [(0, 1, "50")]),
    ],
)
def test_elements_in_a_line(name: str, wanted: list[tuple[int, int, str]]) -> None:
    lines = lines_of(added(OF_DISTANCE[name]))
    assert [(line.dimension, line.sign, text_of(line.rest)) for line in lines.values()] == wanted
    for load, line in lines.items():
        distance = apply("add", QUERY, apply("neg", KEY))
        given = {"query": torch.arange(60)[:, None] + 7, "key": torch.arange(50), "head": torch.tensor(2), "batch": torch.tensor(0)}
        others = {"t0": torch.tensor([9, 4, 3, 0])}
        index = line.at(load, distance)[line.dimension]
        found, right = (evaluated(each, given, others, {"n0": OFFSET}) for each in (index, load.operands[line.dimension]))
        assert torch.equal(found.long(), right.long())


def test_two_lines_and_a_look_are_apart() -> None:
    tree = added(OF_DISTANCE["before-and-after"])
    assert sorted(line.sign for line in lines_of(tree).values()) == [-1, 1]
    assert lines_of(added(NOT_OF_DISTANCE["of-two-dimensions"])) == lines_of(added(NOT_OF_DISTANCE["another-multiple"])) == {}


DISTANCE = apply("add", QUERY, apply("neg", KEY))
FURTHER = apply("add", apply("neg", DISTANCE), constant(11, INT32))


def moved(tree: Expression, query: Expression, key: Expression) -> Expression:
    """The tree of other positions."""

    def change(each: Expression, operands: tuple[Expression, ...]) -> Expression:
        if each in (QUERY, KEY):
            return query if each is QUERY else key
        if each.operation == "load":
            return load_node(each.value.tensor, each.value.dtype, operands)
        return apply(each.operation, *operands) if operands else node(each.operation, each.type, (), each.value)

    return rewritten([tree], change)[0]


def beyond(given: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    return {**given, "query": given["query"] + by, "key": given["key"] + by}


def test_random_trees_that_are_of_the_distance_are_the_same_along_it() -> None:
    given = inputs()
    given["query"] %= 2**29 - 100
    proved = 0
    for seed in SEEDS:
        own = written(seed).tree
        for tree in (own, moved(own, DISTANCE, KEY), moved(own, DISTANCE, FURTHER)):
            if is_of_distance(tree):
                proved += 1
                values = [evaluated(tree, each, tensors(), VALUES) for each in (given, beyond(given, 37))]
                assert not differs(*values), f"seed {seed}: {text_of(tree)}"
    assert proved > 40


def test_random_trees_of_a_distance_are_found() -> None:
    """But for what lies beyond: integers of 64 bits, and comparisons that may wrap."""
    missed, all_of_them = 0, 0
    for seed in SEEDS:
        tree = RandomTrees(seed).tree(INT32, 3).tree
        made = moved(tree, DISTANCE, FURTHER)
        if {"query", "key"} & {each.value for each in (QUERY, KEY) if each in _below(made)}:
            all_of_them += 1
            missed += not is_of_distance(made)
    assert all_of_them > 40
    assert missed < all_of_them / 5


def _below(tree: Expression) -> set[Expression]:
    found, stack = set(), [tree]
    while stack:
        each = stack.pop()
        found.add(each)
        stack.extend(operand for operand in each.operands if operand not in found)
    return found


def test_loads_of_a_tree_are_its_own() -> None:
    tree = added(OF_DISTANCE["a-table"])
    assert list(lines_of(tree)) == loads_of(tree)
