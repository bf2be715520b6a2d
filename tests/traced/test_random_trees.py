"""Random expressions: simplified and printed, they have the values that they had as they were written, NaN and infinities among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashgen.codegen.expressions.bounds import range_of_type, ranges_of
from flashgen.codegen.expressions.canonical_text import parse_tree, text_of
from flashgen.codegen.expressions.numbering import numbered, with_names
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, INT32, INT64, loads_of, numbers_of
from flashgen.traced.evaluation import evaluated
from tests.support.random_trees import NUMBERS, TENSORS, RandomTrees, value_as_written
from tests.support.traced_values import CxxValues, random_inputs, random_tensor

TYPES = (FLOAT32, INT32, BOOL, INT64)
COUNT, SEEDS = 40, range(200)
COMPILED = SEEDS[::5]
VALUES = {"n0": -1.75, "n1": 3 - 2**30}


def inputs() -> dict[str, Tensor]:
    made = random_inputs(COUNT, {"batch": 3, "head": 5, "query": 2**29 - 1, "key": 40}, seed=3)
    made["score"][:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0])
    made["query"][::2] %= 40
    return made


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = {name: random_tensor(dtype, (size,), generator) for name, (dtype, size) in TENSORS.items()}
    made["t0"][:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    made["t1"][:3] = torch.tensor([2**31 - 1, -(2**31), -1])
    made["t2"][:3] = torch.tensor([2**63 - 1, -(2**63), -(2**31)])
    made["t4"][0] = 255
    return made


def written(seed: int):  # type: ignore[no-untyped-def]
    return RandomTrees(seed).tree(TYPES[seed % 4], 2 + seed % 5)


def differs(found: Tensor, wanted: Tensor) -> bool:
    return not torch.allclose(found.expand(COUNT).double(), wanted.expand(COUNT).double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("part", range(4))
def test_simpler_trees_have_the_same_value(part: int) -> None:
    given = inputs(), tensors(), VALUES
    for seed in SEEDS[part::4]:
        each = written(seed)
        assert not differs(evaluated(each.tree, *given), value_as_written(each, *given)), f"seed {seed}: {text_of(each.tree)}"


def test_integers_are_in_their_ranges() -> None:
    given = inputs(), tensors(), VALUES
    tight = 0
    for seed in SEEDS:
        for node, (low, high) in ranges_of(written(seed).tree).items():
            if node.type is not BOOL:
                values = evaluated(node, *given)
                assert low <= values.min().item(), (seed, text_of(node))
                assert values.max().item() <= high, (seed, text_of(node))
                tight += (low, high) != range_of_type(node.type)
    assert tight > 100, "ranges say something"


def test_texts_are_trees() -> None:
    for seed in SEEDS:
        tree = written(seed).tree
        assert parse_tree(text_of(tree)) is tree, seed
        names = numbered([tree]).trees[0]
        assert parse_tree(text_of(names)) is names, seed


def test_names_follow_from_the_tree() -> None:
    """Whatever names tensors and numbers had before, most trees get the same ones, and all get names that stay."""
    same = 0
    for seed in SEEDS:
        tree = written(seed).tree
        swapped = with_names([tree], {name: f"t{9 - int(name[1])}" for name in TENSORS})
        done = numbered([tree]), numbered(swapped)
        same += done[0].trees == done[1].trees
        for each in done:
            assert numbered(each.trees).trees == each.trees, seed
        for given, each in ((tree, done[0]), (swapped[0], done[1])):
            names = {former: f"t{i}" for i, former in enumerate(each.tensors)} | {former: f"n{i}" for i, former in enumerate(each.numbers)}
            assert with_names([given], names) == [*each.trees], seed
    assert same >= 0.9 * len(SEEDS)


def test_cxx_has_the_same_value(tmp_path_factory: pytest.TempPathFactory) -> None:
    trees = {seed: written(seed).tree for seed in COMPILED}
    cxx = CxxValues(tmp_path_factory.mktemp("random"), {f"seed{seed}": {"value": tree} for seed, tree in trees.items()})
    captured = tensors()
    assert set(NUMBERS) == set(VALUES)
    for seed, tree in trees.items():
        own = sorted({load.value.tensor for load in loads_of(tree)})
        numbers = sorted({each.value for each in numbers_of(tree)})
        values = cxx(f"seed{seed}", "value", inputs(), [captured[name] for name in own], [VALUES[name] for name in numbers])
        assert not differs(values, evaluated(tree, inputs(), captured, VALUES)), f"seed {seed}: {text_of(tree)}"
