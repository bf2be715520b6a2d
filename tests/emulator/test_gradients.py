"""Gradients of CPU tensors, asked for in every way that autograd, torch.func and torch.compile have; what is refused, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flashgen
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch import cpu, gradients
from flashgen.operators import cpu as of_cpu

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


def gradient(q: torch.Tensor) -> torch.Tensor:
    """Of `loss`, by plain autograd."""
    x = q.clone().requires_grad_()
    loss(x).backward()
    assert x.grad is not None
    return x.grad


@cache
def usual() -> torch.Tensor:
    """The gradient of `tensor()`, which many tests compare with."""
    return gradient(tensor())


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the tensors' own type, which autograd differentiates."""
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(group, 2))
    return (out.transpose(1, 2) if layout == "bhsd" else out), scores.logsumexp(-1)


@pytest.mark.parametrize("layout", [pytest.param("bshd", marks=pytest.mark.slow), "bhsd"])
@pytest.mark.parametrize(("through_out", "through_lse"), [pytest.param(True, False, marks=pytest.mark.slow), (True, True), (False, True)])
def test_gradients_are_those_of_float64_by_the_rule(layout: str, through_out: bool, through_lse: bool) -> None:
    shapes = [(2, 33, 4, 16), (2, 40, 2, 16), (2, 40, 2, 8)]
    given = [stacked(*(s if layout == "bshd" else (s[0], s[2], s[1], s[3]))).requires_grad_() for s in shapes]
    doubles = [t.detach().double().requires_grad_() for t in given]
    outputs = flashgen.attention(*given, causal=True, layout=layout, return_lse=True)
    wanted = exact(doubles[0], doubles[1], doubles[2], causal=True, layout=layout)
    into = [torch.randn_like(output) for output in outputs]
    used = [i for i, use in enumerate((through_out, through_lse)) if use]
    found = torch.autograd.grad([outputs[i] for i in used], given, [into[i] for i in used], allow_unused=True)
    right = torch.autograd.grad([wanted[i] for i in used], doubles, [into[i].double() for i in used], allow_unused=True)
    for got, want in zip(found, right, strict=True):
        if want is None:
            assert got is None or not got.any(), "v has no part in lse"
        else:
            assert got is not None
            assert got.dtype == torch.bfloat16
            assert float((got - want).abs().max()) <= 2**-6 * float(want.abs().max())


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    q, k, v = (tensor().requires_grad_(needs) for needs in (False, True, False))
    flashgen.attention(q, k, v).float().sum().backward()
    assert q.grad is None
    assert k.grad is not None
    assert v.grad is None
    q, k, v = (tensor().requires_grad_() for _ in range(3))
    flashgen.attention(q, k, v, return_lse=True)[1].detach()


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 3), (3, 0), (0, 0)])
def test_where_nothing_meets_gradients_are_0(len_q: int, len_kv: int) -> None:
    q, k = (stacked(1, n, 2, 16).requires_grad_() for n in (len_q, len_kv))
    flashgen.attention(q, k, k).float().sum().backward()
    for leaf in (q, k):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: torch.ones((), dtype=t.dtype).expand(t.shape),
        lambda t: torch.ones(1, 2, 5, 16, dtype=t.dtype).transpose(1, 2),
        lambda t: torch.ones(1, 5, 16, 2, dtype=t.dtype).transpose(2, 3),
        lambda t: torch.ones(1, 5, 2, 17, dtype=t.dtype)[..., 1:],
    ],
    ids=["expanded", "transposed", "columns apart", "not aligned"],
)
def test_a_gradient_may_lie_in_memory_in_any_way(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = tensor().requires_grad_()
    out = flashgen.attention(x, x, x)
    (found,) = torch.autograd.grad(out, x, make(out))
    assert torch.equal(found, usual())


def test_what_is_copied_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_said", set())
    x = tensor().requires_grad_()
    out = flashgen.attention(x, x, x)
    with caplog.at_level("INFO", logger="flashgen"):
        for _ in range(2):
            torch.autograd.grad(out, x, torch.ones((), dtype=out.dtype).expand(out.shape), retain_graph=True)
    (said,) = [record.message for record in caplog.records if "copies" in record.message]
    assert said.startswith("the backward pass copies d_out, which kernels cannot take as it is: d_out must be contiguous")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": lambda t: t[:, :4]}, r"^out must have the shape \(1, 5, 2, 16\); got \(1, 4, 2, 16\)$"),
        ({"d_out": lambda t: t.half()}, r"^d_out must be torch\.bfloat16; got torch\.float16$"),
        ({"lse": lambda t: t.double()}, r"^lse must be torch\.float32; got torch\.float64$"),
        ({"d_lse": lambda t: t[:, :1]}, r"^d_lse must have the shape \(1, 2, 5\); got \(1, 1, 5\)$"),
        ({"lse": lambda t: t.to("meta")}, r"^lse must be on q's device cpu; got meta$"),
        ({"k": lambda t: t[..., :8]}, r"^k must have q's head_dim 16; got 8$"),
    ],
)
def test_the_operator_names_a_bad_tensor(change: dict[str, Callable[[torch.Tensor], torch.Tensor]], message: str) -> None:
    q = tensor()
    out, lse = flashgen.attention(q, q, q, return_lse=True)
    given = {"q": q, "k": q, "v": q, "out": out, "lse": lse, "d_out": out, "d_lse": lse}
    given |= {name: make(given[name]) for name, make in change.items()}
    with pytest.raises(ArgumentError, match=message):
        torch.ops.flashgen.attention_backward(*given.values(), False, None, "bshd")


