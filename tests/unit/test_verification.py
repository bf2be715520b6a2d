"""What verification puts to a kernel, by kernels that are made up: each computes plain attention with one thing wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.operands import Operand
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics import forward
from flashgen.numerics.forward import sample_rows
from flashgen.verification import cases, screen
from flashgen.verification.cases import SHAPES
from flashgen.verification.expected import Expected
from flashgen.verification.screen import Screen, verify_kernel, whole_screen

H200, FAMILY = find_device("h200"), find_family("attention_forward")
Attention = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
PROBLEMS = {mask: Problem(Dtype.BF16, 16, 24, mask) for mask in Mask}


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return forward.plain(q, k, v, causal=causal, scale=scale)


def one_key_less(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return plain(q, k[:, :-1], v[:, :-1], False, scale) if k.shape[1] > 1 and not causal else plain(q, k, v, causal, scale)


def mask_of_the_upper_left(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not causal or not k.shape[1]:
        return plain(q, k, v, causal, scale)
    parts = [plain(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], False, scale) for i in range(q.shape[1])]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2)


def heads_taken_in_turn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Query head h reads key/value head h % heads_kv."""
    turn = torch.arange(q.shape[2]) % k.shape[2]
    return plain(q, k[:, :, turn], v[:, :, turn], causal, scale)


