"""The choice of a kernel: it depends on the call and the records, not on earlier calls; and threads do not wait for each other's."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashgen
from flashgen.build.artifact import EntryReport, Report
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.config import Config
from flashgen.codegen.devices import find_device
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records import sources
from flashgen.records.choice import tells_time, why_useless
from flashgen.records.exchange import import_into, parse_records, to_text, winners
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Failure, FailureKind, Record, Records
from flashgen.selection import compilation, loaded
from flashgen.selection.loaded import Kernels
from flashgen.selection.ranking import shortlist
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make

GPU = Gpu(0, DEVICE, "uuid", "13.0")
ONE, TWO, THREE, FOUR = CONFIGS[1], CONFIGS[2], CONFIGS[3], CONFIGS[-1]


def of(length: int, batch: int = 2) -> Workload:
    return Workload(batch, 16, 16, length, length)


class FakeKernels(Kernels):
    """Loads nothing: a kernel is its spec and a report, which `broken` configs spoil."""

    broken: tuple[Config, ...] = ()

    def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
        return SimpleNamespace(
            spec=spec, artifact=SimpleNamespace(report=Report({"kernel": EntryReport(128, 8 if spec.config in self.broken else 0)}))
        )


def older(record: Record, revisions: int = 1) -> Record:
    """The same, were it measured of an earlier text."""
    assert isinstance(record.outcome, Failure) or record.outcome.seconds
    seconds = record.outcome if isinstance(record.outcome, Failure) else record.outcome.seconds
    spec = {**record.spec, "revision": FAMILY.revision - revisions}
    return make(seconds, record.key.workload, spec=spec, benchmark_version=record.key.benchmark_version)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    """The user's records; none come with the package."""
    found = Records(tmp_path / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: found)
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path))
    monkeypatch.setattr(loaded, "nvrtc_version", lambda: "13.0")
    return found


@pytest.fixture
def ship(tmp_path: Path, own: Records, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ShippedRecords]:
    def write(*records: Record) -> ShippedRecords:
        (tmp_path / "gpu.json").write_text(to_text(records))
        shipped = ShippedRecords(tmp_path)
        monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
        return shipped

    return write


def chosen(workload: Workload, kernels: Kernels | None = None, problem: Problem = PROBLEM) -> Config:
    return (kernels or FakeKernels()).choose(problem, workload, GPU).spec.config


def in_any_order(workloads: list[Workload], problem: Problem = PROBLEM) -> dict[Workload, Config]:
    """What each gets; fails if that depends on which is called first."""
    found = []
    for order in itertools.permutations(workloads):
        kernels = FakeKernels()
        found.append({workload: chosen(workload, kernels, problem) for workload in order})
    assert all(each == found[0] for each in found), "the choice depends on the order of calls"
    return found[0]


def test_the_exact_record_counts_whatever_was_called_first(own: Records) -> None:
    own.put(make(2e-3, of(3072), ONE))
    own.put(make(3e-3, of(4096), TWO))
    found = in_any_order([of(3072), of(4096), of(3000), of(4095)])
    assert list(found.values()) == [ONE, TWO, TWO, TWO], "lengths without a record take the one nearest to their bucket's end"


def test_the_nearest_record_is_of_the_bucket(own: Records) -> None:
    own.put(make(2e-3, of(2049), ONE))
    own.put(make(2e-3, of(1100), TWO))
    found = in_any_order([of(1200), of(1300), of(2048), of(2050)])
    assert list(found.values()) == [TWO, TWO, TWO, ONE]


def test_an_exact_record_of_another_compiler_does_not_decide_for_its_bucket(own: Records) -> None:
    own.put(make(2e-3, of(4096, 1), ONE, nvrtc_version="12.9"))
    own.put(make(2e-3, of(4000, 1), TWO))
    assert list(in_any_order([of(4096, 1), of(4095, 1), of(4000, 1)]).values()) == [ONE, TWO, TWO]


