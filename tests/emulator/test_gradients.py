"""What autograd, torch.func and torch.compile are told, as long as there is no backward: forward runs, gradients are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import flashgen
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch import cpu

SENTENCE = r"^flashgen\.attention has no backward yet: call it under torch\.no_grad\(\), or detach its inputs$"
NO_TANGENTS = r"^flashgen\.attention has no forward-mode derivative: call it with the primals of its inputs$"


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


TRANSFORMS: list[Callable[[torch.Tensor], Any]] = [
    torch.func.grad(loss),
    torch.func.grad_and_value(loss),
    torch.func.jacrev(loss),
    torch.func.hessian(loss),
    lambda q: torch.func.vjp(loss, q)[1](torch.ones(())),
    lambda q: torch.vmap(torch.func.grad(loss))(q[None]),
    lambda q: torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(q[None]),
    lambda q: torch.func.grad(lambda x: torch.vmap(lambda y: flashgen.attention(x, y, y))(q[None]).float().sum())(q),
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compiled_transforms_get_it_too(transform: Callable[[torch.Tensor], Any], backend: str) -> None:
    with pytest.raises(FlashgenError, match=SENTENCE):
        torch.compile(transform, backend=backend)(tensor())
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"flashgen\.attention has no "):  # of PyTorch's, which may leave nothing to Python
        torch.compile(transform, backend=backend, fullgraph=True)(tensor())


FORWARD_MODE: list[Callable[[torch.Tensor], Any]] = [
    torch.func.jacfwd(loss),
    lambda q: torch.func.jvp(loss, (q,), (q,)),
    lambda q: torch.func.jvp(torch.vmap(loss), (q[None],), (q[None],)),
    lambda q: torch.vmap(lambda x: torch.func.jvp(loss, (x,), (x,)))(q[None]),
]


@pytest.mark.parametrize("how", [lambda f: f, lambda f: torch.compile(f, backend="eager"), lambda f: torch.compile(f, backend="aot_eager")])
def test_forward_mode_gets_its_own(how: Callable[[Any], Callable[[torch.Tensor], Any]]) -> None:
    for differentiate in FORWARD_MODE:
        torch.compiler.reset()
        with pytest.raises(FlashgenError, match=NO_TANGENTS):
            how(differentiate)(tensor())
    torch.compiler.reset()
    call, q = how(loss), tensor()
    expected = call(q)
    with forward_ad.dual_level():
        with pytest.raises(FlashgenError, match=NO_TANGENTS):
            call(forward_ad.make_dual(q, q))
        torch.testing.assert_close(call(q), expected)
    torch.testing.assert_close(call(q), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("bad", [{"layout": "bsd"}, {"scale": 0.0}, {"v": tensor().half()}])
def test_a_compiled_call_still_works_after_one_that_was_refused(bad: dict[str, Any], backend: str) -> None:
    compiled, q = torch.compile(flashgen.attention, backend=backend), tensor()
    with pytest.raises(ArgumentError, match=f"^{next(iter(bad))} must "):
        compiled(**{"q": q, "k": q, "v": q, **bad})
    for n in (5, 3):
        torch.testing.assert_close(compiled(q[:, :n], q, q), flashgen.attention(q[:, :n], q, q))


def stacked(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("in_dims", "shapes"),
    [
        ((0, 0, 0), [(3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (3, 2, 7, 2, 8)]),
        ((0, None, None), [(3, 2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)]),
        ((None, 1, 2), [(2, 5, 4, 16), (2, 3, 7, 2, 16), (2, 7, 3, 2, 8)]),
        ((3, 2, 0), [(2, 5, 4, 3, 16), (2, 7, 3, 2, 16), (3, 2, 7, 2, 8)]),
    ],
)
def test_vmap_is_what_calls_one_by_one_are(in_dims: tuple[int | None, ...], shapes: list[tuple[int, ...]], monkeypatch: Any) -> None:
    given = [stacked(*shape) for shape in shapes]
    each = [[t if dim is None else t.select(dim, i) for t, dim in zip(given, in_dims, strict=True)] for i in range(3)]
    run, launches = cpu.run_on_cpu, []

    def count(*arguments: Any) -> None:
        launches.append(arguments)
        run(*arguments)

    monkeypatch.setattr(cpu, "run_on_cpu", count)
    both = torch.vmap(partial(flashgen.attention, causal=True, return_lse=True), in_dims)(*given)
    out = torch.vmap(partial(flashgen.attention, causal=True), in_dims, out_dims=1)(*given)
    assert len(launches) == 2
    expected = [flashgen.attention(*tensors, causal=True, return_lse=True) for tensors in each]
    for got, wanted in zip(both, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted))
    torch.testing.assert_close(out, torch.stack([wanted for wanted, _ in expected], 1))


def test_vmap_of_vmap_and_of_nothing() -> None:
    q = stacked(2, 3, 1, 5, 2, 16)
    torch.testing.assert_close(torch.vmap(torch.vmap(loss))(q), torch.stack([torch.stack([loss(x) for x in row]) for row in q]))
    assert torch.vmap(flashgen.attention)(q[0, :0], q[0, :0], q[0, :0]).shape == (0, 1, 5, 2, 16)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 5, 2, 16)] * 3, r"^q must have 4 dimensions \(b, s, h, d\); got 3$"),
        ([(3,)] * 3, r"^q must have 4 dimensions \(b, s, h, d\); got 0$"),
        ([(3, 2, 5, 2, 16), (3, 1, 5, 2, 16), (3, 1, 5, 2, 16)], r"^k must have q's batch size 2; got 1$"),
        ([(3, 2, 5, 2, 12)] * 3, r"^head_dim must be a multiple of 8 "),
    ],
)
@pytest.mark.parametrize("how", [lambda f: f, lambda f: torch.compile(f, backend="aot_eager")])
def test_under_vmap_errors_are_about_one_call(shapes: list[tuple[int, ...]], message: str, how: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentError, match=message):
        how(torch.vmap(flashgen.attention))(*(stacked(*shape) for shape in shapes))


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
