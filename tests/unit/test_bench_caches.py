"""The benchmark's cells of caches, and its peers in them, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.bench import packed
from flashgen.bench.caches import cache_lengths, cache_tensors, equal_cell, io_bytes, with_cache
from flashgen.bench.cells import grids
from flashgen.bench.check import CellCheck
from flashgen.bench.packed import document_lengths
from flashgen.bench.packed_peers import FlashgenEqual
from flashgen.bench.peer import Peer
from flashgen.bench.peers import Flashgen
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaMath
from flashgen.cells import Cell
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.numerics.caches import cached_attention, cached_keys
from flashgen.numerics.forward import plain

CPU = torch.device("cpu")
PROBLEM = Problem(Dtype.FP16, 16, 16, sequences=Sequences.CACHED)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed, "SHORTEST", 4)
    document_lengths.cache_clear()
    yield
    document_lengths.cache_clear()


def cell_of(page_size: int = 8, ragged: bool = False, len_q: int = 2) -> Cell:
    return Cell(PROBLEM, with_cache(Workload(5, 4, 2, len_q, 40), page_size, ragged))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("page_size", [1, 8, 40])
def test_sequences_have_their_lengths_and_no_page_twice(page_size: int, ragged: bool) -> None:
    cell = cell_of(page_size, ragged)
    tensors = {"k": torch.empty(cell.workload.pages, page_size, 2, 16), **cache_tensors(cell, CPU)}
    assert cache_lengths(cell.workload) == (document_lengths(5, 40) if ragged and page_size < 40 else (40,) * 5)
    keys = cached_keys(tensors)
    assert tuple(len(page) for page, _ in keys) == cache_lengths(cell.workload)
    pages = [page for own, _ in keys for page in set(own.tolist())]
    assert sorted(pages) == list(range(cell.workload.pages)), "each page is of one sequence"
    assert ("block_table" in tensors) == (page_size < 40)


def test_bytes_are_those_of_the_keys_that_there_are() -> None:
    lengths, of_queries = document_lengths(5, 40), 2 * 5 * 2 * 4 * 16 * 2
    assert io_bytes(cell_of(ragged=True)) == sum(lengths) * 2 * 2 * 16 * 2 + of_queries
    assert io_bytes(cell_of()) == io_bytes(equal_cell(cell_of())) == 5 * 40 * 2 * 2 * 16 * 2 + of_queries
    dense = equal_cell(cell_of(ragged=True))
    assert 0 <= dense.workload.batch * dense.workload.len_kv - sum(lengths) < 5


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SHORTEST", 128)
    document_lengths.cache_clear()
    paged, ragged = (grids(name)[name] for name in ("paged", "ragged"))
    assert {io_bytes(cell) for cell in paged} == {io_bytes(paged[0])}
    assert [cell.workload.page_size for cell in paged] == [1, 16, 64, 128, 256, 8192]
    *unequal, equal = (sum(cache_lengths(cell.workload)) for cell in ragged)
    assert len({*unequal}) == 1
    assert equal == pytest.approx(unequal[0], rel=0.01)
    assert min(cache_lengths(ragged[0].workload)) < 256
    assert max(cache_lengths(ragged[0].workload)) > 16384


class Plain(Flashgen):
    """Plain PyTorch in place of kernels."""

    def __init__(self) -> None:
        def call(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, causal: bool = False, **more: Any) -> Any:
            tensors = {"q": q, "k": k, "v": v, **{name: one for name, one in more.items() if one is not None}}
            both = cached_attention(plain, PROBLEM, tensors, {"scale": 0.25}, None)
            return both if return_lse else both[0]

        self._with_cache: Any = call


def fault_of(peer: Peer, cell: Cell) -> str:
    """What is wrong with the peer in a cell, empty if nothing."""
    measuring = Runner({}, CPU, 0, 1)
    inputs = measuring.inputs(cell, peer.layout)
    with torch.no_grad():
        return peer.fault(CellCheck(cell, measuring.inputs(cell, "bshd")), peer.prepare(cell, CPU)(inputs), inputs)


def test_the_grid_of_prompts() -> None:
    cells = grids("prefill")["prefill"]
    assert {(cell.problem.head_dim, cell.workload.page_size) for cell in cells} == set(itertools.product((64, 128), (16, 64, 256, 8192)))
    assert {cell.workload.len_q for cell in cells} == {512, 4096}
    assert all(set(cache_lengths(cell.workload)) == {8192} for cell in cells)
    assert all(equal_cell(cell).workload.len_kv == 8192 for cell in cells)


@pytest.mark.parametrize("cell", [cell_of(), cell_of(ragged=True), cell_of(40)])
def test_flashgen_is_given_the_cache(cell: Cell) -> None:
    assert not fault_of(Plain(), cell)


def test_a_wrong_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of()
    inputs = dict(Runner({}, CPU, 0, 1).inputs(cell, "bshd"))
    inputs["block_table"] = inputs["block_table"].roll(1, 0)
    check = CellCheck(cell, Runner({}, CPU, 0, 1).inputs(cell, "bshd"))
    with torch.no_grad():
        assert "not the reference's" in Plain().fault(check, Plain().prepare(cell, CPU)(inputs), inputs)


def test_others_have_no_caches() -> None:
    with pytest.raises(ArgumentError, match="math has no caches"):
        SdpaMath().prepare(cell_of(), CPU)


def test_equal_sequences_have_the_keys_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Tensor] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        given.update(q=q, k=k, v=v)
        return q

    peer = FlashgenEqual()
    monkeypatch.setattr(peer, "_attention", attention)
    cell = cell_of(ragged=True)
    inputs = Runner({}, CPU, 0, 1).inputs(cell, "bshd")
    peer.prepare(cell, CPU)(inputs)()
    w = equal_cell(cell).workload
    assert given["q"].shape == (5, 2, 4, 16)
    assert given["k"].shape == given["v"].shape == (5, w.len_kv, 2, 16)
    assert peer.note(cell, CPU) == f"dense {w.name}"
