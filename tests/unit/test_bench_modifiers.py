"""The benchmark's peers in cells with modifiers, on the CPU: each computes what they mean, or says which it has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.bench import documents
from flashgen.bench.check import CellCheck
from flashgen.bench.eager import Eager, EagerFp16
from flashgen.bench.flex import Flex, changed_attention
from flashgen.bench.peer import AttentionPeer, Call, Peer, hidden_from
from flashgen.bench.peers import PEERS, Fa4, Flashgen
from flashgen.bench.relative import RELATIVE, TABLE, names_of_modifiers, relative_bias, scalars_of
from flashgen.bench.result import CellResult
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import SdpaMath, sdpa_settings_kept
from flashgen.cells import Cell
from flashgen.codegen.modifiers.softcap import USUAL_CAP
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.known_functions import known_functions
from flashgen.numerics.forward import plain
from flashgen.numerics.link import Link, Rows
from flashgen.numerics.modifiers.alibi import AlibiLink
from flashgen.numerics.modifiers.document_ids import DocumentIdsLink
from flashgen.numerics.modifiers.sinks import SinksLink
from flashgen.numerics.modifiers.softcap import SoftcapLink
from flashgen.numerics.modifiers.window import WindowLink

CPU = torch.device("cpu")
ALL = ("alibi", "document_ids", "relative", "sinks", "softcap", "window")


@pytest.fixture(autouse=True)
def short_documents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the usual length each entry of the batch would have one."""
    monkeypatch.setattr("flashgen.bench.documents.MEAN_LENGTH", 8)
    documents._ids.cache_clear()
    documents._seen.cache_clear()
    yield
    documents._ids.cache_clear()
    documents._seen.cache_clear()


@pytest.fixture
def low_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of N(0, 1) are all but as they were under the usual one."""
    monkeypatch.setattr("flashgen.codegen.modifiers.softcap.USUAL_CAP", 1.0)


def cell_of(*modifiers: str, operation: str = "forward") -> Cell:
    mask, ends = (Mask.FULL, (9, 3)) if "window" in modifiers else (Mask.CAUSAL, ())
    names = tuple(RELATIVE if name == "relative" else name for name in modifiers)
    return Cell(Problem(Dtype.FP16, 16, 8, mask, operation, modifiers=names), Workload(2, 4, 2, 20, 33, *ends))


def fault_of(peer: Peer, cell: Cell) -> str:
    """What is wrong with the peer in a cell, empty if nothing."""
    measuring = Runner({}, CPU, 0, 1)
    inputs = measuring.inputs(cell, peer.layout)
    with torch.no_grad():
        return peer.fault(CellCheck(cell, measuring.inputs(cell, "bshd")), peer.prepare(cell, CPU)(inputs), inputs)


class Ticking:
    """A stopwatch by which everything takes a second."""

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        return 1.0

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        return work


@pytest.mark.usefixtures("low_cap")
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("modifiers", [*((name,) for name in ALL), ALL], ids="-".join)
def test_plain_pytorch_has_them_and_what_forgets_them_gets_no_time(modifiers: tuple[str, ...], operation: str) -> None:
    class Forgetful(Eager):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            call = super().bind(replace(cell, problem=replace(cell.problem, modifiers=())), device)
            return lambda q, k, v, **others: call(q, k, v) + 0 * sum(other.sum() for other in others.values())

    cell = cell_of(*modifiers, operation=operation)
    assert fault_of(Eager(), cell) == ""
    assert fault_of(Forgetful(), cell).startswith("wrong: ")
    if {*modifiers} <= {*EagerFp16.modifiers}:
        assert fault_of(EagerFp16(), cell) == ""


class ModLink(Link):
    """What a score_mod means, called as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @classmethod
    def of(cls, tensors: object, scalars: object) -> ModLink:
        raise NotImplementedError

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        assert rows.heads is not None
        changed: Tensor = self._function(s, rows.batch, rows.heads[..., None], rows.queries[:, None], rows.keys)
        return changed


class Meant(Flashgen):
    """With what `flashgen.attention` means in place of what it runs."""

    def __init__(self) -> None:
        self._attention = self._meant  # type: ignore[assignment]

    @staticmethod
    def _meant(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: str, deterministic: bool | None, return_lse: bool = False, **more: Any
    ) -> Any:
        assert (layout, deterministic) == ("bshd", None)
        softcap, window, links = more["softcap"], more["window"], list[Link]()
        slopes, sinks, ids = more.get("alibi_slopes"), more.get("sinks"), more.get("document_ids")
        if softcap is not None:
            links.append(SoftcapLink(softcap))
        if slopes is not None:
            links.append(AlibiLink(slopes))
        if more.get("score_mod") is not None:
            links.append(ModLink(more["score_mod"]))
        if sinks is not None:
            links.append(SinksLink(sinks))
        if ids is not None:
            links.append(DocumentIdsLink(*ids))
        if window is not None:
            links.append(WindowLink(*(OPEN if end is None else end for end in window)))
        both = plain(q, k, v, causal=causal, scale=q.shape[3] ** -0.5, links=links)
        return both if return_lse else both[0]