@pytest.mark.parametrize(
    ("dynamic", "backend"),
    [(True, "aot_eager"), *(pytest.param(False, backend, marks=pytest.mark.slow) for backend in ("aot_eager", "inductor"))],
)
def test_a_training_step_compiles_whole(dynamic: bool, backend: str) -> None:
    torch.manual_seed(0)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    compiled = torch.compile(models[1], fullgraph=True, dynamic=dynamic, backend=backend)
    for model in (models[0], compiled):
        model(tensor()).float().square().mean().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert float((one.grad - other.grad).abs().max()) <= 2**-5 * float(one.grad.abs().max())
    with torch.no_grad():
        torch.testing.assert_close(compiled(tensor()), models[0](tensor()), rtol=0.02, atol=1e-3)


def differences(q: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Ways to ask for the gradient of `loss`."""
    return [
        torch.func.grad(loss),
        lambda q: torch.func.grad_and_value(loss)(q)[0],
        torch.func.jacrev(loss),
        lambda q: torch.func.vjp(loss, q)[1](torch.ones(()))[0],
        lambda q: torch.vmap(torch.func.grad(loss))(q[None])[0],
        lambda q: torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(q[None])[0],
        lambda q: torch.func.grad(lambda x: torch.vmap(lambda y: flashgen.attention(x, y, y))(q[None]).float().sum())(q),
        lambda q: torch.autograd.functional.jacobian(loss, q),
        lambda q: torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, x := q.clone().requires_grad_(), use_reentrant=False), x)[0],
        lambda q: torch.autograd.grad(torch.vmap(loss)((x := q.clone().requires_grad_())[None]).sum(), x)[0],
    ]


WAYS = differences(tensor())


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_every_way_to_ask_for_gradients_gets_them(way: int) -> None:
    wanted = usual()
    found = WAYS[way](tensor())
    if way == 6:  # of q alone
        x = tensor().requires_grad_()
        flashgen.attention(x, tensor(), tensor()).float().sum().backward()
        assert x.grad is not None
        wanted = x.grad
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("way", [0, 3, *(pytest.param(way, marks=pytest.mark.slow) for way in (1, 2, 4, 5))])
def test_compiled_transforms_leave_the_call_to_python(way: int, backend: str) -> None:
    """PyTorch 2.11 compiles the gradients of a Function within a transform to 0 without a word."""
    torch.testing.assert_close(torch.compile(WAYS[way], backend=backend)(tensor()), usual(), rtol=0.02, atol=0.02)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"flashgen\.attention has no |Observed exception"):
        torch.compile(WAYS[way], backend=backend, fullgraph=True)(tensor())


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda: torch.func.jacrev(torch.func.jacrev(loss))(tensor()),
        lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q).float().sum())(tensor()),
        lambda: torch.autograd.functional.hessian(loss, tensor()),
    ],
)
def test_second_derivatives_are_refused(differentiate: Callable[[], Any]) -> None:
    with pytest.raises(FlashgenError, match=r"^flashgen\.attention has no second derivative: "):
        differentiate()


def test_a_graph_of_gradients_may_be_made_but_not_differentiated() -> None:
    x = tensor().requires_grad_()
    (found,) = torch.autograd.grad(loss(x), x, create_graph=True)
    assert torch.equal(found, usual())
    with pytest.raises(FlashgenError, match=r"^flashgen\.attention has no second derivative: "):
        found.float().sum().backward()


def test_the_operator_itself_refuses_transforms() -> None:
    def of_operator(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.flashgen.attention(q, q, q, False, None, "bshd")[0].float().sum()
        return out

    with pytest.raises(FlashgenError, match=r"^torch\.ops\.flashgen\.attention has no gradients for torch\.func: "):
        torch.func.grad(of_operator)(tensor())


def test_flops_of_both_passes_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        gradient(tensor())
    assert counter.get_total_flops() == (2 + 5) * 2 * 2 * 5 * 5 * 16


FORWARD_MODE: list[Callable[[torch.Tensor], Any]] = [
    torch.func.jacfwd(loss),
    lambda q: torch.func.jvp(loss, (q,), (q,)),
    lambda q: torch.func.jvp(torch.vmap(loss), (q[None],), (q[None],)),
    lambda q: torch.vmap(lambda x: torch.func.jvp(loss, (x,), (x,)))(q[None]),
]


@pytest.mark.parametrize(
    ("how", "ways"),
    [
        (lambda f: f, range(4)),
        (lambda f: torch.compile(f, backend="aot_eager"), [1]),
        pytest.param(lambda f: torch.compile(f, backend="aot_eager"), [0, 2, 3], marks=pytest.mark.slow),
        pytest.param(lambda f: torch.compile(f, backend="eager"), range(4), marks=pytest.mark.slow),
    ],
)
def test_forward_mode_gets_its_own(how: Callable[[Any], Callable[[torch.Tensor], Any]], ways: Sequence[int]) -> None:
    for differentiate in (FORWARD_MODE[way] for way in ways):
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


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
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
        pytest.param((0, None, None), [(3, 2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)], marks=pytest.mark.slow),
        pytest.param((None, 1, 2), [(2, 5, 4, 16), (2, 3, 7, 2, 16), (2, 7, 3, 2, 8)], marks=pytest.mark.slow),
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


@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("how", ["eager", "operator", *(pytest.param(how, marks=pytest.mark.slow) for how in ("compiled", "grad"))])
def test_deterministic_gradients(how: str, asked: bool | None, setting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said, PyTorch's setting counts while the gradients are computed. Compiled code wants one for both passes."""
    told, made = [], gradients.gradient_call

    def noted(*arguments: Any) -> Any:
        told.append(arguments[-4])  # before modifiers, their tensors, and whether gradients of these are wanted
        return made(*arguments)

    def asking(x: torch.Tensor) -> torch.Tensor:
        if how == "operator":
            out: torch.Tensor = torch.ops.flashgen.attention(x, x, x, False, None, "bshd", asked)[0]
            return out.float().sum()
        return flashgen.attention(x, x, x, deterministic=asked).float().sum()

    monkeypatch.setattr(of_cpu, "gradient_call", noted)
    x = tensor().requires_grad_()
    try:
        torch.use_deterministic_algorithms(setting and how in ("compiled", "grad"))
        if how == "grad":
            torch.func.grad(asking)(tensor())
        else:
            value = (torch.compile(asking, backend="aot_eager") if how == "compiled" else asking)(x)
            torch.use_deterministic_algorithms(setting)
            value.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [setting if asked is None else asked]


def test_deterministic_is_checked_with_and_without_gradients() -> None:
    for q in (tensor(), tensor().requires_grad_()):
        with pytest.raises(ArgumentError, match=r"^deterministic must be of type bool( \| None| or None); got 'yes'$"):
            flashgen.attention(q, q, q, deterministic="yes")  # type: ignore[call-overload]


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


@pytest.mark.parametrize("with_lse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_backward_operator_passes_pytorchs_own_checks(with_lse: bool) -> None:
    q = tensor()
    out, lse = flashgen.attention(q, q, q, return_lse=True)
    given = (q, q, q, out, lse, out, lse if with_lse else None, False, None, "bshd")
    torch.library.opcheck(torch.ops.flashgen.attention_backward.default, (*given, True) if with_lse else given)


def test_the_operator_with_gradients_passes_pytorchs_own_checks() -> None:
    leaves = [tensor().requires_grad_() for _ in range(3)]
    torch.library.opcheck(torch.ops.flashgen.attention.default, (*leaves, True, 0.3, "bhsd"))
