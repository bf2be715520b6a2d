"""`score_mod` and `mask_mod` within torch.compile, on CPU tensors: what it gives is what a call outside of it gives, for new values too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen
from flashgen.codegen.errors import ArgumentError
from tests.support.plan import few_of

Mod = Callable[..., Any]
Call = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))


def counted(call: Call, dynamic: bool | None = None) -> tuple[Call, CompileCounterWithBackend]:
    """The call within torch.compile, and what counts its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic), counter


Q = stacked(1, 17, 2, 16)
BIAS, WEIGHT, IDS = stacked(2, 80), 0.5, torch.arange(40) // 5


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(stacked(2, 80, seed=3), requires_grad=False)
        self.documents = torch.nn.Buffer(torch.arange(40) // 7)
        self.weight = 2.0

    def score(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + self.table[h, q - k + 40] * self.weight

    def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.documents[q] == self.documents[k]

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, score_mod=self.score, mask_mod=self.mask)


class Slope:
    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - (q - k).abs() * self.slope


def of_table(table: torch.Tensor, score: Any, b: Any, h: Any, q: Any, k: Any, *, weight: float = 1.0) -> Any:
    return score + table[h, IDS[q]] * weight


def nested(q: torch.Tensor) -> torch.Tensor:
    total = q.float().mean()  # a tensor of the graph

    def weighted(score: Any, weight: float) -> Any:
        return score * weight + total

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return weighted(score, 0.5)

    return flashgen.attention(q, q, q, score_mod=score_mod)


COMPILED = flashgen.compile_modifier(lambda score, b, h, q, k: score + BIAS[h, q - k + 40], lambda b, h, q, k: q - k < 9)
PARTIAL, SLOPE, MODULE = partial(of_table, BIAS, weight=3.0), Slope(0.25), Attention()
FORMS: dict[str, Call] = {
    "lambda": lambda q: flashgen.attention(q, q, q, score_mod=lambda score, b, h, i, j: score + BIAS[h, i - j + 40] * WEIGHT),
    "nested": nested,
    "partial": lambda q: flashgen.attention(q, q, q, score_mod=PARTIAL),
    "partial-made-inside": lambda q: flashgen.attention(q, q, q, score_mod=partial(of_table, BIAS * 2)),
    "module": MODULE,
    "object": lambda q: flashgen.attention(q, q, q, score_mod=SLOPE),
    "compiled-modifier": lambda q: flashgen.attention(q, q, q, score_mod=COMPILED),
    "compiled-modifier-made-inside": lambda q: flashgen.attention(
        q, q, q, score_mod=flashgen.compile_modifier(mask_mod=lambda b, h, i, j: i >= j)
    ),
    "beside-others": lambda q: flashgen.attention(q, q, q, score_mod=SLOPE, softcap=3.0, causal=True, bias=BIAS[:, None, :17]),
    "lse": lambda q: flashgen.attention(q, q, q, mask_mod=lambda b, h, i, j: IDS[i] >= IDS[j], return_lse=True)[1],
}


@pytest.mark.parametrize("form", few_of(FORMS, "lambda", "module"))
def test_forms(form: str) -> None:
    compiled, counter = counted(FORMS[form])
    assert torch.equal(compiled(Q), FORMS[form](Q))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_captured_values_that_change_are_seen() -> None:
    table, weight, many = stacked(2, 80), 1.0, 5

    def call(q: torch.Tensor) -> torch.Tensor:
        plus: Mod = lambda score, b, h, i, j: score + table[h, i - j + 40] * weight  # noqa: E731
        return flashgen.attention(q, q, q, score_mod=plus, mask_mod=lambda b, h, i, j: (i - j).abs() < many)

    compiled, counter = counted(call)
    first = compiled(Q)
    assert torch.equal(first, call(Q))
    table.mul_(2)
    assert torch.equal(compiled(Q), call(Q))
    table = table.clone() * 2
    assert torch.equal(compiled(Q), call(Q))
    assert counter.frame_count == 1, "another tensor needs no other graph"
    weight = 2.0
    assert torch.equal(compiled(Q), call(Q))
    many = 6
    assert torch.equal(compiled(Q), call(Q))
    assert not torch.equal(compiled(Q), first)


@pytest.mark.slow
def test_captured_values_that_change_in_other_ways_are_seen() -> None:
    """Again, and in what a kernel is made for."""
    table, weight, many = stacked(2, 80), 1.0, 5

    def call(q: torch.Tensor) -> torch.Tensor:
        plus: Mod = lambda score, b, h, i, j: score + table[h, i - j + 40] * weight  # noqa: E731
        return flashgen.attention(q, q, q, score_mod=plus, mask_mod=lambda b, h, i, j: (i - j).abs() < many)

    compiled, _ = counted(call)
    for weight in (1.0, 2.0, 3.0):  # noqa: B007 (the function captures it)
        assert torch.equal(compiled(Q), call(Q))
    for many in (6, 7):  # noqa: B007
        assert torch.equal(compiled(Q), call(Q))
    table = torch.cat([table, table], 1)
    assert torch.equal(compiled(Q), call(Q))
    table = table.float()
    assert torch.equal(compiled(Q), call(Q))


@pytest.mark.slow
def test_attributes_that_change_are_seen() -> None:
    module = Attention()
    compiled, _ = counted(module)
    for weight in (2.0, 3.0, 2.0):
        module.weight = weight
        assert torch.equal(compiled(Q), module(Q))
    module.table.data.mul_(2)
    assert torch.equal(compiled(Q), module(Q))
    module.table = torch.nn.Parameter(module.table.float() + 1, requires_grad=False)
    assert torch.equal(compiled(Q), module(Q))


def bottom_right(q: torch.Tensor, k: torch.Tensor, _: Any) -> torch.Tensor:
    beyond = k.shape[1] - q.shape[1]
    return flashgen.attention(q, k, k, mask_mod=lambda b, h, i, j: (i + beyond >= j) & (i - j <= 4))


DYNAMIC: dict[str, Call] = {
    "window": lambda q, k, n: flashgen.attention(q, k, k, mask_mod=lambda b, h, i, j: (i >= j) & (i - j <= n)),
    "bottom-right": bottom_right,
    "table": lambda q, k, n: flashgen.attention(q, k, k, score_mod=lambda score, b, h, i, j: score + BIAS[h, i - j + 40]),
    "table-of-that-size": lambda q, k, n: flashgen.attention(q, k, k, score_mod=lambda score, b, h, i, j: score + k[b, j, h // 2, 0] * n),
    "size-in-score": lambda q, k, n: flashgen.attention(q, k, k, score_mod=lambda score, b, h, i, j: score + i / q.shape[1] + (j + n) // 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_other_lengths_and_whole_numbers_compile_nothing(name: str) -> None:
    compiled, counter = counted(DYNAMIC[name], dynamic=True)
    counts = []
    for length, n in ((11, 3), (17, 6), (20, 9)):
        q, k = stacked(1, length, 2, 16), stacked(1, length + n, 2, 16, seed=1)
        assert torch.equal(compiled(q, k, n), DYNAMIC[name](q, k, n))
        counts.append(counter.frame_count)
    assert counts[0] == counts[2]


@pytest.mark.slow
def test_numbers_that_are_needed_as_they_are() -> None:
    def call(q: torch.Tensor, n: int) -> torch.Tensor:
        return flashgen.attention(q, q, q, score_mod=lambda score, b, h, i, j: sum(score / m for m in range(1, n)) + (i - j) ** n)

    compiled, _ = counted(call, dynamic=True)
    assert all(torch.equal(compiled(Q, n), call(Q, n)) for n in (2, 3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(dynamic: bool) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plus: Mod = lambda score, b, h, i, j: score + BIAS[h, i - j + 40]  # noqa: E731
        return flashgen.attention(q, k, v, score_mod=plus, mask_mod=lambda b, h, i, j: (i >= j) & (IDS[i] != 1)).float().square().sum()

    leaves = [stacked(2, 17, 2, 16, seed=seed).requires_grad_() for seed in range(3)]
    found = torch.autograd.grad(counted(loss, dynamic)[0](*leaves), leaves)
    assert all(torch.equal(*both) for both in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True))


class Causal(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(
            q, q, q, score_mod=lambda score, b, h, i, j: 1 - score, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < 9)
        )


@pytest.mark.parametrize("strict", few_of([False, True], True))
@pytest.mark.parametrize("module", [pytest.param(MODULE, marks=pytest.mark.slow), Causal()])
def test_exported_programs(module: torch.nn.Module, strict: bool) -> None:
    length = torch.export.Dim("length", min=8, max=64)
    program = torch.export.export(module, (Q,), dynamic_shapes=({1: length},), strict=strict)
    q = stacked(1, 23, 2, 16, seed=5)
    assert torch.equal(program.module()(q), module(q))


@pytest.mark.slow
def test_what_pytorchs_rules_say_of_the_operators() -> None:
    name = (
        "traced(score: add(score, mul(t0:bf16[head, key], mul(float32(n0:int32), n1:float32))) | "
        "mask: or(eq(t1:int64[query], t1:int64[key]), lt(key, n0:int32)))"
    )
    modified: tuple[Any, ...] = (f"window,{name}", [5, 0, 3], [0.5], [BIAS, IDS])
    torch.library.opcheck(torch.ops.flashgen.attention_forward.default, (Q, Q, Q, False, None, "bshd", *modified))
    torch.library.opcheck(torch.ops.flashgen.attention.default, (Q.clone().requires_grad_(), Q, Q, False, None, "bshd", None, *modified))
    for left_out, message in (
        (
            (modified[0], [5, 0], [0.5], [BIAS, IDS]),
            r"sizes window_left, window_right, traced_number_n0, numbers traced_number_n1; got \[5, 0\], \[0\.5\]",
        ),
        ((modified[0], [5, 0, 3], [], [BIAS, IDS]), r"numbers traced_number_n1; got \[5, 0, 3\], \[\]"),
        ((modified[0], [5, 0, 3], [0.5], [BIAS]), r"tensors must be those of"),
        ((modified[0], [5, 0, 3], [0.5], [IDS, BIAS]), r"captured tensors of .* must have \[2, 1\] dimensions; got one of 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            torch.ops.flashgen.attention_forward(Q, Q, Q, False, None, "bshd", *left_out)


def test_what_cannot_be_taken_is_refused() -> None:
    leaked: list[Any] = []

    def leaking(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        leaked.append(score)
        return score

    refused: dict[str, Mod] = {
        r"score_mod must compute with functions of torch that flashgen knows.*got torch's cumsum": lambda score, *_: score.cumsum(0),
        r"score_mod must return a float32 score": lambda score, b, h, i, j: i,
        r"index captured tensors by integers": lambda score, b, h, i, j: score + BIAS[:, i][h],
        r"index captured tensors with an integer for each": lambda score, b, h, i, j: score + BIAS.add_(1)[h, i],
        r"[Dd]ata-dependent": lambda score, *_: score if score > 0 else -score,
        r"item": lambda score, *_: score + score.item(),
        r"bind arguments|positional": lambda score: score,
    }
    for message, score_mod in refused.items():
        with pytest.raises(Exception, match=message):
            counted(lambda q, own=score_mod: flashgen.attention(q, q, q, score_mod=own))[0](Q)

    def both(q: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, score_mod=leaking, mask_mod=lambda b, h, i, j: leaked[0] > 0)

    with pytest.raises(Exception, match=r"must be on q's device cpu; got meta"):
        counted(both)[0](Q)
