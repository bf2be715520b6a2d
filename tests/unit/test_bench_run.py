"""Measuring cells with peers and a clock that are made up, on the CPU: checks, failures, rounds, sessions that are stopped."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from flashgen.bench import call_overhead
from flashgen.bench.check import CellCheck
from flashgen.bench.peer import AttentionPeer, Call, Peer, written_to_stderr
from flashgen.bench.peers import PEERS, make_peers, parse_peers
from flashgen.bench.result import BenchResult
from flashgen.bench.runner import ContextLostError, Runner
from flashgen.bench.sdpa import SdpaMath, sdpa_settings_kept
from flashgen.bench.session import BenchRequest, Session
from flashgen.cells import Cell
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.numerics.forward import plain
from flashgen.tuning import Progress, Request
from tests.support.bench_results import ENVIRONMENT
from tests.support.examples import families_of

CPU = torch.device("cpu")
CELL = Cell(Problem(Dtype.BF16, 16, 8, Mask.CAUSAL), Workload(2, 4, 2, 20, 33))
OTHER = Cell(Problem(Dtype.FP16, 16), Workload(1, 2, 2, 40, 40))


class FakeGpu:
    """A stopwatch that goes on when a fake peer computes. A graph is captured by remembering what to call."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        begun = self.now
        work()
        return self.now - begun

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work


class Fake(AttentionPeer):
    """Plain attention, made wrong by `spoil`; takes `cost` seconds of the fake GPU."""

    name = "fake"

    def __init__(self, gpu: FakeGpu, cost: float = 1e-2, spoil: Callable[[Tensor], Tensor] = lambda out: out, layout: str = "bshd") -> None:
        self.gpu, self.cost, self.spoil, self.causal_shift, self.selected = gpu, cost, spoil, 0, 0
        self.layout = layout

    def select(self) -> None:
        self.selected += 1

    def bind(self, cell: Cell, device: torch.device) -> Call:
        causal, scale = cell.problem.mask is Mask.CAUSAL, cell.problem.head_dim**-0.5

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.gpu.now += self.cost
            if self.layout == "bhsd":
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = self.spoil(plain(q, k, v, causal=causal, scale=scale)[0])
            return out.transpose(1, 2) if self.layout == "bhsd" else out

        return call


