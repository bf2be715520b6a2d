"""The reference against brute force and PyTorch, and the rule: what it accepts and what it rejects."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.workload import Workload
from flashgen.numerics import forward
from flashgen.numerics.forward import exact_attention, plain, sample_rows, softmax
from flashgen.numerics.rule import Verdict
from tests.support.judging import judge_forward

SIZES = [(1, 1), (1, 9), (9, 9), (7, 20), (20, 7), (13, 1)]  # len_q, len_kv


def inputs(
    len_q: int, len_kv: int, *, batch: int = 2, heads: tuple[int, int] = (4, 2), width: int = 16, width_v: int = 24, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, len_q, heads[0], width), (batch, len_kv, heads[1], width), (batch, len_kv, heads[1], width_v))
    return [torch.randn(shape, generator=generator).to(torch.float16) for shape in shapes]


def brute_force(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, len_q, heads, _ = q.shape
    len_kv, heads_kv = k.shape[1], k.shape[2]
    out = torch.zeros(batch, len_q, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, len_q), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            head_kv = h // (heads // heads_kv)
            for i in range(len_q):
                seen = [j for j in range(len_kv) if not causal or j <= i + len_kv - len_q]
                if seen:
                    weights = [math.exp(scale * float(q[b, i, h].double() @ k[b, j, head_kv].double())) for j in seen]
                    lse[b, h, i] = math.log(sum(weights))
                    out[b, i, h] = sum(w * v[b, j, head_kv].double() for w, j in zip(weights, seen, strict=True)) / sum(weights)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("len_q", "len_kv"), SIZES)
def test_reference_is_brute_force(len_q: int, len_kv: int, causal: bool) -> None:
    q, k, v = inputs(len_q, len_kv)
    for given, wanted in zip(exact_attention(q, k, v, causal=causal, scale=0.3), brute_force(q, k, v, causal, 0.3), strict=True):
        assert given.dtype == torch.float64
        torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("len_q", "len_kv"), [(50, 50), (30, 70)])
def test_reference_is_sdpa(len_q: int, len_kv: int, causal: bool) -> None:
    q, k, v = inputs(len_q, len_kv)
    mask = causal_lower_right(len_q, len_kv) if causal else None
    with sdpa_kernel(SDPBackend.MATH):
        x, y, z = (t.double().transpose(1, 2) for t in (q, k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(x, y, z, attn_mask=mask, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(exact_attention(q, k, v, causal=causal, scale=0.2)[0], wanted.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_no_keys_and_no_queries() -> None:
    q, k, v = inputs(5, 0)
    for attention in (exact_attention, plain):
        out, lse = attention(q, k, v, causal=True, scale=1.0)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    q, k, v = inputs(0, 5)
    assert exact_attention(q, k, v, causal=True, scale=1.0)[0].shape == (2, 0, 4, 24)
    assert plain(q, k, v, causal=True, scale=1.0)[1].shape == (2, 4, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", [exact_attention, plain])
def test_rows_are_rows_of_the_whole(attention: type, causal: bool) -> None:
    q, k, v = inputs(40, 30)
    out, lse = attention(q, k, v, causal=causal, scale=0.25)
    rows = sample_rows(Workload(2, 4, 2, 40, 30), 60, 3, causal)
    b, h, i = rows.unbind(1)
    some, some_lse = attention(q, k, v, causal=causal, scale=0.25, rows=rows)
    assert some.dtype == out.dtype
    torch.testing.assert_close(some, out[b, i, h], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(some_lse, lse[b, h, i], rtol=1e-6, atol=1e-6)


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(37, 50)
    whole = exact_attention(q, k, v, causal=True, scale=0.25)
    rows = sample_rows(Workload(2, 4, 2, 37, 50), 30, 3, True)
    whole_rows = exact_attention(q, k, v, causal=True, scale=0.25, rows=rows)
    for budget in (1, 300, 1000, 4000):
        monkeypatch.setattr(forward, "_SCORES_AT_ONCE", budget)
        for given, wanted in zip(exact_attention(q, k, v, causal=True, scale=0.25), whole, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-13, atol=1e-13)
        for given, wanted in zip(exact_attention(q, k, v, causal=True, scale=0.25, rows=rows), whole_rows, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rows", [None, sample_rows(Workload(2, 4, 2, 37, 50), 30, 3, True)], ids=["whole", "rows"])
@pytest.mark.parametrize("attention", [exact_attention, plain])
def test_scores_at_once_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch, attention: Any, rows: Tensor | None) -> None:
    """That memory stays bounded shows in no result. Chunks much smaller than the budget would be slow."""
    q, k, v = inputs(37, 50)
    sizes: list[int] = []

    def noted(scores: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        sizes.append(scores.numel())
        return softmax(scores, *others)

    monkeypatch.setattr(forward, "softmax", noted)
    together = 4 * 37 if rows is None else max(Counter((b, h // 2) for b, h, _ in rows.tolist()).values())  # queries of a product
    for budget in (1, 300, 1000, 4000, 10**6):
        sizes.clear()
        monkeypatch.setattr(forward, "_SCORES_AT_ONCE", budget)
        attention(q, k, v, causal=True, scale=0.25, rows=rows)
        assert max(sizes) <= max(budget, 50 * (2 if rows is None else 1)), "one query of a group's heads, or one row, is the least"
        assert max(sizes) >= min(budget // 2, 50 * together)


def test_strides_do_not_matter() -> None:
    q, k, v = inputs(20, 30)
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert views[0].stride() != q.stride()
    for given, wanted in zip(
        exact_attention(*views, causal=True, scale=0.25), exact_attention(q, k, v, causal=True, scale=0.25), strict=True
    ):
        assert torch.equal(given, wanted)


def test_plain_keeps_scores_and_rounds_results() -> None:
    q, k, v = inputs(64, 64)
    out, lse = plain(q, k, v, causal=False, scale=0.25)
    ref = exact_attention(q, k, v, causal=False, scale=0.25)
    assert out.dtype == torch.float16
    assert lse.dtype == torch.float32
    assert float((lse - ref[1]).abs().max()) < 2e-6
    assert 0 < float((out - ref[0]).abs().max()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_rounds_probabilities_and_nothing_before(dtype: torch.dtype) -> None:
    q, k, v = (t[:1, :, :1].to(dtype) for t in inputs(30, 40, heads=(1, 1)))
    scores = q[0, :, 0].float() @ k[0, :, 0].float().T * 0.25
    probabilities = torch.softmax(scores, -1)
    out, lse = plain(q, k, v, causal=False, scale=0.25)
    assert torch.equal(out[0, :, 0], (probabilities.to(dtype).float() @ v[0, :, 0].float()).to(dtype))
    assert not torch.equal(out[0, :, 0], (probabilities @ v[0, :, 0].float()).to(dtype))
    torch.testing.assert_close(lse[0, 0], torch.logsumexp(scores, -1), rtol=1e-6, atol=1e-6)


class OnGpu(Tensor):
    """A tensor on the CPU that says that it lies on a GPU, and whose matrix products note their sizes."""

    is_cuda = True
    products: ClassVar[list[tuple[int, int]]] = []  # rows, columns

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.bmm:
            assert {operand.dtype for operand in args} == {torch.float16}
            assert kwargs == {"out_dtype": torch.float32}
            cls.products.append((args[0].shape[1], args[1].shape[2]))
            return torch.matmul(*(operand.float() for operand in args))
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("len_q", "len_kv"), [(1, 1), (31, 64), (64, 65), (127, 70)])
def test_matrix_units_get_whole_tiles(monkeypatch: pytest.MonkeyPatch, len_q: int, len_kv: int) -> None:
    monkeypatch.setattr(OnGpu, "products", [])
    q, k, v = inputs(len_q, len_kv)
    found = plain(*(tensor.as_subclass(OnGpu) for tensor in (q, k, v)), causal=False, scale=0.3)
    rows, keys = -(-2 * len_q // 64) * 64, -(-len_kv // 64) * 64  # of the two query heads of a group
    assert OnGpu.products == [(rows, keys), (rows, 64)] * 2, "scores and output of each batch entry"
    for given, wanted in zip(found, plain(q, k, v, causal=False, scale=0.3), strict=True):
        torch.testing.assert_close(given.as_subclass(Tensor), wanted, rtol=1e-3, atol=1e-3)


def test_bad_shapes_name_the_argument() -> None:
    q, k, v = inputs(4, 4)
    for bad, message in (
        ((q[0], k, v), "q must have 4 dimensions"),
        ((q, k[..., :8], v), "k must have q's batch 2 and width 16; got 2 and 8"),
        ((q, k, v[:, :3]), "v must have k's batch, length and heads"),
        ((q[:, :, :3], k, v), "k must have a number of heads that divides q's 3; got 2"),
    ):
        with pytest.raises(ArgumentError, match=message):
            exact_attention(*bad, causal=False, scale=1.0)
    with pytest.raises(ArgumentError, match="rows must be an int64 tensor"):
        exact_attention(q, k, v, causal=False, scale=1.0, rows=torch.zeros(3, 2, dtype=torch.int64))


class Judged:
    """One problem with its reference, and a right result to spoil."""

    def __init__(self, causal: bool = True, len_q: int = 90, len_kv: int = 70) -> None:
        self.q, self.k, self.v = inputs(len_q, len_kv, width=64, width_v=64)
        self.causal, self.scale = causal, 0.125
        self.ref = exact_attention(self.q, self.k, self.v, causal=causal, scale=self.scale)
        self.pt = plain(self.q, self.k, self.v, causal=causal, scale=self.scale)

    def of(self, out: Tensor | None = None, lse: Tensor | None = None) -> Verdict:
        return judge_forward(self.pt[0] if out is None else out, self.pt[1] if lse is None else lse, self.ref, self.pt, torch.float16)


@pytest.fixture(params=[True, False], ids=["causal", "full"])
def judged(request: pytest.FixtureRequest) -> Judged:
    return Judged(causal=request.param)


@pytest.mark.parametrize("index", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize(("bound", "factor"), [("max", 2.0), ("rms", 1.5)])
def test_judge_allows_so_many_times_what_plain_errs_by(index: int, bound: str, factor: float) -> None:
    """Plain errs by 2^-10 everywhere. An error at one place alone meets the bound of the maximum, one everywhere that of the mean."""
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(1, 64, 2, 32, generator=generator).double(), torch.randn(1, 2, 64, generator=generator).double()
    rounded, unit = ref[index].float(), 2.0**-10
    noise = 2 * float(((rounded + 0.3 - 0.3) - rounded).abs().max())
    pt = ref[0] + unit, ref[1] - unit
    where = torch.zeros_like(ref[index])
    where.view(-1)[: 1 if bound == "max" else None] = 1
    for times, passes in ((1.0, True), (factor * 0.999, True), (factor * 1.001, False)):
        given = list(pt)
        given[index] = ref[index] + times * unit * where
        verdict = judge_forward(given[0], given[1], ref, pt, torch.float32)
        assert verdict.ok is passes, f"{times} times: {verdict.message}"
    name = ("out", "lse")[index]
    assert verdict.message.startswith(f"{name} {bound} error {times * unit:.3e} exceeds ")
    assert ";" not in verdict.message, "the other bounds hold"
    allowed = (
        verdict.bounds["out"].max.allowed,
        verdict.bounds["out"].rms.allowed,
        verdict.bounds["lse"].max.allowed,
        verdict.bounds["lse"].rms.allowed,
    )
    assert allowed[2 * index : 2 * index + 2] == pytest.approx((2 * unit + noise, 1.5 * unit + noise), rel=1e-9)
    assert 0 < noise < 1e-3 * unit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_judge_allows_the_rounding_of_the_element_type(dtype: torch.dtype) -> None:
    """Where plain errs by nothing, noise is all that is allowed: of the element type for out, of fp32 for lse."""
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(1, 64, 2, 32, generator=generator).to(dtype).double(), torch.randn(1, 2, 64, generator=generator).double()
    noise = 2 * float((((r := ref[0].to(dtype)) + 0.3 - 0.3) - r).double().abs().max())
    noise_lse = 2 * float((((r := ref[1].float()) + 0.3 - 0.3) - r).double().abs().max())
    verdict = judge_forward(ref[0], ref[1], ref, ref, dtype)
    assert (
        verdict.bounds["out"].max.allowed,
        verdict.bounds["out"].rms.allowed,
        verdict.bounds["lse"].max.allowed,
        verdict.bounds["lse"].rms.allowed,
    ) == (
        noise,
        noise,
        noise_lse,
        noise_lse,
    )
    assert 0 < noise_lse < noise
    for index, allowed in ((0, noise), (1, noise_lse)):
        given = list(ref)
        given[index] = ref[index].clone()
        given[index].view(-1)[7] += 0.99 * allowed
        assert judge_forward(given[0], given[1], ref, ref, dtype).ok
        given[index].view(-1)[7] += 0.02 * allowed
        assert not judge_forward(given[0], given[1], ref, ref, dtype).ok


def test_judge_measures_the_greatest_error_and_the_root_of_the_mean_square(judged: Judged) -> None:
    generator = torch.Generator().manual_seed(1)
    out, lse = (x.double() + 1e-3 * torch.randn(x.shape, generator=generator) ** 3 for x in judged.ref)
    verdict = judged.of(out, lse)
    seen = judged.ref[1] != -torch.inf
    errors = (out - judged.ref[0]).flatten(), (lse - judged.ref[1])[seen]
    expected = [number for e in errors for number in (e.abs().max().item(), math.sqrt(sum(x * x for x in e.tolist()) / len(e)))]
    assert [
        verdict.bounds["out"].max.error,
        verdict.bounds["out"].rms.error,
        verdict.bounds["lse"].max.error,
        verdict.bounds["lse"].rms.error,
    ] == pytest.approx(expected, rel=1e-9)


def test_judge_accepts_plain_and_the_rounded_reference(judged: Judged) -> None:
    verdict = judged.of()
    assert verdict.ok, verdict.message
    assert verdict.bounds["out"].max.error * 2 <= verdict.bounds["out"].max.allowed
    assert verdict.message == "within all bounds"
    assert judged.of(judged.ref[0].half(), judged.ref[1].float()).ok


def test_judge_names_the_bound_with_its_numbers(judged: Judged) -> None:
    verdict = judged.of(lse=judged.pt[1] + 0.1)
    assert not verdict.ok
    assert f"lse max error {verdict.bounds['lse'].max.error:.3e} exceeds {verdict.bounds['lse'].max.allowed:.3e}" in verdict.message
    assert "lse rms error" in verdict.message
    assert "out" not in verdict.message
    assert dataclasses.is_dataclass(verdict)


def test_judge_rejects_a_slightly_wrong_scale(judged: Judged) -> None:
    out, lse = plain(judged.q, judged.k, judged.v, causal=judged.causal, scale=judged.scale * 1.001)
    assert not judged.of(out, lse).ok


def test_judge_rejects_one_missing_key() -> None:
    judged = Judged(causal=False)
    out, lse = plain(judged.q, judged.k[:, :-1], judged.v[:, :-1], causal=False, scale=judged.scale)
    assert not judged.of(out).ok
    assert not judged.of(lse=lse).ok


def test_judge_rejects_a_mask_off_by_one() -> None:
    judged = Judged(len_q=70)
    out, lse = plain(judged.q, judged.k[:, 1:], judged.v[:, 1:], causal=True, scale=judged.scale)
    assert not judged.of(out, lse).ok


def test_judge_rejects_lse_in_base_2(judged: Judged) -> None:
    assert not judged.of(lse=judged.pt[1] * math.log2(math.e)).ok


def test_judge_rejects_a_scaled_output(judged: Judged) -> None:
    assert not judged.of((judged.pt[0].float() * (1 + 2**-7)).half()).ok


def test_judge_rejects_swapped_rows(judged: Judged) -> None:
    assert not judged.of(judged.pt[0][:, [*range(88), 89, 88]]).ok


def test_judge_rejects_one_nan(judged: Judged) -> None:
    for index, name in enumerate(("out", "lse")):
        spoilt = [x.clone() for x in judged.pt]
        spoilt[index].view(-1)[-1] = torch.nan
        verdict = judged.of(*spoilt)
        assert not verdict.ok
        assert f"{name} is NaN in 1 of" in verdict.message


def test_judge_passes_nothing_by_bounds_that_are_no_numbers() -> None:
    judged = Judged()
    for index in range(2):
        pt = [x.clone() for x in judged.pt]
        pt[index].view(-1)[-1] = torch.nan
        verdict = judge_forward(*judged.pt, judged.ref, (pt[0], pt[1]), torch.float16)
        assert not verdict.ok
        assert f"{('out', 'lse')[index]} max error" in verdict.message


def test_judge_wants_infinities_in_their_places() -> None:
    judged = Judged()
    unseen = judged.ref[1] == -torch.inf
    assert unseen.any()
    assert not unseen.all()
    for lse in (
        judged.pt[1].masked_fill(unseen, torch.inf),
        judged.pt[1].masked_fill(unseen, -1e30),
        judged.pt[1].masked_fill(~unseen, -torch.inf),
    ):
        verdict = judged.of(lse=lse)
        assert not verdict.ok
        assert "lse is infinite in the wrong places" in verdict.message


def test_judge_wants_zeros_where_no_key_is_seen() -> None:
    judged = Judged()
    out = judged.pt[0].clone()
    out[0, 0, 0, 0] = 1e-4
    verdict = judged.of(out)
    assert not verdict.ok
    assert "out is not 0 in 1 rows that see no key" in verdict.message


def test_judge_where_nothing_is_seen_or_there_is_nothing() -> None:
    q, k, v = inputs(5, 0)
    ref, pt = exact_attention(q, k, v, causal=False, scale=1.0), plain(q, k, v, causal=False, scale=1.0)
    assert judge_forward(*pt, ref, pt, torch.float16).ok
    assert not judge_forward(pt[0] + 1, pt[1], ref, pt, torch.float16).ok
    q, k, v = inputs(0, 5)
    ref, pt = exact_attention(q, k, v, causal=False, scale=1.0), plain(q, k, v, causal=False, scale=1.0)
    assert judge_forward(*pt, ref, pt, torch.float16).ok


def test_judge_where_plain_is_exact() -> None:
    q, k, v = inputs(1, 1)
    ref, pt = exact_attention(q, k, v, causal=False, scale=1.0), plain(q, k, v, causal=False, scale=1.0)
    assert torch.equal(pt[0].double(), ref[0])
    assert judge_forward(*pt, ref, pt, torch.float16).ok
    assert not judge_forward(pt[0] * 1.05, pt[1], ref, pt, torch.float16).ok


def test_judge_of_rows(judged: Judged) -> None:
    rows = sample_rows(Workload(2, 4, 2, 90, 70), 40, 0, judged.causal)
    ref, pt = (f(judged.q, judged.k, judged.v, causal=judged.causal, scale=judged.scale, rows=rows) for f in (exact_attention, plain))
    assert judge_forward(*pt, ref, pt, torch.float16).ok
    assert not judge_forward(pt[0].roll(1, 0), pt[1], ref, pt, torch.float16).ok


def test_judge_refuses_other_shapes(judged: Judged) -> None:
    with pytest.raises(ArgumentError, match="out must have the reference's shape"):
        judged.of(judged.pt[0][:1])


@pytest.mark.parametrize("other", [lambda t: t.mT, lambda t: t.flatten(), lambda t: t[None]], ids=["transposed", "flat", "of 1 more"])
@pytest.mark.parametrize("index", range(4))
def test_judge_refuses_as_many_elements_in_another_shape(judged: Judged, index: int, other: Callable[[Tensor], Tensor]) -> None:
    name = ("out", "lse", "plain out", "plain lse")[index]
    given = [*judged.pt, *judged.pt]
    given[index] = other(given[index])
    with pytest.raises(ArgumentError, match=f"^{name} must have the reference's shape "):
        judge_forward(given[0], given[1], judged.ref, (given[2], given[3]), torch.float16)


def test_sample_rows() -> None:
    workload = Workload(3, 8, 2, 100, 40)
    rows = sample_rows(workload, 50, 1, True)
    assert rows.shape == (50, 3)
    assert rows.dtype == torch.int64
    triples = {tuple(row) for row in rows.tolist()}
    assert {(b, h, i) for b, h in ((0, 0), (2, 7)) for i in (0, 60, 99)} <= triples
    assert all(0 <= b < 3 and 0 <= h < 8 and 0 <= i < 100 for b, h, i in triples)
    assert len(triples) > 40
    assert torch.equal(rows, sample_rows(workload, 50, 1, True))
    assert not torch.equal(rows, sample_rows(workload, 50, 2, True))
    assert sample_rows(Workload(3, 8, 2, 0, 40), 50, 1, False).shape == (0, 3)
    with pytest.raises(ArgumentError, match="count must be an integer >= 6"):
        sample_rows(workload, 5, 1, False)
