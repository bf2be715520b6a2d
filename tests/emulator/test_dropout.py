"""`flashgen.attention` with dropout, on CPU tensors: which elements are dropped, how often, and that results and gradients agree on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifiers.dropout import limit_of
from flashgen.numerics.modifiers import dropout
from flashgen.numerics.modifiers.dropout import dropout_mask, kept_elements, random_bits
from tests.support.plan import few_of


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()
    torch.manual_seed(7)


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, p: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """In float64, causal."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    hidden = torch.arange(k.shape[1]) > (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    left = scores.softmax(-1)[..., : k.shape[1]] * kept / (1 - p)
    return torch.einsum("bhij,bjhd->bihd", left, v)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.detach().double() - wanted.detach()).abs().max()) <= 2**-6 * max(1.0, float(wanted.detach().abs().max()))


@pytest.mark.parametrize("p", few_of([0.25, 0.98], 0.25))
@pytest.mark.parametrize("layout", few_of(["bshd", "bhsd"], "bshd"))
@pytest.mark.parametrize("has_sinks", few_of([False, True], True), ids=["", "sinks"])
def test_results_and_gradients_know_the_same_elements(p: float, layout: str, has_sinks: bool) -> None:
    leaves = [t.requires_grad_() for t in (stacked(2, 33, 4, 16), stacked(2, 70, 2, 16, seed=1), stacked(2, 70, 2, 16, seed=2))]
    leaves += [torch.tensor([3.0, -2.0, 5.0, 0.0], requires_grad=True)] * has_sinks
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    options: dict[str, Any] = {"sinks": leaves[3]} if has_sinks else {}
    laid = [t.transpose(1, 2) if layout == "bhsd" else t for t in leaves[:3]]
    options |= {"causal": True, "layout": layout, "return_lse": True}
    found, lse, kept = flashgen.attention(*laid, dropout_p=p, return_dropout_mask=True, **options)
    out = found.transpose(1, 2) if layout == "bhsd" else found
    wanted = exact(doubles[0], doubles[1], doubles[2], kept, p, doubles[3] if has_sinks else None)
    assert close(out, wanted)
    assert torch.equal(lse, flashgen.attention(*laid, **options)[1])
    into = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(*gradients, strict=True)] == [True] * len(leaves)


def test_random_bits_are_those_of_philox() -> None:
    queries, keys = torch.tensor([[0], [8]]), torch.tensor([[0, 1, 8, 9]])
    bits = random_bits(torch.tensor(0), torch.zeros(1, 1, dtype=torch.int64), queries, keys)[0]
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]  # of a counter and a key of zeros, after 7 rounds (Salmon et al., Random123)
    assert bits.tolist() == [[word >> half & 0xFFFF for word in words[row::2] for half in (0, 16)] for row in (0, 1)]


