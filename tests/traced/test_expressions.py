"""Expressions: which functions are one text, what texts and nodes refuse, and the forms that kernels have faster ways for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.blocks import block_parts
from flashgen.codegen.expressions.bounds import NUMBER_LIMIT
from flashgen.codegen.expressions.build import apply, less
from flashgen.codegen.expressions.canonical_text import parse_tree, text_of
from flashgen.codegen.expressions.cxx import printed
from flashgen.codegen.expressions.derivative import derivative
from flashgen.codegen.expressions.recognition import added_term, scaled_and_added, visible_window
from flashgen.codegen.expressions.tree import (
    FLOAT32,
    HEAD,
    INT32,
    KEY,
    QUERY,
    SCORE,
    Expression,
    constant,
    depends_on,
    input_node,
    load_node,
    number_node,
)
from flashgen.traced.evaluation import evaluated
from flashgen.traced.modifier import modifier_in_call

SLOPES, BATCH_SLOPES, HALVES = torch.rand(4), torch.rand(2, 4), torch.rand(4, dtype=torch.bfloat16)
IDS = torch.zeros(8, dtype=torch.int32)
BYTES = torch.zeros(8, dtype=torch.uint8)
W, SCALE = 7, 0.3
Function = Callable[..., Any]


def score(function: Function) -> Expression:
    tree = modifier_in_call(function).modifier.score
    assert tree is not None
    return tree


def mask(function: Function) -> Expression:
    tree = modifier_in_call(mask_mod=function).modifier.mask
    assert tree is not None
    return tree


SAME_SCORES: list[tuple[Function, ...]] = [
    (
        lambda s, b, h, q, k: s,
        lambda s, b, h, q, k: s + 0,
        lambda s, b, h, q, k: s * 1,
        lambda s, b, h, q, k: torch.neg(-s),
        lambda s, b, h, q, k: s / 1.0,
    ),
    (lambda s, b, h, q, k: s - SLOPES[h], lambda s, b, h, q, k: -SLOPES[h] + s, lambda s, b, h, q, k: -(SLOPES[h] - s)),
    (
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
        lambda s, b, h, q, k: torch.abs(k - q) * -SLOPES[h] + s,
        lambda s, b, h, q, k: s + (-torch.abs(q - k).float()) * SLOPES[h],
        lambda s, b, h, q, k: torch.sub(s, torch.mul((k - q).float().abs(), SLOPES[h])),
    ),
    (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), lambda s, b, h, q, k: s - (q - k) * SLOPES[h]),
    (lambda s, b, h, q, k: s / 4, lambda s, b, h, q, k: s * 0.25, lambda s, b, h, q, k: 0.5**2 * s),
    (lambda s, b, h, q, k: s**2, lambda s, b, h, q, k: s * s, lambda s, b, h, q, k: s.square(), lambda s, b, h, q, k: torch.pow(-s, 2)),
    (
        lambda s, b, h, q, k: torch.where(q < k, -1.0, s),
        lambda s, b, h, q, k: torch.where(~(q < k), s, -1),
        lambda s, b, h, q, k: s.masked_fill(k > q, -1),
    ),
    (lambda s, b, h, q, k: s + (q - k + 3), lambda s, b, h, q, k: (1 - k + q + 2) + s, lambda s, b, h, q, k: s - (k - 3 - q)),
    (lambda s, b, h, q, k: s + BATCH_SLOPES[b, h] * SLOPES[h], lambda s, b, h, q, k: SLOPES[h] * BATCH_SLOPES[b][h] + s),
]
SAME_MASKS: list[tuple[Function, ...]] = [
    (
        *(lambda b, h, q, k: q >= k, lambda b, h, q, k: k <= q, lambda b, h, q, k: q - k >= 0, lambda b, h, q, k: ~(k > q)),
        *(
            lambda b, h, q, k: k - q < 1,
            lambda b, h, q, k: k < q + 1,
            lambda b, h, q, k: torch.logical_not(q < k),
            lambda b, h, q, k: 2 * q >= k + q,
        ),
    ),
    (
        *(
            lambda b, h, q, k: (q - k <= W) & (k <= q),
            lambda b, h, q, k: (q >= k) & (k >= q - W),
            lambda b, h, q, k: (k - q >= -W) & (q - k >= 0),
        ),
        lambda b, h, q, k: (q >= k) & (q >= k) & (q - k < W + 1) & True,
    ),
    (lambda b, h, q, k: IDS[q] == IDS[k], lambda b, h, q, k: IDS[k] == IDS[q], lambda b, h, q, k: ~(IDS[q] != IDS[k])),
    (lambda b, h, q, k: (q == k) | (k == 0), lambda b, h, q, k: torch.logical_or(k == 0, q - k == 0)),
]
DIFFERENT: list[tuple[Function, Function]] = [
    (lambda s, b, h, q, k: s * 0, lambda s, b, h, q, k: s - s),
    (lambda s, b, h, q, k: s * 0, lambda s, b, h, q, k: torch.zeros(())),
    (lambda s, b, h, q, k: torch.where(s < 1, s, 0), lambda s, b, h, q, k: torch.where(s >= 1, 0, s)),  # of NaN
    (lambda s, b, h, q, k: (s + 1e8) - 1e8, lambda s, b, h, q, k: s),
    (lambda s, b, h, q, k: s + SLOPES[q % 4], lambda s, b, h, q, k: s),
    (lambda s, b, h, q, k: s * 1e30 * 1e-30, lambda s, b, h, q, k: s),
    (lambda s, b, h, q, k: s + HALVES[h], lambda s, b, h, q, k: s + SLOPES[h]),
    (lambda s, b, h, q, k: torch.maximum(s, -s), lambda s, b, h, q, k: s.abs()),
]


@pytest.mark.parametrize("functions", SAME_SCORES)
def test_scores_of_one_text(functions: tuple[Function, ...]) -> None:
    assert len({text_of(score(function)) for function in functions}) == 1, [text_of(score(function)) for function in functions]


@pytest.mark.parametrize("functions", SAME_MASKS)
def test_masks_of_one_text(functions: tuple[Function, ...]) -> None:
    assert len({text_of(mask(function)) for function in functions}) == 1, [text_of(mask(function)) for function in functions]


@pytest.mark.parametrize("pair", DIFFERENT)
def test_what_may_differ_is_another_text(pair: tuple[Function, Function]) -> None:
    assert text_of(score(pair[0])) != text_of(score(pair[1]))


def test_comparisons_that_may_wrap_stay_as_they_are() -> None:
    """Where a sum of 32 bits may wrap, moving terms to the other side changes what it says."""
    least = load_node("t0", "int32", ())
    first, second, third = (number_node(f"n{i}", INT32) for i in range(3))
    below = apply("le", less(QUERY, least), KEY)
    assert text_of(below) == "le(add(query, neg(t0:int32[])), key)"
    values = {"query": torch.tensor(5), "key": torch.tensor(7)}
    assert evaluated(below, values, {"t0": torch.tensor(-(2**31))}).item() is True
    sums = apply("le", less(QUERY, first), less(second, KEY))
    numbers = {"n0": NUMBER_LIMIT, "n1": NUMBER_LIMIT, "n2": 0}
    assert evaluated(sums, values, None, numbers).item() is True
    wraps = apply("le", apply("add", apply("add", first, second), QUERY), apply("add", first, third))
    assert evaluated(wraps, values, None, numbers).item() is True


def test_rows_are_not_dropped() -> None:
    """What depends on the row alone does not change the softmax, but it does change lse."""
    assert depends_on(score(lambda s, b, h, q, k: s + q)) == {"score", "query"}


def test_text_is_as_documented() -> None:
    tree = score(lambda s, b, h, q, k: (s - SLOPES[h] * (x := (q - k).float())) * x)
    assert text_of(tree) == "x0 = float32(add(query, neg(key))); mul(x0, add(score, neg(mul(t0:fp32[head], x0))))"
    assert text_of(constant(0.1, FLOAT32)) == "0.1"
    assert (
        text_of(apply("lt", number_node("n0", INT32), load_node("t0", "int8", (QUERY, constant(-1, INT32)))))
        == "lt(n0:int32, t0:int8[query, -1])"
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "score score",
            "add(score)",
            "add(score, key)",
            "foo(score)",
            "x0 = ; score",
            "t0:fp99[head]",
            "t0:fp32[score]",
            "add(score,",
            "n0",
        ),
        *(
            "n0:float64",
            "99999999999",
            "t0:fp32[head",
            "n0:bool",
            "x1 = score; x2",
            "1e",
            "!",
            "where(score, score, score)",
            "t0:fp32[head,head,head,head,head]",
        ),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="must"):
        parse_tree(text)


def test_deep_trees_have_texts() -> None:
    tree = SCORE
    for i in range(3000):
        tree = apply("add", apply("tanh", tree), constant(float(i), FLOAT32))
    assert parse_tree(text_of(tree)) is tree
    assert derivative(tree, SCORE) is derivative(tree, SCORE)
    assert max(map(len, printed([tree]).statements)) < 400


def test_shared_parts_do_not_multiply() -> None:
    tree = SCORE
    for _ in range(200):
        tree = apply("mul", apply("add", tree, constant(1.0, FLOAT32)), tree)
    assert len(text_of(tree)) < 20_000
    assert len(text_of(derivative(tree, SCORE))) < 80_000
    assert parse_tree(text_of(tree)) is tree


def test_equal_nodes_are_one_object_for_ever() -> None:
    tree = less(SCORE, constant(0.5, FLOAT32))
    assert copy.deepcopy(tree) is tree
    assert pickle.loads(pickle.dumps(tree)) is tree
    with pytest.raises(AttributeError, match="does not change"):
        tree.operation = "mul"
    assert constant(0.0, FLOAT32) is not constant(-0.0, FLOAT32)
    assert constant(1, INT32) is not constant(1.0, FLOAT32)
    assert constant(float("nan"), FLOAT32) is constant(-float("nan"), FLOAT32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: apply("add", SCORE, QUERY),
        lambda: apply("nothing", SCORE),
        lambda: apply("add", SCORE),
        lambda: apply("where", SCORE, SCORE, SCORE),
        lambda: constant(2**31, INT32),
        lambda: load_node("t0", "fp64", ()),
        lambda: load_node("t0", "fp32", (SCORE,)),
        lambda: load_node("t0", "fp32", (HEAD,) * 5),
        lambda: input_node("value"),
        lambda: derivative(QUERY, SCORE),
        lambda: derivative(SCORE, QUERY),
    ],
)
def test_wrong_nodes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError, match="must"):
        make()


def test_ties_are_as_documented() -> None:
    bias = load_node("t0", "fp32", (HEAD,))
    tie = text_of(derivative(apply("max", SCORE, bias), SCORE))
    assert tie == "x0 = t0:fp32[head]; where(lt(x0, score), 1.0, where(lt(score, x0), 0.0, 0.5))"
    assert text_of(derivative(apply("max", SCORE, constant(2.0, FLOAT32)), SCORE)) == "where(le(2.0, score), 1.0, 0.0)"
    assert text_of(derivative(apply("min", SCORE, number_node("n0", FLOAT32)), SCORE)) == "where(le(score, n0:float32), 1.0, 0.0)"


def test_forms_of_scores() -> None:
    assert added_term(score(lambda s, b, h, q, k: s)) is constant(0.0, FLOAT32)
    added = added_term(score(lambda s, b, h, q, k: 1 + s + SLOPES[h]))
    assert added is not None
    assert depends_on(added) == {"head"}
    assert added_term(score(lambda s, b, h, q, k: s * 2)) is None
    assert added_term(score(lambda s, b, h, q, k: s + s)) is None
    assert added_term(score(lambda s, b, h, q, k: torch.where(q >= k, s, 0.0))) is None
    scaled = scaled_and_added(score(lambda s, b, h, q, k: SLOPES[h] - s / 3 * 1))
    assert scaled is not None
    assert scaled[0].value == pytest.approx(-1 / 3)
    assert depends_on(scaled[1]) == {"head"}
    assert scaled_and_added(score(lambda s, b, h, q, k: s * SLOPES[h])) is None
    assert scaled_and_added(score(lambda s, b, h, q, k: torch.zeros(()))) is None


@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (lambda b, h, q, k: q >= k, None, "0"),
        (lambda b, h, q, k: q > k, None, "-1"),
        (lambda b, h, q, k: k >= q - 5, "5", None),
        (lambda b, h, q, k: (q >= k) & (q - k < 6), "5", "0"),
        (lambda b, h, q, k: (q - k).abs() < W, "add(n0:int32, -1)", "add(n0:int32, -1)"),
        (lambda b, h, q, k: (k - q).abs() <= 3, "3", "3"),
        (lambda b, h, q, k: q == k, "0", "0"),
        (lambda b, h, q, k: q + 2 == k, "-2", "2"),
        (lambda b, h, q, k: (q - k <= W) & (k - q <= 2 * W) & (q - k <= 4), "min(n1:int32, 4)", "n0:int32"),
    ],
)
def test_windows(function: Function, left: str | None, right: str | None) -> None:
    found = visible_window(mask(function))
    assert [None if end is None else text_of(end) for end in (found.left, found.right)] == [left, right]
    assert found.rest is None
    assert found.is_causal == (left is None and right == "0")


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: IDS[q] == IDS[k],
        lambda b, h, q, k: 2 * q >= k,
        lambda b, h, q, k: q + k <= 5,
        lambda b, h, q, k: q - k <= h,
        lambda b, h, q, k: q - k <= IDS[h],
        lambda b, h, q, k: (q - k <= 4) | (k == 0),
        lambda b, h, q, k: q - k != 0,
        lambda b, h, q, k: q <= 5,
        lambda b, h, q, k: (q - k) * 1.0 <= 4,
        lambda b, h, q, k: True,
    ],
)
def test_no_windows(function: Function) -> None:
    found = visible_window(mask(function))
    assert found.rest is not None or (found.left is None and found.right is None)


def test_a_window_beside_other_conditions() -> None:
    found = visible_window(mask(lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k) & (h != 1)))
    assert found.right is constant(0, INT32)
    assert found.left is None
    assert not found.is_causal
    assert found.rest is not None
    assert depends_on(found.rest) == {"head", "query", "key"}


def test_parts_that_are_the_same_in_blocks() -> None:
    tree = mask(
        lambda b, h, q, k: (IDS[q // 32] == IDS[k // 48]) | ((SLOPES[h] > 1) & (IDS[k // 96] < k) & (IDS[q // 100] > IDS[-(k // 64)]))
    )
    found = block_parts(tree)
    texts = [
        "lt(1.0, t1:fp32[head])",
        "eq(t0:int32[floor_div(key, 48)], t0:int32[floor_div(query, 32)])",
        "t0:int32[floor_div(key, 96)]",
        "t0:int32[neg(floor_div(key, 64))]",
    ]
    assert sorted(text_of(each) for each in found.parts) == sorted(texts)
    assert found.sizes == (32, 16)
    assert block_parts(mask(lambda b, h, q, k: q // 8 == k // 8)).parts == ()
    assert block_parts(mask(lambda b, h, q, k: q // 64 == k // 32)).sizes == (64, 32)


def test_statements_are_shared() -> None:
    tree = score(lambda s, b, h, q, k: 30 * torch.tanh(s / 30))
    both = printed([tree, derivative(tree, SCORE)])
    assert both.statements == ("const float x0 = tanhf(score / 30.0f);",)
    assert both.results == ("x0 * 30.0f", "-x0 * x0 + 1.0f")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, b, h, q, k: s - (q - (k - 3)), "score - static_cast<float>(query - key + 3)"),
        (lambda s, b, h, q, k: s - (s - 1) * 2 / (s + 3), "score - (score - 1.0f) * 2.0f / (score + 3.0f)"),
        (
            lambda s, b, h, q, k: torch.where((q > 1) & ((k > 2) | (h == 1)), s, -float("inf")),
            "2 <= query && (head == 1 || 3 <= key) ? score : -infinity()",
        ),
        (
            lambda s, b, h, q, k: s / (s * (s + 2)) - (s - q) % 3,
            "score / (score * (score + 2.0f)) - floor_mod(score - static_cast<float>(query), 3.0f)",
        ),
        (lambda s, b, h, q, k: s + BYTES[q].int() * 2**20, "score + static_cast<float>(t0.at(query) * 1048576)"),
        (lambda s, b, h, q, k: s + BYTES[q].int() * 2**24, "score + static_cast<float>(wrapped_mul(t0.at(query), 16777216))"),
        (lambda s, b, h, q, k: s + (SLOPES[h] + SLOPES[q % 4]), "score + (t0.at(query % 4) + t0.at(head))"),
        (lambda s, b, h, q, k: s + (k - IDS[q]), "score + static_cast<float>(wrapped_sub(key, t0.at(query)))"),
        (lambda s, b, h, q, k: s + k // (5 - q), "score + static_cast<float>(floor_div(key, -(query - 5)))"),
        (lambda s, b, h, q, k: s + k // (k - q), "score + static_cast<float>(floor_div(key, key - query))"),
        (lambda s, b, h, q, k: s - W * s, "score - score * n0"),
        (lambda s, b, h, q, k: s + -SCALE * s, "score - score * n0"),
        (lambda s, b, h, q, k: s + q * q, "score + static_cast<float>(wrapped_mul(query, query))"),
        (lambda s, b, h, q, k: s + (h * 8 & 6 | 1), "score + static_cast<float>(head * 8 & 6 | 1)"),
        (lambda s, b, h, q, k: s + (q - k) // 2 % 4, "score + static_cast<float>(floor_mod(floor_div(query - key, 2), 4))"),
    ],
)
def test_cxx(function: Function, text: str) -> None:
    assert printed([score(function)]).results == (text,)


def test_key_is_an_input() -> None:
    assert KEY is input_node("key")