class Failing(Fake):
    """Fails in its call number `at`."""

    def __init__(self, gpu: FakeGpu, at: int, error: Exception | None = None) -> None:
        super().__init__(gpu, spoil=self._fail)
        self.at, self.calls, self.error = at, 0, error or RuntimeError("no kernel\nstack and so on")

    def _fail(self, out: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= self.at:
            raise self.error
        return out


def runner(gpu: FakeGpu, rounds: int = 3, **made: Peer) -> Runner:
    return Runner(made, CPU, 0, rounds, gpu)


def test_a_cell_is_timed_by_rounds() -> None:
    gpu = FakeGpu()
    one, two = Fake(gpu, 1e-2), Fake(gpu, 2e-2, layout="bhsd")
    result = runner(gpu, one=one, two=two).measure("grid", CELL)
    assert (result.grid, result.cell, result.errors, result.notes) == ("grid", CELL, {}, {})
    assert result.times["one"].rounds_ms == pytest.approx((10.0,) * 3)
    assert result.times["two"].rounds_ms == pytest.approx((20.0,) * 3)
    assert not result.times["one"].graph
    ratio = result.ratio("one", "two")
    assert ratio is not None
    assert ratio.median == pytest.approx(2.0)
    assert one.selected >= 2 + 3, "selected before the first call, the warm-up and each round"


def test_short_calls_are_replays_of_a_graph() -> None:
    gpu = FakeGpu()
    result = runner(gpu, rounds=1, one=Fake(gpu, 1e-4)).measure("grid", OTHER)
    assert result.times["one"].graph
    assert result.times["one"].rounds_ms == pytest.approx((0.1,))


def test_what_cannot_be_captured_is_timed_call_by_call_and_said() -> None:
    class NoGraphs(FakeGpu):
        def graph(self, work: Callable[[], object]) -> Callable[[], object]:
            raise RuntimeError("operation not permitted when stream is capturing")

    gpu = NoGraphs()
    result = runner(gpu, rounds=1, one=Fake(gpu, 1.9e-4)).measure("grid", OTHER)
    assert not result.times["one"].graph
    assert result.notes["one"].startswith("no CUDA graph: RuntimeError: operation not permitted")


def test_peers_get_the_same_inputs_in_their_layout() -> None:
    seen: dict[str, list[Tensor]] = {}

    class Looking(Fake):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            inner = super().bind(cell, device)

            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                seen.setdefault(self.layout, [q, k, v])
                return inner(q, k, v)

            return call

    gpu = FakeGpu()
    runner(gpu, rounds=1, one=Looking(gpu), two=Looking(gpu, layout="bhsd")).measure("grid", CELL)
    assert [tuple(t.shape) for t in seen["bshd"]] == [(2, 20, 4, 16), (2, 33, 2, 16), (2, 33, 2, 8)]
    for ours, theirs in zip(seen["bshd"], seen["bhsd"], strict=True):
        assert torch.equal(ours.transpose(1, 2), theirs)
        assert theirs.is_contiguous()


@pytest.mark.parametrize("rows", [1, 13])
def test_a_mask_that_is_aligned_otherwise_gets_no_time(rows: int) -> None:
    """Off by one, and aligned top-left, which is off by the difference of the lengths."""

    class Wrong(Fake):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                self.gpu.now += self.cost
                length = k.shape[1] - rows
                return plain(q, k[:, :length], v[:, :length], causal=True, scale=cell.problem.head_dim**-0.5)[0]

            return call

    gpu = FakeGpu()
    result = runner(gpu, one=Fake(gpu), wrong=Wrong(gpu)).measure("grid", CELL)
    assert list(result.times) == ["one"]
    assert result.errors["wrong"].startswith("wrong: "), result.errors


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: out * 1.05, "rows of out are not the reference's"),
        (lambda out: out.flip(2), "rows of out are not the reference's"),
        (torch.zeros_like, "rows of out are not the reference's"),
        (lambda out: out * torch.nan, "rows of out are not the reference's"),
        (lambda out: out.index_fill(1, torch.tensor([19]), 0.0), "rows of out are not the reference's"),
        (lambda out: out.transpose(1, 2), "wrong: out has shape"),
        (lambda out: out[..., :4], "wrong: out has shape"),
    ],
)
def test_what_computes_something_else_is_an_error_and_not_a_time(spoil: Callable[[Tensor], Tensor], message: str) -> None:
    gpu = FakeGpu()
    result = runner(gpu, one=Fake(gpu), wrong=Fake(gpu, spoil=spoil)).measure("grid", CELL)
    assert list(result.times) == ["one"]
    assert message in result.errors["wrong"]


def test_rounding_is_no_error() -> None:
    gpu = FakeGpu()
    long = Cell(Problem(Dtype.BF16, 64), Workload(1, 1, 1, 64, 8192))
    assert not runner(gpu, one=Fake(gpu)).measure("grid", long).errors


def test_flashgen_is_held_to_the_numerics_rule_as_well() -> None:
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.float16) for _ in range(3))
    check = CellCheck(OTHER, {"q": q, "k": k, "v": v})
    out, lse = plain(q, k, v, causal=False, scale=0.25)
    assert (check.fault(out), check.rule((out, lse))) == ("", "")
    near = out + 0.01 * out
    assert check.fault(near) == "", "within what others may err"
    assert check.rule((near, lse)).startswith("wrong: out max error")
    assert check.rule((out, lse * 1.01)).startswith("wrong: lse max error")


@pytest.mark.parametrize("at", [1, 2, 3, 10, 12])
def test_a_peer_that_fails_at_any_time_is_left_out_with_the_reason(at: int) -> None:
    """From the first call over the check and the warm-up to the rounds."""
    gpu = FakeGpu()
    result = runner(gpu, one=Fake(gpu), bad=Failing(gpu, at), two=Fake(gpu, 2e-2)).measure("grid", CELL)
    assert list(result.times) == ["one", "two"]
    assert result.errors == {"bad": "RuntimeError: no kernel"}
    assert all(len(times.rounds_ms) == 3 for times in result.times.values())


