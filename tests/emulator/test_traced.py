"""`score_mod` and `mask_mod`, on CPU tensors: results and gradients of traced functions, values that change, refusals, faults that show."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.workload import OPEN
from flashgen.launch import cpu
from flashgen.launch.keywords import modified_of_call
from tests.support.plan import few_of

Mod = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Mod | None, mask_mod: Mod | None) -> torch.Tensor:
    """In the tensors' own type, which autograd differentiates."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * q.shape[3] ** -0.5
    at = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*at), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v.repeat_interleave(group, 2))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.detach().double() - wanted.detach()).abs().max()) <= 2**-6 * max(1.0, float(wanted.detach().abs().max()))


BIAS, SLOPES = stacked(4, 200), torch.rand(4, generator=torch.Generator().manual_seed(1))
DOCUMENTS, KEY_DOCUMENTS = (torch.randint(2, (2, size), generator=torch.Generator().manual_seed(size)) for size in (33, 40))
FUNCTIONS: dict[str, tuple[Mod | None, Mod | None]] = {
    "relative-bias": (lambda score, b, h, q, k: score + BIAS[h, q - k + 100] * 0.5, None),
    "documents": (None, lambda b, h, q, k: (DOCUMENTS[b, q] == KEY_DOCUMENTS[b, k]) & (q >= k - 9)),
    "alibi-of-a-window": (lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(), lambda b, h, q, k: (q - k).abs() < 12),
    "no-keys": (None, lambda b, h, q, k: (q % 3 != 0) & (h < 3)),
}
BENT: dict[str, Mod] = {
    "tanh": lambda score, b, h, q, k: 3.0 * torch.tanh(score / 2.0),
    "gate": lambda score, b, h, q, k: torch.where(q >= k, score * SLOPES[h], score - 1.0),
}


@pytest.mark.parametrize("name", few_of(FUNCTIONS, "relative-bias", "documents"))
def test_results_and_gradients_are_those_of_float64(name: str) -> None:
    score_mod, mask_mod = FUNCTIONS[name]
    leaves = [t.requires_grad_() for t in (stacked(2, 33, 4, 16), stacked(2, 40, 2, 16, seed=1), stacked(2, 40, 2, 16, seed=2))]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    out = flashgen.attention(leaves[0], leaves[1], leaves[2], score_mod=score_mod, mask_mod=mask_mod)
    wanted = exact(doubles[0], doubles[1], doubles[2], score_mod, mask_mod)
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, leaves, into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True, True, True]


@pytest.mark.parametrize(("name", "behind"), few_of(itertools.product(BENT, (False, True)), ("gate", True)))
def test_scores_that_are_more_than_added_to(name: str, behind: bool) -> None:
    q = stacked(1, 33, 4, 16).requires_grad_()
    options: dict[str, Any] = {"softcap": 3.0, "bias": BIAS[:, None, :33].float()} if behind else {}
    double = q.detach().double().requires_grad_()
    bent, bias = BENT[name], BIAS[:, :33].double()
    mod: Mod = lambda s, b, h, q, k: bent(3 * torch.tanh(s / 3) + bias[h, k], b, h, q, k)  # noqa: E731
    out, wanted = flashgen.attention(q, q, q, score_mod=bent, **options), exact(double, double, double, mod if behind else bent, None)
    assert close(out, wanted)
    (found,), (right,) = torch.autograd.grad(out.float().sum(), q), torch.autograd.grad(wanted.sum(), double)
    assert close(found, right)


@pytest.mark.slow
def test_it_comes_behind_other_scores_and_before_other_masks() -> None:
    q = stacked(1, 33, 4, 16)
    options: dict[str, Any] = {"softcap": 2.0, "bias": BIAS[:, None, :33], "window": (20, 5), "sinks": SLOPES}
    out = flashgen.attention(q, q, q, score_mod=FUNCTIONS["relative-bias"][0], **options)
    of_relative = BIAS[:, torch.arange(33)[:, None] - torch.arange(33) + 100] * 0.5
    wanted = flashgen.attention(q, q, q, **{**options, "bias": (BIAS[:, None, :33] + of_relative).float()})
    assert close(out, wanted.double())
    bent = flashgen.attention(q, q, q, softcap=2.0, score_mod=lambda score, b, h, q, k: score.abs())
    assert close(bent, exact(*(q.double(),) * 3, lambda s, *at: (2 * torch.tanh(s / 2)).abs(), None))


