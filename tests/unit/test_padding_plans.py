"""A padding mask whose axes nobody makes where a call is like the one before: what is looked at, what a plan is made of, what runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.api import attention
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import Given, given_modifiers
from flashgen.launch.arguments import check_call
from flashgen.launch.asked import MASK_NAME, OF_KEYS, asked, with_made_axes
from flashgen.launch.keywords import modified_of_call
from flashgen.launch.private_names import knows_tensors
from flashgen.operators import plans

LEN_Q = LEN_KV = BATCH = 4  # so that a mask of queries and keys has the shape of a padding mask
Q, K, V = (torch.zeros(BATCH, LEN_Q, 2, 64, dtype=torch.bfloat16) for _ in "qkv")
PADDING = torch.rand(BATCH, LEN_KV) < 0.5
SLOPES, BIAS = torch.ones(2), torch.zeros(LEN_Q, LEN_KV)


def told(**keywords: Any) -> Any:
    """What operators are told, and the same as `asked` gives it."""
    given = {**dict.fromkeys(("window", "softcap", "alibi_slopes", "sinks")), **keywords}
    _, modified, known = modified_of_call(False, **given, top_left=0, q=Q)
    return modified, known


@pytest.mark.parametrize("beside", [{}, {"alibi_slopes": SLOPES, "bias": BIAS, "chunk": 3, "softcap": 5.0, "dropout_p": 0.5}])
def test_a_mask_waits_for_its_axes_where_nobody_keeps_it(beside: dict[str, Any]) -> None:
    (text, sizes, numbers, tensors), known = told(key_padding_mask=PADDING, **beside)
    assert OF_KEYS not in (text, *known.names)
    with torch.no_grad():
        (same, *_, waiting), other = told(key_padding_mask=PADDING, **beside)
    assert same == text
    assert sum(tensor is PADDING for tensor in waiting) == 1
    made, with_axes = with_made_axes(other, waiting)
    assert made == known == asked(text, sizes, numbers, tensors)[0]
    assert [(tensor.shape, tensor.stride()) for tensor in with_axes] == [(tensor.shape, tensor.stride()) for tensor in tensors]
    assert [tensor.data_ptr() for tensor in with_axes] == [tensor.data_ptr() for tensor in waiting]


class Number(float):
    """A number of a type that is not remembered, as NumPy's float64 is."""


@torch.no_grad()
def test_it_waits_beside_numbers_of_other_types() -> None:
    (text, *_, waiting), known = told(key_padding_mask=PADDING, softcap=Number(5.0))
    made, (mask,) = with_made_axes(known, waiting)
    assert made == given_modifiers(text, (), (5.0,))
    assert mask.shape == (BATCH, 1, 1, LEN_KV)


@torch.no_grad()
@pytest.mark.parametrize("beside", [{"mask": PADDING}, {"mask_mod": lambda b, h, q, k: q != k}])
def test_beside_another_mask_or_functions_it_does_not_wait(beside: dict[str, Any]) -> None:
    (text, *_, tensors), known = told(key_padding_mask=PADDING, **beside, call=((BATCH, 2, LEN_Q, LEN_KV), Q, None))
    assert MASK_NAME in text
    assert known is None or OF_KEYS not in known.names
    assert not any(tensor is PADDING for tensor in tensors)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What plans are made of, and what they run."""
    seen: list[tuple[Any, ...]] = []

    def plan(*arguments: Any) -> Any:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool, *tensors: torch.Tensor) -> Any:
            seen.append(("runs", *tensors))
            return len(seen), None

        seen.append(("made", *arguments[6:]))
        return SimpleNamespace(run=run, bound=None, met=True, before=None, before_differentiable=None)

    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    monkeypatch.setattr(plans, "Plan", plan)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return seen


@torch.no_grad()
def test_a_plan_is_made_of_the_mask_with_its_axes_and_runs_without(runs: list[tuple[Any, ...]]) -> None:
    for _ in range(3):
        attention(Q, K, V, key_padding_mask=PADDING)
    (_, modifiers, (mask,)), *others = runs
    assert modifiers == given_modifiers(MASK_NAME)
    assert mask.shape == (BATCH, 1, 1, LEN_KV)
    assert [what[0] for what in others] == ["runs"] * 3
    assert all(what[1] is PADDING for what in others)


@torch.no_grad()
def test_a_plan_that_refuses_its_axes_is_told_of_by_the_name_of_the_mask(
    runs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "Plan", check_call)
    with pytest.raises(ArgumentError, match=rf"^key_padding_mask must have the shape .* = \({BATCH}, {LEN_KV}\), .*; got \({BATCH}, 3\)$"):
        attention(Q, K, V, key_padding_mask=PADDING[:, :3])
    with pytest.raises(ArgumentError, match=r"^mask must have the shape "):
        attention(Q, K, V, mask=PADDING[:, :3], key_padding_mask=PADDING[:, :1])


@torch.no_grad()
def test_a_mask_of_the_same_shape_is_another_call(runs: list[tuple[Any, ...]]) -> None:
    for _ in range(3):
        attention(Q, K, V, key_padding_mask=PADDING)
        attention(Q, K, V, mask=PADDING)
        attention(Q, K, V, mask=PADDING[:, None, None])
    made = [what[2][0].shape for what in runs if what[0] == "made"]
    assert made == [(BATCH, 1, 1, LEN_KV), (LEN_Q, LEN_KV)], "a mask with its axes has the plan of a padding mask"
    assert [tuple(what[1].shape) for what in runs if what[0] == "runs"] == [(4, 4), (4, 4), (4, 1, 1, 4)] * 3


@torch.no_grad()
@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
def test_a_call_like_the_one_before_makes_no_axes(runs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        attention(Q, K, V, key_padding_mask=PADDING)
    monkeypatch.setattr(plans, "with_made_axes", None)
    attention(Q, K, V, key_padding_mask=PADDING.clone())
    assert runs[-1][1].shape == (BATCH, LEN_KV)


def test_its_name_stands_where_the_name_of_a_mask_does() -> None:
    given = Given(("alibi", OF_KEYS, "window"), (("window_left", 1), ("window_right", 2)))
    made, tensors = with_made_axes(given, (SLOPES, PADDING))
    assert made == given._replace(names=("alibi", MASK_NAME, "window"))
    assert tensors[0] is SLOPES
    assert tensors[1].shape == (BATCH, 1, 1, LEN_KV)