def test_the_reason_holds_what_was_warned_of() -> None:
    def warn(out: Tensor) -> Tensor:
        warnings.warn("Flash attention kernel not used because:", stacklevel=1)
        warnings.warn("Flash attention requires equal head dims", stacklevel=1)
        warnings.warn("cuDNN attention has been runtime disabled.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    gpu = FakeGpu()
    result = runner(gpu, bad=Fake(gpu, spoil=warn)).measure("grid", CELL)
    assert result.errors == {"bad": "RuntimeError: No available kernel. Aborting execution.; Flash attention requires equal head dims"}
    assert not result.times


def test_a_cell_whose_inputs_do_not_fit_ends_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    measuring = runner(gpu, one=Fake(gpu))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", full)
        assert measuring.measure("grid", CELL).errors == {"one": "not measured: OutOfMemoryError: CUDA out of memory"}
    assert measuring.measure("grid", CELL).times


def test_a_gpu_that_is_lost_ends_the_run_and_names_the_one_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    bad = Failing(gpu, 2, RuntimeError("illegal memory access"))
    measuring = runner(gpu, one=Fake(gpu), bad=bad)

    def settle() -> None:
        if bad.calls >= bad.at:
            raise RuntimeError("context is gone")

    monkeypatch.setattr(measuring, "settle", settle)
    with pytest.raises(ContextLostError, match="lost to bad in bf16_d16x8_causal B2 H4/2 S20x33: RuntimeError: illegal memory access"):
        measuring.measure("grid", CELL)


class Heard(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def session(made: dict[str, Peer], gpu: FakeGpu, **options: object) -> Session:
    request = BenchRequest({"a": [CELL, OTHER], "b": [OTHER]}, list(made), rounds=2)
    request = dataclasses.replace(request, **options)  # type: ignore[arg-type]
    result = BenchResult(ENVIRONMENT, request.rounds, list(made), {"fa4": "ModuleNotFoundError: no"}, None)
    return Session(request, result, Runner(made, CPU, 0, request.rounds, gpu), "a-gpu-of-tests", Heard())


def test_a_session_saves_after_every_cell() -> None:
    gpu = FakeGpu()
    run = session({"one": Fake(gpu)}, gpu)
    saved: list[tuple[int, bool]] = []
    run.run(lambda result: saved.append((len(result.cells), result.complete)))
    assert saved == [(1, False), (2, False), (3, False), (3, True)]
    assert [(cell.grid, cell.cell) for cell in run.result.cells] == [("a", CELL), ("a", OTHER), ("b", OTHER)]
    assert isinstance(run.progress, Heard)
    assert run.progress.said[0] == "fa4 is left out: ModuleNotFoundError: no"
    assert "TFLOP/s" in run.progress.said[1]


def test_a_session_that_is_stopped_keeps_its_cells() -> None:
    gpu = FakeGpu()
    bad = Failing(gpu, 20)  # in the second cell
    bad.error = KeyboardInterrupt()  # type: ignore[assignment]
    run = session({"bad": bad}, gpu)
    saved: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run.run(lambda result: saved.append(len(result.cells)))
    assert saved == [1]
    assert len(run.result.cells) == 1
    assert not run.result.complete


def test_a_session_puts_back_the_settings_of_sdpa() -> None:
    def settings() -> list[bool]:
        cuda = torch.backends.cuda
        return [cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]

    class Selecting(Fake):
        def select(self) -> None:
            SdpaMath().select()
            assert settings() == [False, False, False, True]

    gpu, before = FakeGpu(), settings()
    session({"one": Selecting(gpu)}, gpu).run(lambda _: None)
    assert settings() == before != [False, False, False, True]


def test_tuning_comes_first_and_takes_each_cell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Cell] = []

    def tune(request: Request, progress: Progress) -> None:
        asked.extend(request.cells)
        if len(asked) == 2:
            raise ArgumentError("head_dim must be less")

    monkeypatch.setattr("flashgen.tuning.run", tune)
    gpu = FakeGpu()
    run = session({"flashgen": Fake(gpu)}, gpu, tune=True)
    run.run(lambda _: None)
    assert asked == [CELL, OTHER]
    assert isinstance(run.progress, Heard)
    assert "fp16_d16_full B1 H2 S40: not tuned: head_dim must be less" in run.progress.said
    asked.clear()
    session({"other": Fake(gpu)}, gpu, tune=True).run(lambda _: None)
    assert asked == [], "there is nothing to tune without flashgen"


def test_families_are_peers_that_are_tuned_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("flashgen.tuning.run", lambda request, progress: asked.append(request.family))
    family = families_of()[0].name
    gpu = FakeGpu()
    session({"flashgen": Fake(gpu), family: Fake(gpu), "other": Fake(gpu)}, gpu, tune=True).run(lambda _: None)
    assert asked == [None, family] * 2
    made, absent = make_peers([family])
    assert (made[family].name, absent) == (family, {})
    assert parse_peers(f"flash,{family}") == ["flash", family]


def test_the_cpu_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Napping(Fake):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                assert q.shape == (1, 128, 8, 64)
                time.sleep(2e-2 if torch.is_grad_enabled() and q.requires_grad else 1e-3)
                return q + k + v

            return call

    class WithoutGradient(Napping):
        def bind(self, cell: Cell, device: torch.device) -> Call:
            call = super().bind(cell, device)
            return lambda q, k, v: call(q, k, v).detach()

    for name, value in (("CALLS", 1), ("WARM_UP", 1), ("ROUNDS", 3)):
        monkeypatch.setattr(call_overhead, name, value)
    gpu = FakeGpu()
    both = {"one": Napping(gpu), "without": WithoutGradient(gpu)}
    turns: list[str] = []
    for name, peer in both.items():
        monkeypatch.setattr(peer, "select", partial(turns.append, name))
    found = call_overhead.call_overheads(both, CPU, lambda: None, lambda name, error: pytest.fail(f"{name}: {error}"))
    cost = found["one"]
    assert 1000 <= cost.us < cost.us_grad
    assert cost.us_grad >= 20_000
    assert cost.us_backward is not None
    assert cost.us_backward >= 20_000
    assert found["without"].us_backward is None
    assert turns[2:] == ["one", "without"] * 3, "each is measured in every round"
    run = session({"one": Napping(gpu), "bad": Failing(gpu, 1)}, gpu, cells={}, call_overhead=True)
    run.run(lambda _: None)
    assert list(run.result.call_overhead) == ["one"]
    assert run.result.call_overhead_errors == {"bad": "RuntimeError: no kernel"}


def test_requests_are_checked() -> None:
    with pytest.raises(ArgumentError, match="rounds must be an integer from 1 to 1000; got 0"):
        BenchRequest({}, ["flashgen"], rounds=0)
    with pytest.raises(ArgumentError, match="baseline must be one of flashgen, flash; got 'cudnn'"):
        BenchRequest({}, ["flashgen", "flash"], "cudnn")
    assert BenchRequest({}, ["flashgen", "flash"]).baseline == "flash"
    assert BenchRequest({}, ["flashgen", "cudnn"]).baseline is None


def test_peers_by_name() -> None:
    assert parse_peers(None) == ["flashgen", "flash", "cudnn", "flex", "fa4", "xformers"]
    assert parse_peers("cudnn, flash,cudnn") == ["cudnn", "flash"]
    for wrong in ("", "flash,", "Flash"):
        with pytest.raises(
            ArgumentError,
            match=f"peers must be one of {', '.join((*PEERS, *families()))}; got",
        ):
            parse_peers(wrong)


def test_a_peer_that_cannot_be_imported_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Fake):
        name = "broken"

        def __init__(self) -> None:
            raise OSError("libcudart.so.12: cannot open shared object file\nand more")

    monkeypatch.setitem(PEERS, "broken", Broken)
    made, absent = make_peers(["broken", "math"])
    assert list(made) == ["math"]
    assert absent == {"broken": "OSError: libcudart.so.12: cannot open shared object file"}


