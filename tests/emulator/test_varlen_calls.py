"""`flashgen.attention_varlen` of CPU tensors, by kernels in the emulator: each of PyTorch's ways of asking gets the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
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


@pytest.mark.slow
def test_a_score_mod_and_gradients_of_what_it_captures() -> None:
    """By the oracle of each sequence alone."""
    tensors = CASE.make("cpu")
    given = keywords(CASE, tensors)
    table, of_sequence = torch.randn(CASE.heads[0], 64).requires_grad_(), torch.randn(len(CASE.lengths)).requires_grad_()
    leaves = {name: given.pop(name).detach().nan_to_num().requires_grad_() for name in "qkv"}

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + table[head, (query - key) % 64] + of_sequence[batch]

    out, lse = flashgen.attention_varlen(**leaves, **given, score_mod=score_mod, return_lse=True)
    into, of_lse = torch.randn(out.shape), torch.randn(lse.shape)
    found = torch.autograd.grad((out.float() * into).sum() + (lse * of_lse)[lse.isfinite()].sum(), [*leaves.values(), table, of_sequence])
    wide = {
        name: leaf.detach().double().requires_grad_() for name, leaf in (*leaves.items(), ("table", table), ("of_sequence", of_sequence))
    }
    total: Any = torch.zeros(())
    for one in sequences_of(tensors):
        q, k, v = (wide[name][rows].transpose(0, 1) for name, rows in (("q", one.queries), ("k", one.keys), ("v", one.keys)))
        k, v = (side.repeat_interleave(CASE.heads[0] // CASE.heads[1], 0) for side in (k, v))
        queries, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        s = q @ k.mT * CASE.scale + wide["table"][:, (queries - keys) % 64] + wide["of_sequence"][one.number]
        seen = (keys <= queries + k.shape[1] - q.shape[1]).any(1)
        s = s.masked_fill(keys > queries + k.shape[1] - q.shape[1], -math.inf)[:, seen]
        total = total + ((s.softmax(-1) @ v) * into[one.queries].transpose(0, 1)[:, seen]).sum()
        total = total + (s.logsumexp(-1) * of_lse[:, one.queries][:, seen]).sum()
        torch.testing.assert_close(lse[:, one.queries][:, seen], s.logsumexp(-1).float(), rtol=1e-4, atol=1e-4)
    for gradient, wanted in zip(found, torch.autograd.grad(total, [*wide.values()]), strict=True):
        torch.testing.assert_close(gradient.float(), wanted.float(), rtol=0.02, atol=0.02 * float(wanted.abs().max()))
    call: Any = torch.compile(lambda **more: flashgen.attention_varlen(score_mod=score_mod, **more), fullgraph=True, backend="aot_eager")
    assert call(**leaves, **given).equal(out)


def test_a_mask_mod_is_refused() -> None:
    tensors = CASE.make("cpu")
    with pytest.raises(flashgen.ArgumentError, match=r"^mask_mod must be left out of flashgen\.attention_varlen: masks by functions"):
        flashgen.attention_varlen(**keywords(CASE, tensors), mask_mod=lambda batch, head, query, key: query >= key)


def test_sinks_without_keys_have_gradients_of_lse() -> None:
    """Each row's is that of its sink."""
    q, k, sinks = torch.zeros(9, 4, 16, dtype=torch.bfloat16), torch.zeros(0, 2, 16, dtype=torch.bfloat16), torch.zeros(4)
    ends, nothing = torch.tensor([0, 4, 7], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    sinks.requires_grad_()
    _, lse = flashgen.attention_varlen(q, k, k, cu_seqlens_q=ends, cu_seqlens_kv=nothing, scale=0.3, sinks=sinks, return_lse=True)
    (found,) = torch.autograd.grad(lse[:, :7].sum(), sinks)
    assert found.tolist() == [7.0] * 4
