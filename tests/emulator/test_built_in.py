"""Functions of which a call's softcap, ALiBi, bias or mask is taken out: the call is then that with the keyword, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.launch.keywords import modified_of_call
from tests.support.plan import few_of

Mod = Callable[..., Any]
BATCH, HEADS, LEN_Q, LEN_KV, DIM = 2, 4, 33, 40, 16


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))


Q, SHORT = stacked(BATCH, LEN_Q, HEADS, DIM), stacked(BATCH, LEN_KV, HEADS, DIM, seed=1)
SLOPES = torch.rand(HEADS, generator=torch.Generator().manual_seed(1))
BATCH_SLOPES = torch.rand(BATCH, HEADS, generator=torch.Generator().manual_seed(2))
BIAS = stacked(BATCH, HEADS, LEN_Q, LEN_Q, seed=3)
TABLE, WIDE = torch.randn(LEN_Q, 50, generator=torch.Generator().manual_seed(5)), stacked(BATCH, 50, 60, seed=6)
MASK = torch.rand(BATCH, HEADS, LEN_Q, LEN_Q, generator=torch.Generator().manual_seed(4)) < 0.7
PADDING = torch.arange(LEN_Q) < torch.tensor([[20], [LEN_Q]])
CAP, HALF = 2.0, 0.5
KEYWORDS = ("window", "softcap", "alibi_slopes", "sinks", "bias", "mask", "key_padding_mask", "chunk", "prefix_len")


def names(k: torch.Tensor = Q, scale: float | None = None, causal: Any = False, **options: Any) -> tuple[str, ...]:
    """The names of a call's modifiers; those of traced functions without their text."""
    given: dict[str, Any] = dict.fromkeys(KEYWORDS) | options
    call = (BATCH, HEADS, LEN_Q, k.shape[1]), Q, scale
    told = modified_of_call(causal, **given, top_left=LEN_Q - k.shape[1], call=call)[1]
    text = told[0] if told else ""
    return (*(name for name in text.partition("traced(")[0].split(",") if name), *(["traced"] if "traced(" in text else []))


softcap: Mod = lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)  # noqa: E731
alibi: Mod = lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()  # noqa: E731
behind: Mod = lambda s, b, h, q, k: s + SLOPES[h] * (k - q)  # noqa: E731
from_head: Mod = lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (k - q)  # noqa: E731
causal_mask: Mod = lambda b, h, q, k: q >= k  # noqa: E731
OF_HEADS = torch.exp2(-(torch.arange(HEADS) + 1) * 8.0 / HEADS)

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softcap": ({"score_mod": softcap}, {"softcap": CAP}),
    "softcap-by-reciprocal": ({"score_mod": lambda s, b, h, q, k: 3 * torch.tanh(s * (1 / 3))}, {"softcap": 3.0}),
    "alibi": ({"score_mod": alibi}, {"alibi_slopes": SLOPES}),
    "alibi-of-batch": ({"score_mod": lambda s, b, h, q, k: s - BATCH_SLOPES[b, h] * (q - k).abs()}, {"alibi_slopes": BATCH_SLOPES}),
    "alibi-behind": ({"score_mod": behind, "mask_mod": causal_mask}, {"alibi_slopes": SLOPES, "causal": True}),
    "alibi-behind-window": ({"score_mod": behind, "window": (9, -1)}, {"alibi_slopes": SLOPES, "window": (9, -1)}),
    "alibi-from-head": ({"score_mod": from_head, "causal": "top_left"}, {"alibi_slopes": OF_HEADS, "causal": True}),
    "bias": ({"score_mod": lambda s, b, h, q, k: s + BIAS[b, h, q, k]}, {"bias": BIAS}),
    "bias-of-fp32-keys-first": ({"score_mod": lambda s, b, h, q, k: s + TABLE[k, q]}, {"bias": TABLE.mT[:LEN_Q]}),
    "bias-without-heads": ({"score_mod": lambda s, b, h, q, k: s + WIDE[b, q, k]}, {"bias": WIDE[:, None, :LEN_Q, :LEN_Q]}),
    "mask": ({"mask_mod": lambda b, h, q, k: MASK[b, h, q, k]}, {"mask": MASK}),
    "padding": ({"mask_mod": lambda b, h, q, k: PADDING[b, k] & (q >= k)}, {"key_padding_mask": PADDING, "causal": True}),
    "all": (
        {
            "score_mod": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) - SLOPES[h] * (q - k).abs() + BIAS[b, h, q, k],
            "mask_mod": lambda b, h, q, k: (q - k < 20) & MASK[b, h, q, k],
        },
        {"softcap": CAP, "alibi_slopes": SLOPES, "bias": BIAS, "mask": MASK, "window": (19, None)},
    ),
    "beside-its-own": ({"score_mod": alibi, "softcap": CAP, "bias": BIAS}, {"softcap": CAP, "alibi_slopes": SLOPES, "bias": BIAS}),
}