class Ticking(FakeGpu):
    """Whatever is timed takes a second."""

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        return 1.0


class TopLeft(SdpaMath):
    """What a user writes who does not know that SDPA aligns `is_causal` top-left."""

    def bind(self, cell: Cell, device: torch.device) -> Call:
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("lengths", [(40, 40), (33, 20), (20, 33)])
def test_sdpa_is_aligned_bottom_right(lengths: tuple[int, int]) -> None:
    cell = Cell(Problem(Dtype.BF16, 16, mask=Mask.CAUSAL), Workload(2, 4, 2, *lengths))
    with sdpa_settings_kept():
        result = runner(Ticking(), rounds=1, math=SdpaMath(), top_left=TopLeft()).measure("grid", cell)
    assert "math" in result.times, result.errors
    assert ("top_left" in result.errors) is (lengths[0] != lengths[1]), "and the check sees where it is not"


def test_what_is_written_past_python_is_kept_and_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert written_to_stderr(functools.partial(os.write, 2, b"why\n")) == "why\n"
    with pytest.raises(OSError, match="Bad file"):
        written_to_stderr(functools.partial(os.write, 99999, b"lost"))
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


@pytest.mark.parametrize("name", ["eager", "eager_fp16"])
@pytest.mark.parametrize("mask", Mask)
def test_eager_is_attention(name: str, mask: Mask) -> None:
    cell = Cell(Problem(Dtype.FP16, 16, mask=mask), Workload(2, 4, 2, 5, 9))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator).half() for n, h in ((5, 4), (9, 2), (9, 2)))
    (peer,) = make_peers([name])[0].values()
    assert isinstance(peer, AttentionPeer)
    out = peer.bind(cell, CPU)(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    expected = plain(q, k, v, causal=mask is Mask.CAUSAL, scale=0.25)[0]
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