@pytest.mark.usefixtures("low_cap")
@pytest.mark.parametrize("modifiers", [*((name,) for name in ALL), ALL], ids="-".join)
def test_flashgen_is_asked_for_them(modifiers: tuple[str, ...]) -> None:
    assert fault_of(Meant(), cell_of(*modifiers)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_flashgen_has_them(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    assert fault_of(Flashgen(), cell_of(*ALL, operation=operation)) == ""


def test_a_relative_bias_is_what_its_cells_say() -> None:
    table, sizes = torch.randn(4, 52), (2, 4, 20, 33)
    call = sizes, torch.randn(2, 20, 4, 16), None
    known, captured = known_functions(relative_bias(table, 32), None, call, True, None, False, -13, (None, False, False, False))
    traced = known.with_tensors(captured)
    assert (traced.name, traced.whole, traced.numbers, len(traced.tensors)) == (RELATIVE, [32], [], 1)
    cell = cell_of("relative")
    assert names_of_modifiers(cell.problem) == ("relative",)
    assert CellResult("relative", cell).name == "fp16_d16x8_causal_relative B2 H4/2 S20x33"
    first, second = Runner({}, CPU, cell.io_bytes, 1)._input_sets(cell)["bshd"][:2]
    assert first[TABLE].shape == (4, 52)
    assert not first[TABLE].equal(second[TABLE])
    scalars = scalars_of(cell)
    assert [scalars[f"traced_{name}"] for name in ("number_n0", "t0_size0", "t0_size1", "t0_step0", "t0_step1")] == [32, 4, 52, 52, 1]
    assert scalars_of(cell_of("softcap")) == {"scale": 0.25, "softcap": USUAL_CAP}


@pytest.mark.usefixtures("low_cap")
@pytest.mark.parametrize("offset", [-1, 1, 13])
def test_a_relative_bias_of_another_distance_gets_no_time(offset: int) -> None:
    class Shifted(Eager):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            call = super().bind(cell, device)
            return lambda q, k, v, **tensors: call(q, k, v, **{TABLE: tensors[TABLE].roll(offset, 1)})

    for operation in ("forward", "backward"):
        assert fault_of(Shifted(), cell_of("relative", operation=operation)).startswith("wrong: ")


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_sdpa_has_documents(operation: str) -> None:
    with sdpa_settings_kept():
        for modifiers in (("document_ids",), ("document_ids", "window")):
            assert fault_of(SdpaMath(), cell_of(*modifiers, operation=operation)) == ""


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("ends", [(), (5, 2), (5, OPEN), (OPEN, OPEN, 6), (4, 3, 6), (-1, OPEN)])
@pytest.mark.parametrize("lengths", [(20, 33), (33, 20), (24, 24)])
def test_work_is_counted_of_what_is_seen(mask: Mask, ends: tuple[int, ...], lengths: tuple[int, int]) -> None:
    w = Workload(3, 4, 2, *lengths, *ends)
    names = [*(["window"] if w.has_window else []), *(["chunk"] if w.chunk != OPEN else []), "document_ids"]
    for operation, products in (("forward", 2), ("backward", 5)):
        cell = Cell(Problem(Dtype.FP16, 16, 8, mask, operation, modifiers=tuple(names)), w)
        hidden = hidden_from(cell, CPU)
        assert hidden is not None
        assert hidden.shape == (3, 1, *lengths)
        assert documents.flops(cell) == pytest.approx(int((~hidden).sum()) * 4 * (16 + 8) * products)
        plain = replace(cell, problem=replace(cell.problem, modifiers=tuple(names[:-1])))
        assert documents.flops(plain) == plain.flops


def test_documents_are_the_same_in_every_set_of_inputs() -> None:
    cell = cell_of("document_ids")
    first, second = Runner({}, CPU, cell.io_bytes, 1)._input_sets(cell)["bshd"][:2]
    assert not first["q"].equal(second["q"])
    for name, ids in documents.document_ids(cell, CPU).items():
        assert first[name].equal(ids)
        assert second[name].equal(ids)
        assert (ids.diff() >= 0).all()
        assert (ids[:, 0] != ids[:, -1]).all()


@pytest.mark.usefixtures("low_cap")
def test_flex_has_them_and_is_compiled_once_for_all_inputs() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        compiled.append(1)
        return graph.forward

    class Traced(Flex):
        def __init__(self) -> None:
            self._attention = torch.compile(changed_attention, dynamic=False, backend=backend)

    torch.compiler.reset()
    cell = cell_of(*ALL)
    result = Runner({"flex": Traced()}, CPU, cell.io_bytes, 1, Ticking()).measure("grid", cell)
    assert (list(result.times), result.errors) == (["flex"], {})
    assert len(compiled) == 1
    assert fault_of(Traced(), cell_of("alibi")) == ""


def test_fa4_is_told_the_cap() -> None:
    asked: list[dict[str, object]] = []

    class Told(Fa4):
        def __init__(self) -> None:
            self._attention = lambda q, k, v, **options: asked.append(options)

    for cell in (cell_of("softcap"), cell_of("softcap", "window"), cell_of()):
        Told().bind(cell, CPU)(None, None, None)
    cap = {"softcap": USUAL_CAP}
    assert asked == [{"causal": True, **cap}, {"causal": False, "window_size": (9, 3), **cap}, {"causal": True}]


def test_what_a_peer_has_not_is_all_that_is_said() -> None:
    class Explaining(SdpaMath):
        def explain(self, cell: Cell, inputs: object) -> list[str]:
            return ["FlashAttention takes no mask"]

    with sdpa_settings_kept():
        result = Runner({"math": Explaining()}, CPU, 0, 1, Ticking()).measure("grid", cell_of("softcap", "window"))
    assert result.errors == {"math": "math has no softcap"}
    having = {name for name, peer in PEERS.items() if issubclass(peer, AttentionPeer) and {*ALL} <= {*peer.modifiers}}
    assert having == {"flashgen", "flashgen_deterministic", "flex", "flex_flash", "eager"}
    with sdpa_settings_kept():
        result = Runner({"math": SdpaMath()}, CPU, 0, 1, Ticking()).measure("relative", cell_of("relative"))
    assert result.errors == {"math": "math has no relative"}
