"""`flashgen.attention` with a window, on CPU tensors: results and gradients, the ways of PyTorch to ask for them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashgen
from flashgen.codegen.errors import ArgumentError

Window = tuple[int | None, int | None]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window, causal: bool = False) -> torch.Tensor:
    """In the tensors' own type, which autograd differentiates; a row that sees no key is 0."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * q.shape[3] ** -0.5
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None]
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    if causal:
        hidden |= distance > 0
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(q.shape[2] // k.shape[2], 2))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.double() - wanted).abs().max()) <= 2**-6 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("window", "causal"),
    [
        ((4, 9), False),
        ((6, 3), True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (((None, 2), False), ((-3, None), False), ((5, -2), True))),
    ],
)
def test_results_and_gradients_are_those_of_float64(window: Window, causal: bool) -> None:
    given = [stacked(2, 33, 4, 16), stacked(2, 40, 2, 16, seed=1), stacked(2, 40, 2, 8, seed=2)]
    leaves = [t.requires_grad_() for t in given]
    doubles = [t.detach().double().requires_grad_() for t in given]
    out, wanted = flashgen.attention(*leaves, window=window, causal=causal), exact(doubles[0], doubles[1], doubles[2], window, causal)
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, leaves, into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True] * 3


def test_rows_without_keys_are_0_and_have_gradients_0() -> None:
    q, k = stacked(1, 20, 2, 16).requires_grad_(), stacked(1, 12, 2, 16, seed=1).requires_grad_()
    out, lse = flashgen.attention(q, k, k, window=(2, 3), return_lse=True)
    rows = slice(0, 20 - 12 - 3)  # whose window ends before the first key
    assert not out[:, rows].any()
    assert (lse[:, :, rows] == -torch.inf).all()
    assert torch.isfinite(lse[:, :, rows.stop :]).all()
    out.float().sum().backward()
    assert q.grad is not None
    assert not q.grad[:, rows].any()


def test_what_a_mask_can_say_is_the_plain_call() -> None:
    q = stacked(1, 40, 2, 16)
    plain, causal = flashgen.attention(q, q, q), flashgen.attention(q, q, q, causal=True)
    for window, masked, wanted in (((None, None), False, plain), ((None, 0), False, causal), ((None, 7), True, causal)):
        assert torch.equal(flashgen.attention(q, q, q, window=window, causal=masked), wanted)


@pytest.mark.parametrize("window", [None, pytest.param((3, 100), marks=pytest.mark.slow)])
@pytest.mark.parametrize("lengths", [(20, 33), (33, 20)])
def test_a_causal_mask_aligned_top_left(lengths: tuple[int, int], window: Window | None) -> None:
    q, k = stacked(1, lengths[0], 2, 16).requires_grad_(), stacked(1, lengths[1], 2, 16, seed=1).requires_grad_()
    out = flashgen.attention(q, k, k, causal="top_left", window=window)
    doubles = [t.detach().double().requires_grad_() for t in (q, k)]
    wanted = exact(doubles[0], doubles[1], doubles[1], ((window or (None,))[0], lengths[0] - lengths[1]))
    assert close(out, wanted)
    found, right = torch.autograd.grad(out.float().sum(), (q, k)), torch.autograd.grad(wanted.sum(), doubles)
    assert [close(*both) for both in zip(found, right, strict=True)] == [True] * 2
    same = stacked(1, 20, 2, 16)
    assert torch.equal(flashgen.attention(same, same, same, causal="top_left"), flashgen.attention(same, same, same, causal=True))


def test_another_alignment_is_refused() -> None:
    q = stacked(1, 8, 2, 16)
    with pytest.raises(ArgumentError, match=r"^causal must be True, False or 'top_left'; got 'top'$"):
        flashgen.attention(q, q, q, causal="top")  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_training_step(dynamic: bool) -> None:
    def step(x: torch.Tensor, left: int) -> torch.Tensor:
        return flashgen.attention(x, x, x, window=(left, 0)).float().square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for left in (3, 11):
        x, y = stacked(1, 40, 2, 16).requires_grad_(), stacked(1, 40, 2, 16).requires_grad_()
        value, plain = compiled(x, left), step(y, left)
        value.backward()
        plain.backward()
        assert torch.equal(value, plain)
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_transforms_of_torch_func() -> None:
    x = stacked(3, 1, 24, 2, 16)

    def attend(one: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(one, one, one, window=(5, 2))

    mapped = torch.vmap(attend)(x)
    assert torch.equal(mapped, torch.stack([attend(one) for one in x]))
    of_func = torch.func.grad(lambda one: attend(one).float().square().sum())(x[0])
    leaf = x[0].clone().requires_grad_()
    attend(leaf).float().square().sum().backward()
    assert leaf.grad is not None
    assert torch.equal(of_func, leaf.grad)


@pytest.mark.parametrize("name", ["attention_output", "attention_forward", "attention"])
def test_operators_keep_pytorch_s_rules(name: str) -> None:
    q, k = stacked(1, 6, 4, 16), stacked(1, 9, 2, 16)
    operator, more = getattr(torch.ops.flashgen, name).default, (None,) if name == "attention" else ()
    torch.library.opcheck(operator, (q, k, k, False, None, "bshd", *more, "window", [3, 1]))


def test_flops_are_those_of_visible_pairs() -> None:
    q = stacked(2, 64, 4, 16).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        flashgen.attention(q, q, q, window=(7, 0)).float().sum().backward()
    pairs = 2 * 4 * sum(min(i, 7) + 1 for i in range(64))
    assert counter.get_total_flops() == int(3.5 * 2 * pairs * 32)


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (3, r"^window must be a tuple \(left, right\), each a number of keys or None; got 3$"),
        ((3,), r"^window must be a tuple \(left, right\), each a number of keys or None; got \(3,\)$"),
        ((3, 4.0), r"^window must have ends that are None or whole numbers from -2147483646 to 2147483646; got \(3, 4\.0\)$"),
        ((True, 0), r"^window must have ends that are None or whole numbers"),
        ((2**31, 0), r"^window must have ends that are None or whole numbers"),
    ],
)
def test_a_bad_window_is_refused(window: Any, says: str) -> None:
    q = stacked(1, 8, 2, 16)
    with pytest.raises(ArgumentError, match=says):
        flashgen.attention(q, q, q, window=window)


@pytest.mark.parametrize(
    ("modified", "says"),
    [
        (
            ("nonsense", [1, 2]),
            r"^modifiers must be one of alibi, bias, bias_fp32, boolean_mask, chunk, prefix_len, sinks, softcap, window; got 'nonsense'$",
        ),
        (("window",), r"^sizes must be those of window: window_left, window_right; got \[\]$"),
        (("window", [1]), r"^sizes must be those of window: window_left, window_right; got \[1\]$"),
        (("", [1]), r"^sizes must be those of no modifiers: none; got \[1\]$"),
    ],
)
def test_an_operator_refuses_modifiers_that_it_cannot_read(modified: tuple[Any, ...], says: str) -> None:
    q = stacked(1, 8, 2, 16)
    with pytest.raises(ArgumentError, match=says):
        torch.ops.flashgen.attention_output(q, q, q, False, None, "bshd", *modified)
