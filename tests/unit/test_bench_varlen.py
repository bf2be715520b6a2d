"""The benchmark's cells of packed sequences, and its peers in them, on the CPU."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import api, varlen
from flashgen.bench import documents, packed
from flashgen.bench.check import CellCheck
from flashgen.bench.eager import Eager
from flashgen.bench.packed import dense_cell, document_lengths, packed_boundaries, packed_documents, packed_flops
from flashgen.bench.packed_peers import FlashgenEqual
from flashgen.bench.peer import Peer
from flashgen.bench.peers import Fa4, Flashgen
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaMath
from flashgen.cells import Cell
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.numerics.forward import plain
from flashgen.numerics.sequences import packed_attention

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SHORTEST", 4)
    document_lengths.cache_clear()


def cell_of(mask: Mask = Mask.CAUSAL, operation: str = "forward") -> Cell:
    return Cell(Problem(Dtype.FP16, 16, 16, mask, operation, sequences=Sequences.PACKED), packed_documents(5, 4, 40))


def attention(*given: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Of q, k, v and the boundaries."""
    tensors = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"), given, strict=True))
    if torch.is_grad_enabled():
        return differentiable(*given, causal=causal)
    return packed_attention(plain, cell_of(Mask.CAUSAL if causal else Mask.FULL).problem, tensors, {"scale": 0.25}, None)


def differentiable(*given: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same by products whose derivatives PyTorch knows, of as many queries as keys."""
    q, k, v, of_q, _ = given
    outs, sums = [], []
    for begin, end in pairwise(of_q.tolist()):
        s = torch.einsum("ihd,jhd->hij", q[begin:end].float(), k[begin:end].float()) * 0.25
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), -torch.inf) if causal else s
        outs.append(torch.einsum("hij,jhd->ihd", s.softmax(-1), v[begin:end].float()).to(q.dtype))
        sums.append(s.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def fault_of(peer: Peer, cell: Cell) -> str:
    """What is wrong with the peer in a cell, empty if nothing."""
    measuring = Runner({}, CPU, 0, 1)
    inputs = measuring.inputs(cell, peer.layout)
    with torch.no_grad():
        return peer.fault(CellCheck(cell, measuring.inputs(cell, "bshd")), peer.prepare(cell, CPU)(inputs), inputs)


def test_lengths_follow_from_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SHORTEST", 128)
    document_lengths.cache_clear()
    lengths = document_lengths(16, 8192)
    assert len(lengths) == 16
    assert min(lengths) < 256
    assert 4096 < max(lengths) <= 8192
    assert packed_documents(16, 4, 8192) == Workload(16, 4, 4, 8192, 8192, tokens_q=sum(lengths), tokens_kv=sum(lengths))


def test_boundaries_are_those_of_the_lengths() -> None:
    cell, lengths = cell_of(), document_lengths(5, 40)
    found = packed_boundaries(cell, CPU)
    assert found["cu_seqlens_q"] is found["cu_seqlens_kv"]
    assert found["cu_seqlens_q"].dtype == torch.int32
    assert found["cu_seqlens_q"].tolist() == [sum(lengths[:i]) for i in range(6)]
    assert packed_boundaries(dense_cell(cell), CPU) == {}


@pytest.mark.parametrize("mask", Mask)
def test_work_is_that_of_all_documents(mask: Mask) -> None:
    cell, lengths = cell_of(mask), document_lengths(5, 40)
    assert packed_flops(cell) == sum(4 * 4 * 16 * length**2 for length in lengths) * (0.5 if mask is Mask.CAUSAL else 1.0)
    assert documents.flops(cell) == packed_flops(cell)
    equal = dense_cell(cell)
    assert not equal.problem.is_packed
    assert equal.flops == pytest.approx(packed_flops(cell), rel=0.05)
    assert equal.workload.batch * equal.workload.len_q == pytest.approx(sum(lengths), rel=0.25)


class Plain(Flashgen):
    """Plain PyTorch in place of kernels."""

    def __init__(self) -> None:
        self._attention: Any = None
        self.given: list[dict[str, Any]] = []

        def call(*qkv: Tensor, return_lse: bool = False, **more: Any) -> Any:
            self.given.append(more)
            both = attention(*qkv, more["cu_seqlens_q"], more["cu_seqlens_kv"], causal=more["causal"])
            return both if return_lse else both[0]

        self._varlen: Any = call

    def note(self, cell: Cell, device: torch.device) -> str:
        return ""


@pytest.mark.parametrize(("mask", "operation"), [(Mask.FULL, "forward"), (Mask.CAUSAL, "forward"), (Mask.CAUSAL, "backward")])
def test_flashgen_is_called_with_boundaries(mask: Mask, operation: str) -> None:
    peer = Plain()
    assert fault_of(peer, cell_of(mask, operation)) == ""
    assert {(given["causal"], given["max_seqlen_q"], given["max_seqlen_kv"]) for given in peer.given} == {(mask is Mask.CAUSAL, 40, 40)}
    assert Flashgen()._varlen is varlen.attention_varlen


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_nested_sdpa_computes_the_same(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, which PyTorch's kernels for GPUs alone have for nested tensors."""
    monkeypatch.setattr(SdpaMath, "packed", True)
    assert fault_of(SdpaMath(), cell_of(Mask.FULL, operation)) == ""


def test_flashattention_4_gets_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def function(*qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, **more: Any) -> Any:
        given.append(more)
        return attention(*qkv, cu_seqlens_q, cu_seqlens_k, causal=causal)

    interface = SimpleNamespace(flash_attn_varlen_func=function, flash_attn_func=None)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=SimpleNamespace(interface=interface)))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(interface=interface))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    assert fault_of(Fa4(), cell_of()) == ""
    assert given[0] == {"max_seqlen_q": 40, "max_seqlen_k": 40}


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_dense_peer_has_as_much_work(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        shapes.append((q.shape, k.shape, v.shape, causal))
        return q + k + v

    monkeypatch.setattr(api, "attention", dense)
    cell = cell_of(operation=operation)
    found = FlashgenEqual().prepare(cell, CPU)(Runner({}, CPU, 0, 1).inputs(cell, "bshd"))()
    assert len(found) == 3 if operation == "backward" else isinstance(found, Tensor)
    w = dense_cell(cell).workload
    assert {*shapes} == {(*3 * [(w.batch, w.len_q, 4, 16)], True)}
    assert FlashgenEqual().note(cell, CPU) == f"dense {w.name}"
    with pytest.raises(ArgumentError, match=r"^flashgen_equal is for packed sequences and caches without modifiers; got fp16_d16_causal$"):
        FlashgenEqual().prepare(dense_cell(cell_of()), CPU)


def test_who_has_no_packed_sequences_says_so() -> None:
    with pytest.raises(ArgumentError, match=r"^eager has no packed sequences$"):
        Eager().prepare(cell_of(), CPU)


def test_wrong_boundaries_are_found() -> None:
    cell = cell_of()
    inputs = Runner({}, CPU, 1, 1).inputs(cell, "bshd")
    assert "seqused_q" not in inputs
    check, (q, k, v) = CellCheck(cell, inputs), (inputs[name] for name in "qkv")
    ends = inputs["cu_seqlens_q"]
    assert check.fault(attention(q, k, v, ends, ends)[0]) == ""
    other = ends.clone()
    other[2] += 1
    assert "sampled rows of out are not the reference's, first at tokens_q" in check.fault(attention(q, k, v, other, other)[0])
