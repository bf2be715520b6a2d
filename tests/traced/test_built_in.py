"""Which forms of functions are a softcap, ALiBi, a bias or a mask in memory, and which look like one and are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.codegen.expressions.built_in import added_forms, mask_form, replaced, softcap_form
from flashgen.codegen.expressions.canonical_text import text_of
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, SCORE, Expression, constant
from flashgen.traced.modifier import modifier_in_call

Function = Callable[..., Any]
SLOPES, BATCH_SLOPES, HALVES = torch.rand(4), torch.rand(2, 4), torch.rand(4, dtype=torch.bfloat16)
BIAS, MASK, TABLE = torch.rand(2, 4, 8, 8), torch.ones(2, 4, 8, 8, dtype=torch.bool), torch.rand(4, 20)
CAP, OTHER, AHEAD, HEADS = 30.0, 20.0, 5, 4
EXPONENTIAL, HALVED = "exp2(neg(div(mul(float32(head), 8.0), n0:float32)))", "exp2(neg(div(float32(head), n0:float32)))"


def score(function: Function) -> Expression:
    tree = modifier_in_call(function).modifier.score
    assert tree is not None
    return tree


def mask(function: Function) -> Expression:
    tree = modifier_in_call(mask_mod=function).modifier.mask
    assert tree is not None
    return tree


@pytest.mark.parametrize(
    ("function", "cap", "factor", "divisor", "rest"),
    [
        (lambda s, b, h, q, k: 50 * torch.tanh(s / 50), "50.0", None, "50.0", "score"),
        (lambda s, b, h, q, k: (s / CAP).tanh() * CAP, "n0:float32", None, "n0:float32", "score"),
        (lambda s, b, h, q, k: CAP * torch.tanh(s * (1 / CAP)), "n1:float32", "n0:float32", None, "score"),
        (lambda s, b, h, q, k: 8.0 * torch.tanh(s / 8.0), "8.0", "0.125", None, "score"),
        (lambda s, b, h, q, k: torch.tensor(50.0) * torch.tanh(s / torch.tensor(50.0)), "50.0", None, "50.0", "score"),
        (lambda s, b, h, q, k: torch.mul(torch.tanh(torch.div(s, CAP)), CAP), "n0:float32", None, "n0:float32", "score"),
        (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) + HALVES[h], "n0:float32", None, "n0:float32", "add(score, t0:bf16[head])"),
        (
            lambda s, b, h, q, k: torch.where(q < k, 0, CAP * torch.tanh(s / CAP)),
            "n0:float32",
            None,
            "n0:float32",
            "where(le(key, query), score, 0.0)",
        ),
        (lambda s, b, h, q, k: CAP * torch.tanh(s / OTHER), "n1:float32", None, "n0:float32", "score"),  # the numbers say whether it is one
    ],
)
def test_softcaps(function: Function, cap: str, factor: str | None, divisor: str | None, rest: str) -> None:
    tree = score(function)
    found = softcap_form(tree)
    assert found is not None
    assert [each and text_of(each) for each in found[1:]] == [cap, factor, divisor]
    assert text_of(replaced(tree, found.node, SCORE)) == rest


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: torch.tanh(s),
        lambda s, b, h, q, k: CAP * torch.tanh((s + 1) / CAP),
        lambda s, b, h, q, k: CAP * torch.tanh(q / CAP) + s,
        lambda s, b, h, q, k: CAP * torch.sigmoid(s / CAP),
        lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) + s,
        lambda s, b, h, q, k: CAP * torch.tanh(-(s / CAP)),
        lambda s, b, h, q, k: CAP * torch.tanh(CAP / s),
        lambda s, b, h, q, k: SLOPES[h] * torch.tanh(s / SLOPES[h]),
    ],
)
def test_no_softcaps(function: Function) -> None:
    assert softcap_form(score(function)) is None


@pytest.mark.parametrize(
    ("function", "slope", "offset", "is_absolute", "rest"),
    [
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), "t0:fp32[head]", "0", True, "score"),
        (lambda s, b, h, q, k: s + SLOPES[h] * -(k - q).abs(), "t0:fp32[head]", "0", True, "score"),
        (lambda s, b, h, q, k: s + (k - q) * SLOPES[h], "t0:fp32[head]", "0", False, "score"),
        (lambda s, b, h, q, k: s - abs(q + AHEAD - k) * BATCH_SLOPES[b, h], "t0:fp32[batch, head]", "n0:int32", True, "score"),
        (lambda s, b, h, q, k: s - abs(k - q - 3) * SLOPES[h], "t0:fp32[head]", "3", True, "score"),
        (lambda s, b, h, q, k: s + SLOPES[h] * (k - q) + TABLE[h, 9], "t1:fp32[head]", "0", False, "add(score, t0:fp32[head, 9])"),
        (lambda s, b, h, q, k: s + (TABLE[h, q] - SLOPES[h] * abs(k - q)), "t1:fp32[head]", "0", True, "add(score, t0:fp32[head, query])"),
        (lambda s, b, h, q, k: s + 0.5 * (q - k).abs(), "-0.5", "0", True, "score"),
        (lambda s, b, h, q, k: s - (q - k).abs(), "1.0", "0", True, "score"),
        (lambda s, b, h, q, k: s + torch.exp2(-(h * 8.0 / HEADS)) * (k - q), EXPONENTIAL, "0", False, "score"),
        (lambda s, b, h, q, k: s + 2.0 ** (-h / HEADS) * (q - k).abs() * -0.5, f"mul({HALVED}, 0.5)", "0", True, "score"),
    ],
)
def test_alibi(function: Function, slope: str, offset: str, is_absolute: bool, rest: str) -> None:
    tree = score(function)
    found, bias = added_forms(tree)
    assert bias is None
    assert found is not None
    assert (text_of(found.slope), text_of(found.offset), found.is_absolute) == (slope, offset, is_absolute)
    assert text_of(replaced(tree, found.node, constant(0.0, FLOAT32))) == rest


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + SLOPES[h] * (q - k).abs(),
        lambda s, b, h, q, k: s + SLOPES[h] * (q - k),
        lambda s, b, h, q, k: s - HALVES[h] * (q - k).abs(),
        lambda s, b, h, q, k: s - SLOPES[b] * (q - k).abs(),
        lambda s, b, h, q, k: s - SLOPES[h // 2] * (q - k).abs(),
        lambda s, b, h, q, k: s - BATCH_SLOPES[h, b] * (q - k).abs(),
        lambda s, b, h, q, k: s - BATCH_SLOPES[0, h] * (q - k).abs(),
        lambda s, b, h, q, k: s - SLOPES[h] * (2 * q - k).abs(),
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k + h).abs(),
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() * (q - k).abs(),
        lambda s, b, h, q, k: s - 2 * SLOPES[h] * (q - k).abs(),
        lambda s, b, h, q, k: s - (b + 1) * (q - k).abs(),
        lambda s, b, h, q, k: 2 * s - SLOPES[h] * (q - k).abs(),
        lambda s, b, h, q, k: torch.relu(s - SLOPES[h] * (q - k).abs()),
        lambda s, b, h, q, k: (x := SLOPES[h] * (q - k).abs()) * TABLE[h, k] - x + s,  # it is more than added
    ],
)
def test_no_alibi(function: Function) -> None:
    assert added_forms(score(function)) == (None, None)


@pytest.mark.parametrize(
    ("function", "axes", "rest"),
    [
        (lambda s, b, h, q, k: s + BIAS[b, h, q, k], (0, 1, 2, 3), "score"),
        (lambda s, b, h, q, k: BIAS[b][h, q.long(), k] + s, (0, 1, 2, 3), "score"),
        (lambda s, b, h, q, k: s + TABLE[q, k], (2, 3), "score"),
        (lambda s, b, h, q, k: s + TABLE[k, h] + k, (3, 1), "add(score, float32(key))"),
        (lambda s, b, h, q, k: s + TABLE[h, k] + TABLE[h, q], (1, 3), "add(score, t0:fp32[head, query])"),
    ],
)
def test_biases(function: Function, axes: tuple[int, ...], rest: str) -> None:
    tree = score(function)
    _, found = added_forms(tree)
    assert found is not None
    assert found.axes == axes
    assert text_of(replaced(tree, found.node, constant(0.0, FLOAT32))) == rest


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s - BIAS[b, h, q, k],
        lambda s, b, h, q, k: s + 2 * BIAS[b, h, q, k],
        lambda s, b, h, q, k: s * BIAS[b, h, q, k],
        lambda s, b, h, q, k: s + BIAS[b, h, q, k + 1],
        lambda s, b, h, q, k: s + BIAS[b, h, k, k],
        lambda s, b, h, q, k: s + BIAS[0, h, q, k],
        lambda s, b, h, q, k: s + TABLE[h, q],
        lambda s, b, h, q, k: s + MASK[b, h, q, k],
    ],
)
def test_no_biases(function: Function) -> None:
    assert added_forms(score(function)) == (None, None)


def test_masks_in_memory() -> None:
    found = mask_form(mask(lambda b, h, q, k: MASK[b, h, q, k]))
    assert found is not None
    assert found.axes == (0, 1, 2, 3)
    tree = mask(lambda b, h, q, k: (q % 3 != 0) & MASK[b][0, q, k] & (MASK[0, 0, k, q] | (h == 1)))
    assert mask_form(tree) is None
    tree = mask(lambda b, h, q, k: (q % 3 != 0) & MASK[b, h, q, k])
    found = mask_form(tree)
    assert found is not None
    assert text_of(replaced(tree, found.node, constant(True, BOOL))) == "ne(mod(query, 3), 0)"
    assert mask_form(mask(lambda b, h, q, k: MASK[b, h, q, k] | (q == k))) is None
    assert mask_form(mask(lambda b, h, q, k: ~MASK[b, h, q, k])) is None
