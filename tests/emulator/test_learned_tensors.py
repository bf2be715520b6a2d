"""Gradients of what a score_mod captures, as callers see them, on CPU tensors. Kernels by the numerics rule: test_traced_gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import flashgen
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch.asked import names_with_gradients
from flashgen.launch.keywords import modified_of_call
from tests.emulator.test_traced import close, exact, stacked
from tests.support.plan import few_of

Mod = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


def drawn(*sizes: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


IDS = torch.randint(7, (40,), generator=torch.Generator().manual_seed(1))
BF16, FP16 = torch.bfloat16, torch.float16
# Of the captured tensors, a score_mod and the tensors.
CASES: dict[str, tuple[Callable[..., Mod], Tensors]] = {
    "relative-bias": (lambda table: lambda s, b, h, q, k: s + table[h, q - k + 40], (drawn(4, 80),)),
    "slopes": (lambda slopes: lambda s, b, h, q, k: s - slopes[h].float() * 0.1 * (q - k).abs(), (drawn(4, dtype=BF16),)),
    "of-the-batch": (lambda of_key: lambda s, b, h, q, k: s + of_key[b, k], (drawn(2, 40, dtype=FP16),)),
    "same-for-the-batch": (lambda of_key: lambda s, b, h, q, k: s + of_key[b, k], (drawn(1, 40).expand(2, 40),)),
    "by-another": (lambda table: lambda s, b, h, q, k: s + table[IDS[k], h] - table[IDS[q], h - 1], (drawn(7, 4),)),
    "three": (lambda x, y, z: lambda s, b, h, q, k: s + x[q] * y * z[h, k], (drawn(33), drawn(), drawn(40, 4, dtype=BF16).T)),
    "nearest": (lambda table: lambda s, b, h, q, k: s + table[q - 5, k], (drawn(60, 50)[::2, ::5],)),
    "temperature": (lambda t: lambda s, b, h, q, k: s * t[h], (drawn(4).abs() + 0.5,)),
    "cap": (lambda cap: lambda s, b, h, q, k: cap * torch.tanh(s / cap), (torch.tensor(1.5),)),
    "gate": (lambda g: lambda s, b, h, q, k: torch.where(q >= k, s * torch.sigmoid(s * g[q, h]), s * s - 1.0), (drawn(33, 4, dtype=BF16),)),
    "softcap": (lambda t: lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5) + t[h, q - k + 40], (drawn(4, 80),)),
    "hidden": (lambda t: lambda s, b, h, q, k: torch.where(q >= k - 7, s * t[k], -torch.inf), (drawn(40),)),
}


def nearest(mod: Mod) -> Mod:
    """As kernels read elements: PyTorch refuses indices that are out of range."""
    return lambda s, b, h, q, k: mod(s, b, h, q, k.clamp(max=9))


@pytest.mark.parametrize("name", few_of(CASES, "three", "gate"))
def test_gradients_are_those_of_float64(name: str) -> None:
    make, captured = CASES[name]
    leaves = [t.requires_grad_() for t in (stacked(2, 33, 4, 16), stacked(2, 40, 2, 16, seed=1), stacked(2, 40, 2, 16, seed=2))]
    own = [t.detach().requires_grad_() for t in captured]
    doubles = [t.detach().double().requires_grad_() for t in (*leaves, *own)]
    out = flashgen.attention(leaves[0], leaves[1], leaves[2], score_mod=make(*own))
    mod = make(*doubles[3:])
    wanted = exact(doubles[0], doubles[1], doubles[2], nearest(mod) if name == "nearest" else mod, None)
    assert close(out, wanted)
    into = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    found, right = torch.autograd.grad(out, [*leaves, *own], into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True] * len(doubles)
    assert [(g.dtype, g.shape) for g in found[3:]] == [(t.dtype, t.shape) for t in own]


@pytest.mark.parametrize("name", few_of(["relative-bias", "temperature"], "temperature"))
def test_gradients_beside_a_softcap_are_those_of_float64(name: str) -> None:
    """A score_mod gets scores behind the softcap: its tensors' gradients are not the softcap's."""
    make, (captured,) = CASES[name]
    q, own = stacked(2, 33, 4, 16).requires_grad_(), captured.detach().requires_grad_()
    doubles = [t.detach().double().requires_grad_() for t in (q, own)]

    def behind(score: Any, *at: Any) -> Any:
        return make(doubles[1])(1.5 * torch.tanh(score / 1.5), *at)

    out, wanted = flashgen.attention(q, q, q, softcap=1.5, score_mod=make(own)), exact(doubles[0], doubles[0], doubles[0], behind, None)
    assert close(out, wanted)
    into = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    found, right = torch.autograd.grad(out, (q, own), into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True, True]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.slow
def test_gradients_are_those_of_flex_attention() -> None:
    """Its derivatives are of the function that AOTAutograd makes of a score_mod."""
    q, table, factor = stacked(2, 33, 4, 16), drawn(4, 80).requires_grad_(), drawn(4).requires_grad_()

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(score * factor[h]) + table[h, q - k + 40]

    into = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(flashgen.attention(q, q, q, score_mod=mod), (table, factor), into)
    heads_first = q.double().transpose(1, 2)
    try:
        out = flex_attention(heads_first, heads_first, heads_first, score_mod=mod)
        assert isinstance(out, torch.Tensor)
        right = torch.autograd.grad(out, (table, factor), into.double().transpose(1, 2))
    except NotImplementedError as error:
        pytest.skip(f"FlexAttention has no such gradients on the CPU: {error}")
    assert [close(*both) for both in zip(found, right, strict=True)] == [True, True]


def test_only_what_requires_grad_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    q, x, y = stacked(1, 33, 4, 16), drawn(33).requires_grad_(), drawn(40)
    index, threshold = torch.arange(33), drawn(40).requires_grad_()
    asked = []

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + x[index[q]] * y[k] + (threshold[k] > 0) * 0.5

    def names(*arguments: Any) -> str:
        asked.append(names_with_gradients(*arguments))
        return asked[-1]

    monkeypatch.setattr("flashgen.operators.autograd.names_with_gradients", names)
    out = flashgen.attention(q, q, q, score_mod=mod, mask_mod=lambda b, h, q, k: threshold[k] > -1)
    of_x, of_threshold = torch.autograd.grad(out.float().sum(), (x, threshold), allow_unused=True)
    assert of_x is not None
    assert of_threshold is None
    assert len(asked) == 1
    assert " | gradients: t" in asked[0]
    assert asked[0].rpartition(": ")[2].count("t") == 1


@pytest.mark.slow
def test_functions_that_learn_nothing_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, x, y = stacked(1, 33, 4, 16), drawn(33).requires_grad_(), drawn(40)

    def asked(*arguments: Any) -> str:
        raise AssertionError("gradients are asked for")

    monkeypatch.setattr("flashgen.operators.autograd.names_with_gradients", asked)
    with torch.no_grad():
        assert not flashgen.attention(q, q, q, score_mod=lambda s, *at: s + x[at[2]] * y[at[3]]).requires_grad
    (d_q,) = torch.autograd.grad(flashgen.attention(q.requires_grad_(), q, q, score_mod=lambda s, *at: s + y[at[3]]).float().sum(), q)
    assert d_q.isfinite().all()


class Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(drawn(4, 80))

    def mod(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + self.table[h, q - k + 40]

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, causal=True, score_mod=self.mod)


@pytest.mark.slow
def test_pytorchs_ways_to_ask_for_it() -> None:
    q, module = stacked(2, 33, 4, 16), Bias()
    module(q).float().sum().backward()
    assert module.table.grad is not None
    wanted = module.table.grad.clone()
    module(q).float().sum().backward()
    assert torch.allclose(module.table.grad, 2 * wanted, atol=1e-5)
    again = torch.utils.checkpoint.checkpoint(module, q, use_reentrant=False)
    assert torch.allclose(torch.autograd.grad(again.float().sum(), module.table)[0], wanted, atol=1e-5)
    values = {"table": module.table.detach()}
    found = torch.func.grad(lambda values: torch.func.functional_call(module, values, q).float().sum())(values)
    assert torch.allclose(found["table"], wanted, atol=1e-5)
    with pytest.raises(FlashgenError, match="no second derivative"):
        torch.autograd.grad(torch.autograd.grad(module(q).float().sum(), module.table, create_graph=True)[0].sum(), module.table)
    (in_other_layout,) = torch.autograd.grad(
        flashgen.attention(*(q.transpose(1, 2),) * 3, causal=True, layout="bhsd", score_mod=module.mod).float().sum(), module.table
    )
    assert torch.allclose(in_other_layout, wanted, atol=1e-5)


@pytest.mark.slow
def test_lse_has_them_too() -> None:
    q, table = stacked(1, 33, 4, 16), drawn(33).requires_grad_()
    _, lse = flashgen.attention(q, q, q, return_lse=True, score_mod=lambda s, b, h, q, k: s + table[q])
    (found,) = torch.autograd.grad(lse.sum(), table)
    assert torch.allclose(found, torch.full((33,), 4.0), atol=1e-2)  # it adds to the lse of the 4 heads


@pytest.mark.slow
def test_without_scores_they_are_0() -> None:
    q, table = stacked(1, 33, 4, 16), drawn(4).requires_grad_()
    for queries, keys in ((q, q[:, :0]), (q[:, :0], q), (q[:0], q[:0])):
        out = flashgen.attention(queries, keys, keys, score_mod=lambda s, b, h, q, k: s * table[h])
        (found,) = torch.autograd.grad(out.float().sum(), table)
        assert found.tolist() == [0.0] * 4
    out = flashgen.attention(q, q, q, score_mod=lambda s, b, h, q, k: s * table[h], mask_mod=lambda b, h, q, k: h > 1)
    (found,) = torch.autograd.grad(out.float().sum(), table)
    assert [bool(each) for each in found] == [False, False, True, True]


def test_what_cannot_be_is_refused_by_name() -> None:
    q, table = stacked(1, 16, 2, 16), drawn(16).requires_grad_()

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[k] * 2  # twice: else it would be a bias

    with pytest.raises(ArgumentError, match=r"^deterministic must be False for gradients of captured tensors"):
        flashgen.attention(q, q, q, deterministic=True, score_mod=mod).sum().backward()
    of_one = torch.func.grad(lambda q, table: flashgen.attention(q, q, q, score_mod=lambda s, *at: s + table[at[3]] * 2).float().sum(), 1)
    with pytest.raises(ArgumentError, match=r"^gradients of modifiers' tensors must not be mapped by torch\.vmap"):
        torch.vmap(of_one, (0, None))(q[:, None], table)
    _, modified, _ = modified_of_call(False, *(None,) * 10, 0.0, mod, None, top_left=0)
    assert modified
    names = names_with_gradients(modified[0], (True,))
    assert names.endswith(" | gradients: t0)")
    out, lse = torch.ops.flashgen.attention_forward(q, q, q, False, None, "bshd", *modified)
    for wrong in (names.replace("t0)", "t1)"), names.replace("t0)", "t0 t0)"), names.replace(": t0)", ": )")):
        with pytest.raises(ArgumentError, match=r"gradients of traced functions must be of t0, in order"):
            torch.ops.flashgen.attention_tensors_backward(q, q, q, out, lse, out, None, False, None, "bshd", None, wrong, *modified[1:])
    with pytest.raises(ArgumentError, match=r"gradients of captured tensors must be asked of the backward pass; got forward"):
        torch.ops.flashgen.attention_forward(q, q, q, False, None, "bshd", names, *modified[1:])


@pytest.mark.slow
def test_operators_keep_their_contracts() -> None:
    q, table = stacked(1, 16, 2, 16), drawn(2).requires_grad_()
    _, modified, _ = modified_of_call(False, *(None,) * 10, 0.0, lambda s, b, h, q, k: s * table[h], None, top_left=0)
    assert modified
    leaf = q.clone().requires_grad_()
    torch.library.opcheck(torch.ops.flashgen.attention.default, (leaf, q, q, True, None, "bshd", None, *modified))
    out, lse = (t.detach() for t in torch.ops.flashgen.attention_forward(q, q, q, False, None, "bshd", *modified))
    of_tensors = (names_with_gradients(modified[0], (True,)), *modified[1:3], [table.detach()])
    given = (q, q, q, out, lse, out, None, False, None, "bshd", None)
    torch.library.opcheck(torch.ops.flashgen.attention_tensors_backward.default, (*given, *of_tensors))