@pytest.mark.parametrize("at_once", [1, 10**6])
@pytest.mark.parametrize("sizes", [(2, 3, 37, 53), (1, 1, 16, 32), (1, 2, 1, 1), (2, 1, 0, 9)])
def test_a_mask_has_the_elements_that_are_kept(sizes: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_COUNTERS_AT_ONCE", at_once)
    (batch, heads, len_q, len_kv), seed = sizes, torch.tensor(-12345678901234567)
    queries, keys = torch.arange(len_q)[:, None], torch.arange(len_kv)[None]
    wanted = kept_elements(seed, 0.3, torch.arange(batch * heads)[:, None], queries, keys).reshape(sizes)
    assert torch.equal(dropout_mask(seed, 0.3, batch, heads, len_q, len_kv, torch.device("cpu")), wanted)


def test_every_probability_is_met() -> None:
    numbers = torch.arange(2**16).to(torch.int16).view(torch.float16)
    for count in (*range(0, 2**16, 97), *range(31740, 31750), *range(63480, 63500), 2**16):
        limit, inverted = limit_of(count / 2**16)
        below = int((numbers < torch.tensor(limit).to(torch.int16).view(torch.float16)).sum())
        assert abs((2**16 - below if inverted else below) - count) <= (count == 31745)  # -0 and 0 are equal


@pytest.mark.parametrize("p", [2.0**-10, 0.1, 0.98])
def test_elements_are_dropped_independently(p: float) -> None:
    batch, heads, length = 2, 3, 256
    dropped = ~dropout_mask(torch.tensor(-12345), p, batch, heads, length, length, torch.device("cpu"))
    total, deviation = dropped.numel(), math.sqrt(p * (1 - p))

    def unlikely(count: float, of: int, chance: float) -> bool:
        return abs(count - of * chance) > 5 * math.sqrt(of * chance * (1 - chance)) + 1

    assert not unlikely(int(dropped.sum()), total, p)
    for rows in dropped.flatten(0, 1):
        assert not unlikely(int(rows.sum()), rows.numel(), p)
    for along in (2, 3):  # no key and no query is dropped more often than others
        counts = dropped.sum((0, 1, along)).double()
        assert float((counts - batch * heads * length * p).abs().max()) < 6 * deviation * math.sqrt(batch * heads * length) + 2
    centred = (dropped.double() - p) / deviation
    shifts = [(2, 1), (2, 7), (2, 8), (2, 9), (2, 16), (2, 64), (3, 1), (3, 2), (3, 8), (3, 16), (3, 128), (0, 1), (1, 1)]
    for axis, by in shifts:
        correlation = float((centred * centred.roll(by, axis)).sum()) / total
        assert abs(correlation) < 6 / math.sqrt(total), (axis, by)


def test_seeds_are_pytorchs() -> None:
    q = stacked(1, 40, 2, 16)
    torch.manual_seed(3)
    first, second = (flashgen.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(flashgen.attention(q, q, q, dropout_p=0.5), first)
    leaf = q.clone().requires_grad_()
    torch.manual_seed(3)
    (wanted,) = torch.autograd.grad(flashgen.attention(leaf, leaf, leaf, dropout_p=0.5).float().sum(), leaf)
    torch.manual_seed(3)
    again = torch.utils.checkpoint.checkpoint(lambda q: flashgen.attention(q, q, q, dropout_p=0.5), leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.float().sum(), leaf)[0], wanted)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_is_refused(randomness: str) -> None:
    q = stacked(2, 1, 16, 2, 16)
    with pytest.raises(ArgumentError, match=r"must not be mapped by torch\.vmap"):
        torch.vmap(lambda q: flashgen.attention(q, q, q, dropout_p=0.5), randomness=randomness)(q)


def test_nothing_and_all_may_be_dropped() -> None:
    q = stacked(1, 40, 2, 16).requires_grad_()
    out, mask = flashgen.attention(q, q, q, dropout_p=0.0, return_dropout_mask=True)
    assert torch.equal(out, flashgen.attention(q, q, q))
    assert mask.all()
    out, mask = flashgen.attention(q, q, q, dropout_p=1.0, return_dropout_mask=True)
    assert not out.any()
    assert not mask.any()
    assert not torch.autograd.grad(out.float().sum(), q)[0].any()


@pytest.mark.slow
def test_a_compiled_call_draws_anew() -> None:
    q = stacked(1, 40, 2, 16)

    def call(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flashgen.attention(q, q, q, causal=True, dropout_p=0.4, return_dropout_mask=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    masks = []
    for _ in range(2):
        leaf = q.clone().requires_grad_()
        out, kept = compiled(leaf)
        double = leaf.detach().double().requires_grad_()
        wanted = exact(double, double, double, kept, 0.4, None)
        assert close(out, wanted)
        assert close(torch.autograd.grad(out.float().sum(), leaf)[0], torch.autograd.grad(wanted.sum(), double)[0])
        masks.append(kept)
    assert not torch.equal(*masks)


@pytest.mark.slow
def test_operators_keep_their_contracts() -> None:
    q, seed = stacked(1, 16, 2, 16), torch.tensor(5)
    modified: tuple[Any, ...] = ("dropout", [], [0.5], [seed])
    torch.library.opcheck(torch.ops.flashgen.attention_forward.default, (q, q, q, False, None, "bshd", *modified))
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q.clone().requires_grad_(), q, q, True, None, "bshd", None, *modified))


@pytest.mark.parametrize(
    ("p", "given"),
    [
        (-0.1, "-0.1"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        (True, "True"),
        ("0.1", "'0.1'"),
        (torch.tensor(0.1), "a value of type torch.Tensor"),
    ],
)
def test_bad_probabilities_are_named(p: Any, given: str) -> None:
    q = stacked(1, 16, 2, 16)
    with pytest.raises(ArgumentError, match=rf"^dropout_p must be a number from 0 to 1; got {given}"):
        flashgen.attention(q, q, q, dropout_p=p)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (torch.tensor([1, 2]), r"dropout_seed must be one number, of no dimensions; got the shape \(2,\)"),
        (torch.tensor(1.0), r"dropout_seed must be torch\.int64; got torch\.float32"),
    ],
)
def test_bad_seeds_are_named(seed: torch.Tensor, message: str) -> None:
    q = stacked(1, 16, 2, 16)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        torch.ops.flashgen.attention_forward(q, q, q, False, None, "bshd", "dropout", [], [0.5], [seed])