@pytest.mark.parametrize("name", few_of(SAME, "alibi-from-head", "all"))
def test_a_form_is_the_keyword(name: str) -> None:
    functions, keywords = SAME[name]
    assert names(**functions) == names(**keywords)
    found, wanted = (flashgen.attention(Q, Q, Q, return_lse=True, **options) for options in (functions, keywords))
    assert all(map(torch.equal, found, wanted))


def test_lengths_and_masks_decide_whether_distances_are_those_of_alibi() -> None:
    ahead = LEN_KV - LEN_Q
    aligned: Mod = lambda s, b, h, q, k: s - SLOPES[h] * (q + ahead - k).abs()  # noqa: E731
    aligned_behind: Mod = lambda s, b, h, q, k: s + SLOPES[h] * (k - q - ahead)  # noqa: E731
    taken, left = ("alibi",), ("traced",)
    assert names(score_mod=alibi) == taken
    assert names(SHORT, score_mod=alibi) == left
    assert names(SHORT, score_mod=aligned) == taken
    assert names(score_mod=aligned) == left
    assert names(score_mod=behind) == left
    assert names(score_mod=behind, causal=True) == taken
    assert names(score_mod=behind, causal="top_left") == taken
    assert names(SHORT, score_mod=behind, causal=True) == left
    assert names(SHORT, score_mod=behind, mask_mod=causal_mask) == ("window", *left)
    assert names(SHORT, score_mod=aligned_behind, causal=True) == taken
    assert names(SHORT, score_mod=aligned_behind, mask_mod=causal_mask) == ("window", *taken)
    assert names(score_mod=behind, mask_mod=lambda b, h, q, k: q + 1 >= k) == ("window", *left)
    assert names(score_mod=behind, window=(None, -2)) == ("window", *taken)
    assert names(score_mod=behind, window=(2, None)) == ("window", *left)
    prefix = torch.tensor([3, 7], dtype=torch.int32)
    assert names(score_mod=behind, causal=True, prefix_len=prefix) == ("prefix_len", *left)
    assert names(score_mod=alibi, causal=True, prefix_len=prefix) == ("alibi", "prefix_len")
    out, lse = flashgen.attention(Q, SHORT, SHORT, score_mod=aligned_behind, causal=True, return_lse=True)
    wanted = flashgen.attention(Q, SHORT, SHORT, alibi_slopes=SLOPES, causal=True, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


@pytest.mark.slow
def test_what_is_left_stays_behind_what_is_taken_out() -> None:
    plus_row: Mod = lambda s, b, h, q, k: softcap(s, b, h, q, k) - SLOPES[h] * (q - k).abs() + TABLE[q, 0]  # noqa: E731
    assert names(score_mod=plus_row) == ("softcap", "alibi", "traced")
    found, lse = flashgen.attention(Q, Q, Q, score_mod=plus_row, return_lse=True)
    wanted, of_builtin = flashgen.attention(Q, Q, Q, softcap=CAP, alibi_slopes=SLOPES, return_lse=True)
    assert torch.allclose(found.float(), wanted.float(), atol=2**-7)
    assert torch.allclose(lse, of_builtin + TABLE[:, 0], atol=1e-5)
    bent: Mod = lambda s, b, h, q, k: torch.relu(softcap(s, b, h, q, k)) - SLOPES[h] * (q - k).abs()  # noqa: E731
    assert names(score_mod=bent) == ("softcap", "traced")
    capped_last: Mod = lambda s, b, h, q, k: softcap(alibi(s, b, h, q, k), b, h, q, k)  # noqa: E731
    assert names(score_mod=capped_last) == ("traced",)
    of_documents: Mod = lambda b, h, q, k: MASK[b, h, q, k] & (q % 3 == k % 3)  # noqa: E731
    assert names(mask_mod=of_documents) == ("boolean_mask", "traced")
    at = torch.arange(LEN_Q)
    found = flashgen.attention(Q, Q, Q, mask_mod=of_documents)
    assert torch.equal(found, flashgen.attention(Q, Q, Q, mask=MASK & (at[:, None] % 3 == at % 3)))


def test_what_a_call_has_of_its_own_is_not_taken_out() -> None:
    """A score_mod acts behind the keywords: what comes before these in the chain cannot come out of it."""
    left = ("traced",)
    owns: dict[str, Any] = {"softcap": 3.0, "alibi_slopes": SLOPES, "bias": BIAS}
    for own, value in owns.items():
        assert names(score_mod=softcap, **{own: value})[-1:] == left
    assert names(score_mod=alibi, alibi_slopes=SLOPES) == ("alibi", *left)
    assert names(score_mod=lambda s, b, h, q, k: s + BIAS[b, h, q, k], bias=BIAS) == ("bias", *left)
    assert names(mask_mod=lambda b, h, q, k: MASK[b, h, q, k], mask=MASK) == ("boolean_mask", *left)
    assert names(mask_mod=lambda b, h, q, k: MASK[b, h, q, k], key_padding_mask=PADDING) == ("boolean_mask", *left)
    twice = flashgen.attention(Q, Q, Q, score_mod=alibi, alibi_slopes=SLOPES, return_lse=True)
    once = flashgen.attention(Q, Q, Q, alibi_slopes=2 * SLOPES, return_lse=True)
    assert torch.allclose(twice[1], once[1], atol=1e-4)


def test_tensors_decide_whether_kernels_take_them() -> None:
    def plus(table: torch.Tensor) -> tuple[str, ...]:
        return names(score_mod=lambda s, b, h, q, k: s + table[b, h, q, k])

    assert plus(BIAS) == ("bias",)
    assert plus(BIAS.float()) == ("bias_fp32",)
    assert plus(torch.zeros(3, 5, 64, 64)) == ("bias_fp32",)  # only a part of it is read
    assert plus(torch.zeros(1, 1, LEN_Q, 1)) == ("bias_fp32",)  # indices beyond read the nearest element
    for table in (BIAS.half(), BIAS[:, :, :-1], BIAS[:, :3], torch.zeros(BATCH, HEADS, LEN_Q, LEN_Q, device="meta")):
        assert plus(table) == ("traced",)

    def minus(slopes: torch.Tensor) -> tuple[str, ...]:
        return names(score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())

    assert minus(torch.rand(HEADS + 2)) == ("alibi",)
    for slopes in (SLOPES[:3], SLOPES[:1], torch.rand(2 * HEADS)[::2], SLOPES.clone().requires_grad_()):
        assert minus(slopes) == ("traced",)
    with torch.no_grad():
        assert minus(SLOPES.clone().requires_grad_()) == ("alibi",)


def test_numbers_decide_whether_it_is_a_softcap() -> None:
    def capped(outside: float, inside: float) -> tuple[str, ...]:
        return names(score_mod=lambda s, b, h, q, k: outside * torch.tanh(s / inside))

    assert capped(30.0, 30.0) == ("softcap",)
    for outside, inside in ((30.0, 29.0), (-30.0, -30.0), (0.0, 0.0), (float("inf"), float("inf")), (float("nan"), 30.0), (1e30, 1e30)):
        assert capped(outside, inside) == ("traced",)
    assert names(score_mod=softcap, scale=1e-30) == ("traced",)
    assert names(score_mod=lambda s, b, h, q, k: 30.0 * torch.tanh(s * 0.03333), scale=0.1) == ("traced",)


@pytest.mark.parametrize("name", few_of(["softcap", "alibi", "bias"], "softcap", "bias"))
def test_gradients_are_those_of_the_keywords(name: str) -> None:
    def gradients(*leaves: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flashgen.attention(q, k, v, **options).sum(), leaves)

    q, k, v = (stacked(BATCH, LEN_Q, HEADS, DIM, seed=seed).requires_grad_() for seed in range(3))
    bias = BIAS.clone().requires_grad_()
    cases: dict[str, tuple[Mod, dict[str, Any], list[torch.Tensor]]] = {
        "softcap": (softcap, {"softcap": CAP}, []),
        "alibi": (alibi, {"alibi_slopes": SLOPES}, []),
        "bias": (lambda s, b, h, q, k: s + bias[b, h, q, k], {"bias": bias}, [bias]),
    }
    score_mod, keywords, leaves = cases[name]
    found, wanted = gradients(q, k, v, *leaves, score_mod=score_mod), gradients(q, k, v, *leaves, **keywords)
    assert all(map(torch.equal, found, wanted))


def test_a_bias_with_a_gradient_comes_out_beside_a_softcap() -> None:
    bias = BIAS.clone().requires_grad_()
    both: Mod = lambda s, b, h, q, k: softcap(s, b, h, q, k) + bias[b, h, q, k]  # noqa: E731
    assert sorted(names(score_mod=both)) == ["bias", "softcap"]


def test_slopes_of_heads_are_computed_once() -> None:
    def slopes(heads: float) -> torch.Tensor:
        score_mod: Mod = lambda s, b, h, q, k: s - torch.exp2(-((h + 1) * 8.0 / heads)) * (q - k).abs()  # noqa: E731
        given: dict[str, Any] = dict.fromkeys(KEYWORDS) | {"score_mod": score_mod}
        _, told, _ = modified_of_call(False, **given, top_left=0, call=((BATCH, HEADS, LEN_Q, LEN_Q), Q, None))
        assert told
        assert told[0] == "alibi"
        return told[3][0]

    with torch.inference_mode():
        first = slopes(4.0)
    assert not first.is_inference()
    assert slopes(4.0) is first
    assert torch.allclose(first, OF_HEADS, rtol=1e-6)
    assert torch.allclose(slopes(8.0), OF_HEADS.sqrt(), rtol=1e-6)


def test_slopes_of_heads_stay_in_functions_where_somebody_traces() -> None:
    q = Q.clone()
    found = torch.vmap(lambda q: flashgen.attention(q, q, q, score_mod=from_head, causal=True))(q[None])
    wanted = flashgen.attention(Q, Q, Q, score_mod=from_head, causal=True)
    assert torch.allclose(found[0].float(), wanted.float(), atol=2**-6)
    with torch._subclasses.FakeTensorMode():
        assert names(score_mod=from_head, causal=True) == ("traced",)


def test_vmap_takes_a_bias_that_all_entries_share() -> None:
    q = Q[:, None]
    plus: Mod = lambda s, b, h, q, k: s + BIAS[b, h, q, k]  # noqa: E731
    found = torch.vmap(lambda q: flashgen.attention(q, q, q, score_mod=plus))(q)
    assert torch.equal(found[:, 0], flashgen.attention(Q, Q, Q, bias=BIAS[:1]))


def test_what_is_remembered_is_of_no_values() -> None:
    """Other tensors and numbers of a function that has been called count, and so do changes of a tensor that it captures."""
    slopes, cap, kept = SLOPES.clone(), 30.0, MASK
    score_mod: Mod = lambda s, b, h, q, k: cap * torch.tanh(s / cap) - slopes[h] * (q - k).abs()  # noqa: E731
    mask_mod: Mod = lambda b, h, q, k: kept[b, h, q, k]  # noqa: E731

    def told() -> tuple[Any, ...]:
        given: dict[str, Any] = dict.fromkeys(KEYWORDS) | {"score_mod": score_mod, "mask_mod": mask_mod}
        modified = modified_of_call(False, **given, top_left=0, call=((BATCH, HEADS, LEN_Q, LEN_Q), Q, None))[1]
        assert modified
        return modified[0], *modified[2], *modified[3]

    for _ in range(2):
        assert all(
            one is other or one == other for one, other in zip(told(), ("softcap,alibi,boolean_mask", cap, slopes, kept), strict=True)
        )
        slopes, cap, kept = slopes.clone(), cap + 1, ~kept
    assert told()[0] == "softcap,alibi,boolean_mask"
    slopes.requires_grad_()
    assert told()[0].startswith("softcap,boolean_mask,traced(score: add(score, neg(mul(t0:fp32[head],")
    slopes.requires_grad_(False).resize_(2)
    assert told()[0].startswith("softcap,boolean_mask,traced(")
    cap = -30.0
    assert told()[0].startswith("boolean_mask,traced(")
