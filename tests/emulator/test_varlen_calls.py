"""`flashgen.attention_varlen` of CPU tensors, by kernels in the emulator: each of PyTorch's ways of asking gets the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import flashgen
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.launch import packed_arguments
from flashgen.launch.keywords import modified_of_call
from flashgen.launch.tensors import Tensors
from flashgen.numerics.sequences import sequences_of
from tests.support.packed_cases import PackedCase, with_wrong_values

CASE = PackedCase(
    name="",
    problem=Problem(Dtype.BF16, 16, 16, Mask.CAUSAL, sequences=Sequences.PACKED),
    heads=(4, 2),
    lengths=((70, 80), (1, 1), (0, 9), (150, 40), (5, 0), (33, 61)),
    unused=((6, 11), (0, 0), (0, 3), (0, 7), (2, 0), (33, 4)),
    outside=((3, 1), (20, 9)),
    expected="short",
    apart=True,
    scale=0.3,
    magnitude=1.0,
    seed=7,
)
ALIBI = replace(CASE, problem=replace(CASE.problem, modifiers=("alibi", "window")), scale=0.25, seed=8)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def keywords(case: PackedCase, tensors: Tensors) -> dict[str, Any]:
    """What `attention_varlen` is called with."""
    w = case.workload
    given: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in ("out", "lse")}
    given |= {"causal": case.problem.mask is Mask.CAUSAL, "scale": case.scale, "max_seqlen_q": w.len_q, "max_seqlen_kv": w.len_kv}
    return given | ({"window": (w.window_left, w.window_right)} if "window" in case.problem.modifiers else {})


def judged(case: PackedCase, tensors: Tensors, found: Any) -> str:
    """What is wrong with out and lse, empty if nothing."""
    for name, tensor in zip(("out", "lse"), found, strict=True):
        tensors[name].copy_(tensor)
    verdict = case.judge(tensors)
    return "" if verdict.ok else verdict.message


@pytest.mark.parametrize("case", [CASE, pytest.param(ALIBI, marks=pytest.mark.slow)], ids=["plain", "alibi"])
def test_calls_are_right_whoever_asks(case: PackedCase) -> None:
    tensors = case.make("cpu")
    given = keywords(case, tensors)
    found = flashgen.attention_varlen(**given, return_lse=True)
    assert judged(case, tensors, found) == ""
    assert flashgen.attention_varlen(**given).equal(found[0])
    call: Any = torch.compile(flashgen.attention_varlen, fullgraph=True, backend="aot_eager", dynamic=True)
    for one, wanted in zip(call(**given, return_lse=True), found, strict=True):
        assert one.equal(wanted)


def test_the_operator_passes_pytorchs_check() -> None:
    tensors = CASE.make("cpu")
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
    given = [tensors[name].nan_to_num() if name in "qkv" else tensors[name] for name in names]
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_forward.default, (*given, 30, None, True, 0.3))


@pytest.mark.parametrize("seed", range(3))
def test_wrong_boundaries_reach_nothing_outside(seed: int) -> None:
    """The emulator ends at the first access outside of a tensor."""
    tensors = with_wrong_values(CASE.make("cpu"), seed)
    assert judged(CASE, tensors, flashgen.attention_varlen(**keywords(CASE, tensors), return_lse=True)) == ""


def test_there_may_be_nothing_to_see() -> None:
    q, k = torch.zeros(9, 4, 16, dtype=torch.bfloat16), torch.zeros(0, 2, 16, dtype=torch.bfloat16)
    of_q, of_k = torch.tensor([0, 4, 7], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for boundaries in ((of_q, of_k), (of_q[:1], of_k[:1])):
        out, lse = flashgen.attention_varlen(
            q, k, k, cu_seqlens_q=boundaries[0], cu_seqlens_kv=boundaries[1], causal=True, scale=0.3, return_lse=True
        )
        assert not out.any()
        assert (lse == -math.inf).all()


def test_nested_tensors() -> None:
    parts = [torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(length)).to(torch.bfloat16) for length in (40, 0, 65)]
    q: Any = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out: Any = flashgen.attention_varlen(q, q, q, causal=True, scale=0.3)
    ends = q.offsets().int()
    values = q.values()
    assert out.values().equal(
        flashgen.attention_varlen(values, values, values, cu_seqlens_q=ends, cu_seqlens_kv=ends, causal=True, scale=0.3)
    )


@pytest.mark.slow
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("learned", [(), ("sinks",)])
def test_gradients(with_lse: bool, learned: tuple[str, ...]) -> None:
    case = replace(CASE, problem=replace(CASE.problem, operation="backward", modifiers=learned))
    tensors = case.make("cpu")
    given = {name: tensor for name, tensor in keywords(case, tensors).items() if not name.startswith("d_")}
    leaves = {name: given.pop(name).detach().requires_grad_() for name in ("q", "k", "v", *learned)}
    out, lse = flashgen.attention_varlen(**leaves, **given, return_lse=True)
    into = [(out, tensors["d_out"].nan_to_num()), *([(lse, torch.randn(lse.shape))] if with_lse else [])]
    found = torch.autograd.grad([one for one, _ in into], [*leaves.values()], [d for _, d in into])
    for name, gradient in zip(leaves, found, strict=True):
        tensors[f"d_{name}"].copy_(gradient)
    by_name = {name: tensor for name, tensor in tensors.items() if name != "d_lse"}
    made = Tensors(case.problem, case.workload, {**by_name, **({"d_lse": into[1][1]} if with_lse else {})})
    assert case.judge(made).ok


SINKS = replace(CASE, problem=replace(CASE.problem, modifiers=("sinks",)), seed=9)


def with_gradients(of: tuple[str, ...], call: Any = flashgen.attention_varlen, **leaf_options: Any) -> list[torch.Tensor]:
    """Those of a sum of out and lse where sinks join."""
    tensors = SINKS.make("cpu")
    given = keywords(SINKS, tensors)
    leaves = {name: given[name].detach().nan_to_num().to(**(leaf_options if name == "sinks" else {})) for name in ("q", "k", "v", "sinks")}
    for name in of:
        leaves[name].requires_grad_()
    out, lse = call(**{**given, **leaves}, return_lse=True)
    total = out.float().sum() + lse[lse.isfinite()].sum()
    return [*torch.autograd.grad(total, [leaves[name] for name in of])]


@pytest.mark.slow
def test_sinks_have_gradients_alone_and_beside_others_and_in_other_types() -> None:
    every = with_gradients(("q", "k", "v", "sinks"))
    assert every[3].any()
    assert with_gradients(("sinks",))[0].equal(every[3])
    assert with_gradients(("v",))[0].equal(every[2])
    call: Any = torch.compile(flashgen.attention_varlen, fullgraph=True, backend="aot_eager")
    for one, wanted in zip(with_gradients(("q", "k", "v", "sinks"), call), every, strict=True):
        assert one.equal(wanted)
    (of_16_bits,) = with_gradients(("sinks",), dtype=torch.bfloat16)
    assert of_16_bits.dtype == torch.bfloat16
    torch.testing.assert_close(of_16_bits.float(), every[3], rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_the_operator_with_gradients_of_tensors_passes_pytorchs_check() -> None:
    tensors = replace(SINKS, problem=replace(SINKS.problem, operation="backward")).make("cpu")
    names = ("q", "k", "v", "out", "lse", "d_out", "d_lse", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
    given = [tensors[name].nan_to_num() if tensors[name].is_floating_point() else tensors[name] for name in names]
    more: tuple[Any, ...] = (30, None, True, 0.3, False, "sinks", [], [], [tensors["sinks"]])
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_tensors_backward.default, (*given, *more))


def test_others_have_no_gradients() -> None:
    tensors = ALIBI.make("cpu")
    given = keywords(ALIBI, tensors)
    given["alibi_slopes"].requires_grad_()
    with pytest.raises(flashgen.ArgumentError, match="alibi_slopes must not require grad"):
        flashgen.attention_varlen(**given)


Changed = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scaled scores [heads, queries, keys] in float64, the number of their sequence, queries and keys: what they become."""


