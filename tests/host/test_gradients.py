"""What autograd, torch.func and torch.compile are told, as long as there is no backward: forward runs, gradients are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.errors import FlashgenError

SENTENCE = r"^flashgen\.attention has no backward yet: call it under torch\.no_grad\(\), or detach its inputs$"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def tensor() -> torch.Tensor:
    return torch.randn(1, 5, 2, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))


def loss(q: torch.Tensor) -> torch.Tensor:
    return flashgen.attention(q, q, q).float().sum()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return flashgen.attention(x, x, x)


def forward_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    assert out.requires_grad
    with pytest.raises(FlashgenError, match=SENTENCE):
        out.float().sum().backward()
    return out.detach()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_with_trainable_weights_compiles_and_runs_as_eagerly(dynamic: bool) -> None:
    model, x = Model(), tensor()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(forward_of(compiled, x), forward_of(model, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda: torch.func.grad(loss)(tensor()),
        lambda: torch.func.jacrev(loss)(tensor()),
        lambda: torch.func.hessian(loss)(tensor()),
        lambda: torch.func.vjp(loss, tensor()),
        lambda: torch.autograd.functional.jacobian(loss, tensor()),
        lambda: torch.func.grad(lambda q: torch.vmap(loss)(q).sum())(torch.stack([tensor(), tensor()])),
        lambda: torch.vmap(loss)(torch.stack([tensor().requires_grad_()])).sum().backward(),
        lambda: flashgen.attention(*3 * [tensor().requires_grad_()], return_lse=True)[1].sum().backward(),
    ],
)
def test_every_way_to_ask_for_gradients_gets_the_sentence(differentiate: Callable[[], Any]) -> None:
    with pytest.raises(FlashgenError, match=SENTENCE):
        differentiate()


def test_forward_mode_gets_its_own() -> None:
    for differentiate in (torch.func.jacfwd(loss), lambda q: torch.func.jvp(loss, (q,), (q,))):
        with pytest.raises(FlashgenError, match=r"^flashgen\.attention has no forward-mode derivative"):
            differentiate(tensor())


def test_compiled_gradients_are_refused_while_compiling() -> None:
    with pytest.raises(Exception, match="autograd"):
        torch.compile(torch.func.grad(loss), backend="aot_eager")(tensor())


@pytest.mark.xfail(strict=True, reason="a transform under torch.compile is refused by PyTorch's words: to be mended with the backward pass")
def test_compiled_gradients_are_refused_with_the_sentence() -> None:
    with pytest.raises(Exception, match="has no backward yet"):
        torch.compile(torch.func.grad(loss), backend="aot_eager")(tensor())


def test_what_needs_no_gradients_works_under_transforms() -> None:
    q, expected = tensor(), loss(tensor())
    torch.testing.assert_close(torch.vmap(loss)(torch.stack([q, q])), torch.stack([expected, expected]))
    gradient, value = torch.func.grad_and_value(lambda x: x.float().sum() + loss(x.detach()))(q)
    torch.testing.assert_close(gradient, torch.ones_like(q))
    torch.testing.assert_close(value, q.float().sum() + expected)
    with torch.no_grad():
        torch.testing.assert_close(loss(q.requires_grad_()), expected)


@pytest.mark.parametrize("name", ["attention_output", "attention_forward", "attention"])
def test_the_operators_pass_pytorchs_own_checks(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.flashgen, name).default, (*3 * [tensor()], True, 0.3, "bhsd"))