@pytest.mark.parametrize("head_dim", [40, pytest.param(64, marks=pytest.mark.slow)])
def test_the_model_s_pick_does_not_depend_on_the_order_of_calls(own: Records, head_dim: int) -> None:
    differing = 0
    for mask, end in itertools.product(Mask, (1024, 4096)):
        problem, within = Problem(Dtype.BF16, head_dim, mask=mask), [of(end // 2 + 1), of(3 * end // 4), of(end)]
        picks = {shortlist(problem, w, DEVICE, 1)[0].config for w in within}
        differing += len(picks) > 1
        in_any_order(within, problem)
    assert differing, "the model has one pick for all of a bucket: nothing was tested"


def test_order_of_records(own: Records, ship: Callable[..., ShippedRecords]) -> None:
    """Exact own, own of the bucket, shipped, older own, older shipped, model: each counts once those before it are gone."""
    exact, near = of(1000), of(1024)
    ranks: list[tuple[bool, Record]] = [
        (True, make(9e-3, exact, ONE)),
        (True, make(8e-3, near, TWO)),
        (False, make(7e-3, exact, THREE)),
        (False, make(6e-3, near, FOUR)),
        (True, older(make(5e-3, exact, ONE))),
        (True, older(make(4e-3, near, TWO))),
        (False, older(make(3e-3, exact, THREE))),
        (False, older(make(2e-3, near, FOUR))),
    ]
    for first in range(len(ranks)):
        own.clear()
        own.add(record for mine, record in ranks[first:] if mine)
        ship(*(record for mine, record in ranks[first:] if not mine))
        assert chosen(exact) == (ONE, TWO, THREE, FOUR)[first % 4], first


def test_a_broken_kernel_leaves_the_choice_to_the_next_whatever_was_called_first(own: Records, ship: Callable[..., ShippedRecords]) -> None:
    own.put(make(1e-3, of(1024), ONE, nvrtc_version="12.9"))
    ship(make(1e-3, of(1000), TWO), make(1e-3, of(1024), THREE))
    for order in itertools.permutations([of(1000), of(1024), of(999)]):
        kernels = FakeKernels()
        kernels.broken = (ONE,)
        assert {w.len_q: chosen(w, kernels) for w in order} == {1000: TWO, 1024: THREE, 999: THREE}


def test_a_bucket_can_be_made_ready_beside_a_length_of_its_own_record(own: Records) -> None:
    own.put(make(2e-3, of(3072), ONE))
    own.put(make(3e-3, of(4096), TWO))
    kernels = FakeKernels()
    assert kernels.choose(PROBLEM, of(3072), GPU).spec.config == ONE
    assert kernels.is_chosen(PROBLEM, of(3072), GPU)
    assert not kernels.is_chosen(PROBLEM, of(3072), GPU, any_length=True)
    assert not kernels.is_chosen(PROBLEM, of(3000), GPU)
    assert kernels.choose(PROBLEM, of(3072), GPU, any_length=True).spec.config == TWO
    assert kernels.is_chosen(PROBLEM, of(3000), GPU)


def test_warm_makes_the_bucket_ready_too(own: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    own.put(make(2e-3, of(3072), ONE))
    own.put(make(3e-3, of(4096), TWO))
    kernels = FakeKernels()
    monkeypatch.setattr(loaded, "kernels", kernels)
    monkeypatch.setattr("flashgen.ahead._gpu", lambda device: GPU)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    assert flashgen.warm(head_dim=64, batch=2, heads=16, len_q=3072).spec.config == ONE
    assert all(kernels.is_chosen(PROBLEM, of(length), GPU) for length in (3072, 3000, 2049))


# Older records


def test_an_older_record_gives_its_config_but_not_its_time(own: Records, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flashgen")
    old = older(make(1e-3, of(1024), ONE))
    own.put(old)
    kernels = FakeKernels()
    kernel = kernels.choose(PROBLEM, of(1024), GPU)
    assert kernel.spec == KernelSpec(FAMILY, PROBLEM, ONE, DEVICE.target), "of the present revision"
    assert own.best(PROBLEM, of(1024), DEVICE, "13.0", "13.0", BENCHMARK_VERSION) is None
    assert not tells_time(old, BENCHMARK_VERSION)
    assert winners([old], BENCHMARK_VERSION) == []
    for length in (1024, 1000, 999):
        assert chosen(of(length), kernels) == ONE
    (said,) = [record.getMessage() for record in caplog.records]
    assert "using the config of the own record for B2 H16 S1024, measured by an older version; try `flashgen tune`" in said


def test_an_older_benchmark_counts_as_older(own: Records, ship: Callable[..., ShippedRecords]) -> None:
    own.put(make(1e-3, of(1024), ONE, benchmark_version=BENCHMARK_VERSION - 1))
    assert chosen(of(1024)) == ONE
    ship(make(1.0, of(2048), TWO))
    assert chosen(of(1024)) == TWO, "a slow one of another length, but of today"


def test_times_are_compared_within_one_revision_only(own: Records) -> None:
    own.put(older(make(1e-3, of(1024), ONE), 2))
    own.put(older(make(5e-3, of(1024), TWO), 1))
    own.put(older(make(4e-3, of(1024), THREE), 1))
    own.put(make(1e-9, of(1024), FOUR, benchmark_version=BENCHMARK_VERSION - 1))
    assert chosen(of(1024)) == THREE


@pytest.mark.parametrize(
    "change",
    [
        {"revision": FAMILY.revision + 1},
        {"revision": FAMILY.revision - 1, "family": "no_such_family"},
        {"revision": FAMILY.revision - 1, "target": "sm_80"},
        {"revision": FAMILY.revision - 1, "config": {**ONE.to_json(), "block_kv": 17}},
        {"revision": FAMILY.revision - 1, "config": {**ONE.to_json(), "of_then": 1}},
        {"revision": FAMILY.revision - 1, "problem": {**make().spec["problem"], "mask": "causal"}},
    ],
    ids=str,
)
def test_what_no_family_makes_today_does_not_count(own: Records, change: dict[str, Any]) -> None:
    model = chosen(of(1024))
    assert model != ONE
    own.put(make(1e-3, of(1024), spec={**make(config=ONE).spec, **change}))
    assert chosen(of(1024)) == model


def test_a_later_benchmark_does_not_count(own: Records) -> None:
    model = chosen(of(1024))
    own.put(make(1e-3, of(1024), ONE, benchmark_version=BENCHMARK_VERSION + 1))
    assert chosen(of(1024)) == model


def test_an_older_config_that_spills_today_is_passed_over(own: Records) -> None:
    model = chosen(of(1024))
    own.put(older(make(1e-3, of(1024), ONE)))
    kernels = FakeKernels()
    kernels.broken = (ONE,)
    assert chosen(of(1024), kernels) == model


def test_older_records_can_be_imported_and_older_failures_cannot(own: Records) -> None:
    old, failed = older(make(1e-3, of(1024), ONE)), older(make(Failure(FailureKind.WRONG, "off by one"), of(1024), TWO))
    assert why_useless(old, BENCHMARK_VERSION) is None
    assert import_into(own, parse_records(to_text([old, failed]).encode()), BENCHMARK_VERSION).added == 1
    assert chosen(of(1024)) == ONE


@pytest.mark.parametrize("versions", [-1, 0, 1])
@pytest.mark.parametrize("revisions", [-1, 0, 1])
def test_a_failure_is_of_use_to_its_own_version_alone_and_a_time_to_later_ones(revisions: int, versions: int) -> None:
    """Both count how many ago: of -1, the record is of a later one."""
    spec = {**make().spec, "revision": FAMILY.revision - revisions}
    for outcome, useful in (
        (1e-3, revisions >= 0 and versions >= 0),
        (Failure(FailureKind.DEFECT, "spills"), revisions == versions == 0),
    ):
        reason = why_useless(make(outcome, spec=spec, benchmark_version=BENCHMARK_VERSION - versions), BENCHMARK_VERSION)
        assert (reason is None) is useful, reason


def test_own_and_shipped_records_are_known_by_one_rule(own: Records, ship: Callable[..., ShippedRecords]) -> None:
    mixed = [
        *(make(1e-3 * (i + 1), of(512 * (1 + i % 3)), CONFIGS[i], nvrtc_version=f"13.{i % 2}") for i in range(12)),
        *(older(make(1e-3 * (i + 1), of(512 * (1 + i % 2)), CONFIGS[i]), 1 + i % 2) for i in range(6)),
        make(Failure(FailureKind.DEFECT, "spills"), config=CONFIGS[20]),
        make(1e-9, device=find_device("h100")),
    ]
    own.add(mixed)
    mine, theirs = (source.known(PROBLEM, DEVICE, BENCHMARK_VERSION) for source in (own, ship(*mixed)))
    assert (mine.present, mine.older) == (theirs.present, theirs.older)
    assert len(mine.present) == 3
    assert len(mine.older) == 2


# Threads


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """What was compiled, each compile as long as a test says; loading does nothing."""
    compiled: list[KernelSpec] = []
    monkeypatch.setattr(compilation, "compile_spec", compiled.append)
    monkeypatch.setattr(loaded, "Kernel", lambda spec, artifact, gpu: SimpleNamespace(spec=spec))
    return compiled


SPECS = [KernelSpec(FAMILY, PROBLEM, config, DEVICE.target) for config in (ONE, TWO)]


def test_threads_compile_different_kernels_side_by_side(made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    together, kernels = threading.Barrier(2, timeout=10), Kernels()
    monkeypatch.setattr(compilation, "compile_spec", lambda spec: together.wait())
    with ThreadPoolExecutor(2) as pool:
        assert [kernel.spec for kernel in pool.map(lambda spec: kernels.load(spec, GPU), SPECS)] == SPECS


def test_threads_choose_different_kernels_side_by_side(own: Records, made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    together, kernels = threading.Barrier(2, timeout=10), Kernels()
    for config, length in ((ONE, 512), (TWO, 4096)):
        own.put(make(1e-3, of(length), config))
    monkeypatch.setattr(compilation, "compile_spec", lambda spec: together.wait())
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda length: kernels.choose(PROBLEM, of(length), GPU).spec.config, (512, 4096))
    assert list(found) == [ONE, TWO]


def test_one_compile_a_kernel_however_many_threads_ask(own: Records, made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, kernels = threading.Barrier(8, timeout=10), Kernels()
    own.put(make(1e-3, of(1024), ONE))

    def ask(number: int) -> Any:
        begun.wait()
        return kernels.load(SPECS[0], GPU) if number % 2 else kernels.choose(PROBLEM, of(1024), GPU)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert all(kernel is found[0] for kernel in found)
    assert made == SPECS[:1]


@pytest.mark.parametrize("recorded", [True, False])
def test_what_is_loaded_stays_loaded_when_choices_are_dropped(
    own: Records, made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    sound = SimpleNamespace(report=Report({"kernel": EntryReport(128)}))
    monkeypatch.setattr(loaded, "Kernel", lambda spec, artifact, gpu: SimpleNamespace(spec=spec, artifact=sound))
    if recorded:
        own.put(make(1e-3, of(1024), ONE))
    kernels = Kernels()
    first = kernels.choose(PROBLEM, of(1024), GPU)
    kernels.forget()
    assert kernels.choose(PROBLEM, of(1024), GPU) is first
    assert kernels.load(first.spec, GPU) is first
    assert made == [first.spec]


def test_a_failed_compile_is_tried_again(made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, tries = Kernels(), iter([OSError("disk full"), None])

    def compile_spec(spec: KernelSpec) -> None:
        if error := next(tries):
            raise error

    monkeypatch.setattr(compilation, "compile_spec", compile_spec)
    with pytest.raises(OSError, match="disk full"):
        kernels.load(SPECS[0], GPU)
    assert kernels.load(SPECS[0], GPU).spec == SPECS[0]


def test_what_was_chosen_while_records_changed_is_not_kept(own: Records, made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    own.put(make(1e-3, of(1024), ONE))
    monkeypatch.setattr(compilation, "compile_spec", lambda spec: kernels.forget())
    kernels.choose(PROBLEM, of(1024), GPU)
    assert not kernels.is_chosen(PROBLEM, of(1024), GPU)
    monkeypatch.setattr(compilation, "compile_spec", lambda spec: None)
    kernels.choose(PROBLEM, of(1024), GPU)
    assert kernels.is_chosen(PROBLEM, of(1024), GPU)
    assert kernels.is_chosen(PROBLEM, of(1000), GPU), "the same record speaks for the bucket"