def test_other_values_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, table, weight = stacked(1, 20, 2, 16), torch.randn(60), 1.0

    def call() -> torch.Tensor:
        return flashgen.attention(q, q, q, score_mod=lambda score, b, h, i, j: score + table[i - j + 30] * weight)

    first = call()

    def loaded(*_: Any) -> None:
        raise AssertionError("another kernel is loaded")

    monkeypatch.setattr(cpu, "load_emulated", loaded)
    table.mul_(2)
    second = call()
    table, weight = table / 2, 2.0
    assert torch.equal(call(), second)
    table = torch.stack([table, table])[0].repeat(2)[:60]
    weight = 1.0
    assert torch.equal(call(), first)


@pytest.mark.slow
def test_a_window_in_a_mask_mod_is_one() -> None:
    q, k, many = stacked(2, 33, 4, 16), stacked(2, 40, 4, 16), 12
    cases: list[tuple[Mod, dict[str, Any]]] = [
        (lambda b, h, q, k: q >= k, {"causal": "top_left"}),
        (lambda b, h, q, k: (q >= k) & (q - k <= many), {"window": (12 + 7, -7)}),
        (lambda b, h, q, k: k - q < 3, {"window": (None, 2 - 7)}),
    ]
    for mask_mod, options in cases:
        assert torch.equal(flashgen.attention(q, k, k, mask_mod=mask_mod), flashgen.attention(q, k, k, **options))
        _, modified, _ = modified_of_call(False, *(None,) * 10, 0.0, None, mask_mod, top_left=-7)
        assert "traced" not in (modified or ("",))[0]
    documents = FUNCTIONS["documents"][1]
    _, modified, _ = modified_of_call(False, *(None,) * 10, 0.0, None, documents, top_left=-7)
    assert modified
    assert modified[0].startswith("window,traced(mask: eq(")
    assert modified[1] == (OPEN, 9 - 7)
    prefix = torch.tensor([3, 40], dtype=torch.int32)
    beside = flashgen.attention(q, k, k, causal=True, prefix_len=prefix, mask_mod=cases[0][0])
    below = torch.arange(40) <= torch.arange(33)[:, None]
    assert torch.equal(beside, flashgen.attention(q, k, k, causal=True, prefix_len=prefix, mask=below))


def test_vmap_takes_what_does_not_look_at_the_batch() -> None:
    q = stacked(2, 16, 4, 16)

    def mapped(score_mod: Mod) -> torch.Tensor:
        found: torch.Tensor = torch.vmap(lambda q: flashgen.attention(q, q, q, score_mod=score_mod))(q[:, None])
        return found[:, 0]

    plus_bias: Mod = lambda score, b, h, q, k: score + BIAS[h, q - k + 100]  # noqa: E731
    assert torch.equal(mapped(plus_bias), flashgen.attention(q, q, q, score_mod=plus_bias))
    with pytest.raises(ArgumentError, match=r"looks at the batch must not be mapped by torch\.vmap"):
        mapped(lambda score, b, h, q, k: score + b)


def test_a_compiled_modifier_is_taken_for_its_functions() -> None:
    q = stacked(1, 33, 4, 16)
    score_mod, mask_mod = FUNCTIONS["alibi-of-a-window"]
    compiled = flashgen.compile_modifier(score_mod, mask_mod)
    assert torch.equal(flashgen.attention(q, q, q, score_mod=compiled), flashgen.attention(q, q, q, score_mod=score_mod, mask_mod=mask_mod))
    assert "struct Traced" in compiled.source


def plus_element(table: torch.Tensor, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + table[i]


def test_what_cannot_be_taken_is_refused() -> None:
    q = stacked(1, 16, 2, 16)
    with pytest.raises(ArgumentError, match=r"torch\.where"):
        flashgen.attention(q, q, q, score_mod=lambda score, b, h, i, j: score if score > 0 else -score)
    tables = {
        r"must have elements": torch.zeros(0),
        r"must be on q's device cpu; got meta": torch.zeros(9, device="meta"),
    }
    for message, table in tables.items():
        with pytest.raises(ArgumentError, match=message):
            flashgen.attention(q, q, q, score_mod=partial(plus_element, table))
    with pytest.raises(ArgumentError, match=r"beside alibi_slopes"):
        flashgen.attention(q, q, q, score_mod=BENT["tanh"], alibi_slopes=torch.ones(2))