def no_scale(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return plain(q, k, v, causal, 1.0)


def first_batch_only(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return plain(q, k[:1].expand_as(k), v[:1].expand_as(v), causal, scale)


def overflow_of_large_logits(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """A softmax that does not subtract the maximum, in an exponential that ends at 2^24."""
    out, lse = plain(q, k, v, causal, scale)
    return out, lse.clamp(max=24 * math.log(2))


def rows_without_keys_left_as_they_were(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = plain(q, k, v, causal, scale)
    out[(lse == -torch.inf).transpose(1, 2)] = math.nan
    return out, lse


def no_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = plain(q, k, v, causal, scale)
    return out, lse.fill_(math.nan)


ALWAYS_SCREENED: dict[Attention, set[Mask]] = {
    one_key_less: {Mask.FULL},
    mask_of_the_upper_left: {Mask.CAUSAL},
    heads_taken_in_turn: set(Mask),
    no_scale: set(Mask),
    first_batch_only: set(Mask),
    rows_without_keys_left_as_they_were: {Mask.CAUSAL},
    no_lse: set(Mask),
}


@pytest.fixture
def made_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem, Attention], Any]:
    """A kernel on the CPU that computes what a function does."""

    def launch(kernel: Any, tensors: Tensors, **_: object) -> None:
        tensors.poison()
        q, causal = tensors["q"], kernel.spec.problem.mask is Mask.CAUSAL
        out, lse = kernel.attention(q, tensors["k"], tensors["v"], causal, q.shape[3] ** -0.5)
        tensors["out"].copy_(out)
        tensors["lse"].copy_(lse)

    def made(problem: Problem, attention: Attention) -> Any:
        spec = SimpleNamespace(family=FAMILY, problem=problem, config=FAMILY.default(problem, H200.target))
        return SimpleNamespace(spec=spec, attention=attention)

    monkeypatch.setattr(screen, "run_on_cpu", launch)
    return made


@pytest.fixture
def some_shapes(monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[int, int, int, int, int], ...]:
    """In place of all, of which the longer ones take seconds."""
    some = tuple(shape for shape in SHAPES if shape[3] * shape[4] < 40000)
    monkeypatch.setattr(cases, "SHAPES", some)
    return some


@pytest.mark.parametrize("mask", Mask)
def test_every_shape_is_run_at_ordinary_and_large_logits(made_of: Callable[..., Any], some_shapes: tuple[Any, ...], mask: Mask) -> None:
    results = verify_kernel(made_of(PROBLEMS[mask], plain))
    assert all(result.verdict.ok for result in results)
    sizes = [(w.batch, w.heads_q, w.heads_kv, w.len_q, w.len_kv, r.magnitude) for r in results for w in (r.workload,)]
    assert sorted(sizes) == sorted(
        [
            *((*shape, magnitude) for shape in some_shapes for magnitude in (1.0, 16.0)),
            *((*shape, 1.0) for shape in (cases.LONG, cases.COARSE, cases.FAR)),
            (*cases.HUGE, 2.0**40),
        ]
    )


def test_operands_that_are_all_dense_are_not_said_to_have_been_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(Dtype.FP32, operation="softmax")
    tensors = Tensors.random(problem, Workload(1, 1, 1, 2, 3), torch.Generator())
    assert cases.FAR in whole_screen(problem, "cpu").special
    monkeypatch.setattr(Operand, "is_strided", False)
    assert cases.FAR not in whole_screen(problem, "cpu").special
    with pytest.raises(ArgumentError, match=r"^operands must have one whose strides a caller chooses; got x, y, which are dense$"):
        tensors.far()


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("fault", ALWAYS_SCREENED, ids=lambda fault: str(fault.__name__))
def test_a_candidate_with_a_fault_does_not_pass_the_screen(made_of: Callable[..., Any], fault: Attention, mask: Mask) -> None:
    """The two small workloads that each candidate of a tune must pass are enough for these."""
    screen = Screen(PROBLEMS[mask], "cpu")
    assert all(result.verdict.ok for result in screen.judge(made_of(PROBLEMS[mask], plain)))
    results = screen.judge(made_of(PROBLEMS[mask], fault))
    assert all(result.verdict.ok for result in results) is (mask not in ALWAYS_SCREENED[fault])


@pytest.mark.usefixtures("some_shapes")
def test_large_logits_are_verified(made_of: Callable[..., Any]) -> None:
    results = verify_kernel(made_of(PROBLEMS[Mask.FULL], overflow_of_large_logits))
    wrong = {result.magnitude for result in results if not result.verdict.ok}
    assert wrong == {16.0, 2.0**40}


def test_the_screen_is_the_same_in_every_process() -> None:
    """What one candidate of a tune had to pass is what all have to, and a failure can be repeated."""
    screens = []
    for seed in (3, 4):
        torch.manual_seed(seed)  # of what is drawn without a generator
        screens.append(Screen(PROBLEMS[Mask.FULL], "cpu", special=[cases.HUGE, cases.COARSE]).cases(group_unit=1))
    for one, other in zip(*screens, strict=True):
        for name in ("q", "k", "v"):
            assert torch.equal(one.tensors[name], other.tensors[name])


def test_shapes_are_awkward() -> None:
    workloads = [Workload(*shape) for shape in SHAPES]
    assert {w.len_q for w in workloads} >= {1, 63, 127, 255}, "a length of one, and one off a tile"
    assert {w.len_kv for w in workloads} >= {0, 1, 65, 129, 257}
    assert any(w.len_q > w.len_kv > 0 for w in workloads), "rows that see no key under a causal mask"
    assert {w.heads_q // w.heads_kv for w in workloads} >= {1, 2, 8}
    assert any(w.heads_kv == 1 < w.heads_q for w in workloads)
    assert max(w.len_kv for w in workloads) >= 8 * 256, "eight tiles of any size"
    assert any(w.len_q == w.len_kv == 1 for w in workloads)
    assert all(w.batch * w.heads_q * w.len_q >= 128 for w in workloads), "rows enough for the rule's statistics"


@pytest.mark.parametrize("spoilt", ["out", "lse"])
def test_sampled_rows_are_judged_where_they_are(spoilt: str) -> None:
    problem, workload = Problem(Dtype.FP16, 16, 8, Mask.CAUSAL), Workload(3, 4, 2, 40, 50)
    tensors = Tensors.random(problem, workload, torch.Generator().manual_seed(0))
    assert tensors["out"].isnan().all(), "what a kernel does not write shows"
    assert tensors["lse"].isnan().all()
    rows = sample_rows(workload, 20, 1, True)
    expected = Expected.of(tensors, {"scale": 0.25}, rows)
    assert not expected.judge(tensors).ok
    out, lse = plain(tensors["q"], tensors["k"], tensors["v"], True, 0.25)
    batch, head, row = rows.unbind(1)
    tensors["out"][batch, row, head] = out[batch, row, head]
    tensors["lse"][batch, head, row] = lse[batch, head, row]
    assert expected.judge(tensors).ok, "the others are not looked at"
    b, h, i = rows[7].tolist()
    (tensors["out"][b, i, h] if spoilt == "out" else tensors["lse"][b, h, i : i + 1]).add_(0.5)
    assert not expected.judge(tensors).ok