def differs_from_each_sequence_alone(case: PackedCase, changed: Changed, learned: dict[str, torch.Tensor], **options: Any) -> str:
    """What is wrong with out, lse, or gradients of q, k, v and `learned`, leaves that `options` may capture; empty if nothing.

    By autograd of plain PyTorch in float64, where `changed` reads the leaves by `WIDE`.
    """
    tensors = case.make("cpu")
    given = keywords(case, tensors)
    leaves = {name: given.pop(name).detach().nan_to_num().requires_grad_() for name in "qkv"}
    out, lse = flashgen.attention_varlen(**leaves, **given, **options, return_lse=True)
    into, of_lse = torch.randn(out.shape), torch.randn(lse.shape)
    total = (out.float() * into).sum() + (lse * of_lse)[lse.isfinite()].sum()
    found = torch.autograd.grad(total, [*leaves.values(), *learned.values()])
    WIDE.clear()
    WIDE.update({name: leaf.detach().double().requires_grad_() for name, leaf in (*leaves.items(), *learned.items())})
    total = torch.zeros((), dtype=torch.float64) + sum(leaf.sum() * 0.0 for leaf in WIDE.values())
    for one in sequences_of(tensors):
        q, k, v = (WIDE[name][rows].transpose(0, 1) for name, rows in (("q", one.queries), ("k", one.keys), ("v", one.keys)))
        k, v = (side.repeat_interleave(case.heads[0] // case.heads[1], 0) for side in (k, v))
        queries, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        s = changed(q @ k.mT * case.scale, one.number, queries, keys)
        if case.problem.mask is Mask.CAUSAL:
            s = s.masked_fill(keys > queries + k.shape[1] - q.shape[1], -math.inf)
        seen = (s > -math.inf).any(2)
        s = s[seen]
        p, own_out, own_lse = s.softmax(-1), out[one.queries].transpose(0, 1), lse[:, one.queries]
        by_row = torch.einsum("nk,nkd->nd", p, v[seen.nonzero()[:, 0]])
        if own_out[~seen].any() or (own_lse[~seen] != -math.inf).any():
            return f"sequence {one.number} has rows that see nothing and are not 0"
        if not torch.allclose(own_out[seen].double(), by_row, rtol=0.02, atol=0.02):
            return f"out of sequence {one.number}"
        if not torch.allclose(own_lse[seen].double(), s.logsumexp(-1), rtol=1e-4, atol=1e-4):
            return f"lse of sequence {one.number}"
        total = total + (by_row * into[one.queries].transpose(0, 1)[seen]).sum() + (s.logsumexp(-1) * of_lse[:, one.queries][seen]).sum()
    for name, gradient, wanted in zip(WIDE, found, torch.autograd.grad(total, [*WIDE.values()]), strict=True):
        if not torch.allclose(gradient.double(), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max())):
            return f"gradient of {name}"
    call: Any = torch.compile(lambda **more: flashgen.attention_varlen(**options, **more), fullgraph=True, backend="aot_eager")
    again, again_lse = call(**leaves, **given, return_lse=True)
    if not again.equal(out) or not again_lse.equal(lse):
        return "compiled"
    later = torch.autograd.grad((again.float() * into).sum(), [*leaves.values(), *learned.values()])
    return "" if all(one.isfinite().all() for one in later) else "compiled gradients"


WIDE: dict[str, torch.Tensor] = {}


@pytest.mark.slow
def test_a_score_mod_and_gradients_of_what_it_captures() -> None:
    table, of_sequence = torch.randn(CASE.heads[0], 64).requires_grad_(), torch.randn(len(CASE.lengths)).requires_grad_()

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + table[head, (query - key) % 64] + of_sequence[batch]

    def changed(s: torch.Tensor, number: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return s + WIDE["table"][:, (queries - keys) % 64] + WIDE["of_sequence"][number]

    learned = {"table": table, "of_sequence": of_sequence}
    assert differs_from_each_sequence_alone(CASE, changed, learned, score_mod=score_mod) == ""


@pytest.mark.slow
@pytest.mark.parametrize("mask", Mask)
def test_a_mask_mod_and_what_it_captures(mask: Mask) -> None:
    """A window in it is of positions, not of lengths: those of queries and keys differ."""
    ends = torch.tensor([30, 1, 9, 25, 0, 50])

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key < 40 + head) & (query >= key) & (key < ends[batch])

    def changed(s: torch.Tensor, number: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(len(s))[:, None, None]
        return s.masked_fill(~((queries - keys < 40 + heads) & (queries >= keys) & (keys < ends[number])), -math.inf)

    case = replace(CASE, problem=replace(CASE.problem, mask=mask))
    assert differs_from_each_sequence_alone(case, changed, {}, mask_mod=mask_mod) == ""


LONGEST_Q, LONGEST_KV = 100, 61  # of tensors for each score: there are longer sequences, and shorter ones


def of_scores(tensor: torch.Tensor, number: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What a sequence has of it: [heads or 1, queries, keys], 0 beyond its elements."""
    own = tensor.expand(len(CASE.lengths), *tensor.shape[1:])[number]
    for dim, wanted in ((1, len(queries)), (2, len(keys))):
        size = own.shape[dim]
        own = own.narrow(dim, 0, min(size, wanted)) if size > 1 else own.expand(*own.shape[:dim], wanted, *own.shape[dim + 1 :])
        if own.shape[dim] < wanted:
            beyond = own.new_zeros([wanted - own.shape[dim] if i == dim else n for i, n in enumerate(own.shape)])
            own = torch.cat([own, beyond], dim)
    return own


def with_nothing_beyond(tensor: torch.Tensor) -> torch.Tensor:
    """The same with NaN where a sequence of CASE has no query or no key."""
    for number, one in enumerate(sequences_of(CASE.make("cpu"))):
        if tensor.shape[0] > 1:
            for dim, length in ((1, one.queries.stop - one.queries.start), (2, one.keys.stop - one.keys.start)):
                if tensor.shape[dim + 1] > length and tensor.shape[dim + 1] > 1:
                    tensor[number].narrow(dim, length, tensor.shape[dim + 1] - length).fill_(math.nan)
    return tensor


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(6, 4, LONGEST_Q, LONGEST_KV), (6, 1, 1, LONGEST_KV), (1, 4, LONGEST_Q, 1)])
def test_a_mask(sizes: tuple[int, ...]) -> None:
    """It may lie in memory in any way, and nothing outside of it is read."""
    mask = (torch.rand(*reversed(sizes)) < 0.7).permute(3, 2, 1, 0)

    def changed(s: torch.Tensor, number: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(~of_scores(mask, number, queries, keys), -math.inf)

    assert differs_from_each_sequence_alone(CASE, changed, {}, mask=mask) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((6, 4, LONGEST_Q, LONGEST_KV), torch.float32),
        ((6, 1, LONGEST_Q, 64), torch.bfloat16),
        ((1, 4, LONGEST_Q, LONGEST_KV), torch.float32),
        ((1, 1, 1, LONGEST_KV), torch.float32),
        ((6, 4, LONGEST_Q, 1), torch.bfloat16),
    ],
)
def test_a_bias_and_its_gradient(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient is summed over the sequences that share it, and 0 where a sequence has no score; in memory there may be anything."""
    bias = with_nothing_beyond(torch.randn(sizes)).to(dtype).requires_grad_()

    def changed(s: torch.Tensor, number: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return s + of_scores(WIDE["bias"], number, queries, keys)

    assert differs_from_each_sequence_alone(CASE, changed, {"bias": bias}, bias=bias) == ""


@pytest.mark.slow
def test_a_bias_beside_a_mask_and_a_mask_mod() -> None:
    bias, mask = torch.randn(6, 1, 80, 61).requires_grad_(), torch.rand(1, 4, 1, 61) < 0.8

    def changed(s: torch.Tensor, number: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen = of_scores(mask, number, queries, keys) & ((queries + number) % 3 != keys % 3)
        return (s + of_scores(WIDE["bias"], number, queries, keys)).masked_fill(~seen, -math.inf)

    options: dict[str, Any] = {"mask_mod": lambda batch, head, query, key: (query + batch) % 3 != key % 3, "mask": mask, "bias": bias}
    assert differs_from_each_sequence_alone(CASE, changed, {"bias": bias}, **options) == ""


def test_deterministic_gradients_of_a_bias_that_sequences_share_are_refused() -> None:
    tensors = CASE.make("cpu")
    bias = torch.zeros(1, 4, 150, 80, requires_grad=True)
    given = keywords(CASE, tensors)
    out = flashgen.attention_varlen(**given, bias=bias, deterministic=True)
    with pytest.raises(flashgen.ArgumentError, match="deterministic must be False for the gradient of a bias that is the same for many"):
        out.float().sum().backward()


def test_sequences_longer_than_a_mask_are_told_where_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    q, ends = torch.zeros(50, 2, 16, dtype=torch.bfloat16), torch.tensor([0, 7, 50], dtype=torch.int32)
    given: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    flashgen.attention_varlen(q, q, q, **given, mask=torch.ones(2, 1, 1, 43, dtype=torch.bool))
    message = r"^mask must have elements of all 43 tokens of sequence 1 along len_kv; got 42"
    with pytest.raises(flashgen.ArgumentError, match=message):
        flashgen.attention_varlen(q, q, q, **given, mask=torch.ones(2, 1, 43, 42, dtype=torch.bool))


@pytest.mark.slow
def test_the_operators_with_a_bias_pass_pytorchs_check() -> None:
    tensors = replace(CASE, problem=replace(CASE.problem, operation="backward")).make("cpu")
    of_call = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
    bias, mask = torch.randn(6, 1, 90, 70), torch.ones(1, 4, 90, 1, dtype=torch.bool)
    more: tuple[Any, ...] = ("bias_fp32,boolean_mask", [], [], [bias, mask])
    names: tuple[str, ...] = ("q", "k", "v", *of_call)
    given = [tensors[name].nan_to_num() if name in "qkv" else tensors[name] for name in names]
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_forward.default, (*given, 90, 70, True, 0.3, *more))
    names = ("q", "k", "v", "out", "lse", "d_out", "d_lse", *of_call)
    given = [tensors[name].nan_to_num() if tensors[name].is_floating_point() else tensors[name] for name in names]
    torch.library.opcheck(torch.ops.flashgen.attention_varlen_tensors_backward.default, (*given, 90, 70, True, 0.3, False, *more))


def test_nested_tensors_with_a_mask() -> None:
    parts = [torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(length)).to(torch.bfloat16) for length in (40, 0, 65)]
    q: Any = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ends, values, mask = q.offsets().int(), q.values(), torch.rand(3, 1, 65, 65) < 0.5
    out: Any = flashgen.attention_varlen(q, q, q, mask=mask)
    assert out.values().equal(flashgen.attention_varlen(values, values, values, cu_seqlens_q=ends, cu_seqlens_kv=ends, mask=mask))


def test_a_causal_mask_mod_is_the_calls_where_lengths_are_the_same() -> None:
    """And else stays a function, as its mask is not aligned by lengths."""

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    told: dict[str, Any] = {"window": None, "softcap": None, "alibi_slopes": None, "sinks": None, "mask_mod": mask_mod}
    assert modified_of_call(False, **told, top_left=0)[:2] == (True, ())
    is_causal, (names, *_), _ = cast(Any, modified_of_call(False, **told, top_left=None))
    assert not is_causal
    assert names.startswith("traced")
    q = torch.randn(50, 2, 16).to(torch.bfloat16)
    ends = torch.tensor([0, 7, 50], dtype=torch.int32)
    causal = flashgen.attention_varlen(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, causal=True)
    for other in (ends, ends.clone()):
        found = flashgen.attention_varlen(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=other, mask_mod=mask_mod)
        torch.testing.assert_close(found, causal, atol=1e-2, rtol=1e-2)


@pytest.mark.slow
def test_sinks_without_keys_have_gradients_of_lse() -> None:
    """Each row's is that of its sink."""
    q, k, sinks = torch.zeros(9, 4, 16, dtype=torch.bfloat16), torch.zeros(0, 2, 16, dtype=torch.bfloat16), torch.zeros(4)
    ends, nothing = torch.tensor([0, 4, 7], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    sinks.requires_grad_()
    _, lse = flashgen.attention_varlen(q, k, k, cu_seqlens_q=ends, cu_seqlens_kv=nothing, scale=0.3, sinks=sinks, return_lse=True)
    (found,) = torch.autograd.grad(lse[:, :7].sum(), sinks)
    assert found.tolist() == [7.0] * 4


@pytest.mark.slow
def test_an_axis_that_a_bias_is_expanded_along_has_no_end() -> None:
    """As one of size 1: a sequence may be longer, and the gradient is the sum over it, whatever comes of the expansion."""
    ends, q = torch.tensor([0, 40, 50], dtype=torch.int32), torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = []
    for size in (1, 24):
        bias = torch.randn(2, 1, 1, 24, generator=torch.Generator().manual_seed(4)).requires_grad_()
        out = flashgen.attention_varlen(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, bias=bias.expand(2, 1, size, 24))
        found.append((out, *torch.autograd.grad(out.float().square().sum(), bias)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_score_mod_may_capture_what_is_shorter_than_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody looks at values, too."""
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    q, ends, slopes = torch.ones(50, 2, 16).bfloat16(), torch.tensor([0, 7, 50], dtype=torch.int32), torch.zeros(2)
    out = flashgen.attention_varlen(
        q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, score_mod=lambda score, batch, head, query, key: score + slopes[head] * key
    )
    torch.testing.assert_close(out, q)


@pytest.mark.slow
def test_the_dropout_mask_is_that_of_each_sequence() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(tokens, 2, 16, generator=generator).bfloat16() for tokens in (24, 40))
    ends_q, ends_kv = torch.tensor([0, 7, 7, 24], dtype=torch.int32), torch.tensor([0, 9, 12, 40], dtype=torch.int32)
    where: dict[str, Any] = {"cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv, "max_seqlen_q": 17, "max_seqlen_kv": 28}
    out, lse, kept = flashgen.attention_varlen(q, k, k, **where, dropout_p=0.4, return_lse=True, return_dropout_mask=True)
    assert kept.shape == (3, 2, 17, 28)
    for b, (of_q, of_kv) in enumerate(zip(ends_q.tolist()[:-1], ends_kv.tolist()[:-1], strict=True)):
        queries, keys = slice(of_q, int(ends_q[b + 1])), slice(of_kv, int(ends_kv[b + 1]))
        s = torch.einsum("qhd,khd->hqk", q[queries].double(), k[keys].double()) / 4
        p = torch.softmax(s, -1) * kept[b, :, : s.shape[1], : s.shape[2]] / 0.6
        assert torch.allclose(out[queries].double(), torch.einsum("hqk,khd->qhd", p, k[keys].double()), atol=0.03)
        assert torch.allclose(lse[:, queries].double(), s.logsumexp(-1), atol=1e-3)
