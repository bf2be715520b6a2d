"""What the choice of a kernel depends on, and that one choice is not taken for another: problem, sizes, GPU, families, defects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.build.artifact import EntryReport, Report
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records import sources
from flashgen.records.choice import bucket, distance
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import compilation, loaded, ranking
from flashgen.selection.families import default_spec, families_for
from flashgen.selection.loaded import Kernels
from flashgen.selection.picks import model_picks
from flashgen.selection.ranking import Candidate, shortlist
from tests.support.made_records import CONFIGS, FAMILY, make

PROBLEM, WORKLOAD = Problem(Dtype.BF16, 64), Workload(2, 16, 16, 1024, 1024)
HOPPER, AMPERE = Gpu(0, find_device("h200"), "uuid 0", "13.0"), Gpu(1, find_device("a100"), "uuid 1", "13.0")
SAME = dataclasses.replace(HOPPER, ordinal=2, uuid="uuid 2")


class FakeKernels(Kernels):
    """Loads nothing. `broken` specs are those whose kernel the compiler spoils."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()
        self.spills: dict[str, int] = {}  # of broken specs, where it is not 8 B
        self.asked: list[str] = []

    def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
        self.asked.append(spec.digest)
        return SimpleNamespace(
            spec=spec,
            gpu=gpu,
            artifact=SimpleNamespace(
                report=Report({"kernel": EntryReport(128, self.spills.get(spec.digest, 8) * (spec.digest in self.broken), 0)})
            ),
        )


@pytest.fixture(autouse=True)
def no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    """No records, and no imported kernels before or after."""
    own = Records(tmp_path / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: own)
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path))
    monkeypatch.setattr(loaded, "nvrtc_version", lambda: "13.0")
    loaded.imports.clear()
    yield own
    loaded.imports.clear()


def test_each_gpu_problem_bucket_and_set_of_families_has_a_choice_of_its_own() -> None:
    kernels = FakeKernels()
    causal, longer = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL), dataclasses.replace(WORKLOAD, len_kv=4096)
    excluded = frozenset({"attention_forward_sm90"})
    asked: list[tuple[Problem, Workload, Gpu, frozenset[str]]] = [
        *((problem, WORKLOAD, gpu, frozenset()) for problem in (PROBLEM, causal) for gpu in (HOPPER, SAME, AMPERE)),
        (PROBLEM, longer, HOPPER, frozenset()),
        (PROBLEM, WORKLOAD, HOPPER, excluded),
    ]
    chosen = []
    for call in asked:
        assert not kernels.is_chosen(*call)
        chosen.append(kernels.choose(*call))
        assert kernels.is_chosen(*call)
    for (problem, _, gpu, left), kernel in zip(asked, chosen, strict=True):
        assert kernel.spec.problem == problem
        assert kernel.gpu is gpu
        assert kernel.spec.target == gpu.device.target
        assert kernel.spec.family.name not in left
    assert [kernels.choose(*call) for call in asked] == chosen
    kernels.forget()
    assert not any(kernels.is_chosen(*call) for call in asked)


def test_a_kernel_is_loaded_once_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_spec", lambda spec: spec.digest)
    monkeypatch.setattr(loaded, "Kernel", lambda spec, artifact, gpu: SimpleNamespace(spec=spec, artifact=artifact, gpu=gpu))
    kernels = Kernels()
    specs = [KernelSpec(FAMILY, PROBLEM, config, HOPPER.device.target) for config in CONFIGS[:2]]
    by_place: dict[tuple[str, int], Any] = {}
    for spec in specs:
        for gpu in (HOPPER, SAME):
            kernel: Any = kernels.load(spec, gpu)
            assert (kernel.spec, kernel.gpu, kernel.artifact) == (spec, gpu, spec.digest)
            by_place[spec.digest, gpu.ordinal] = kernel
    assert len({id(kernel) for kernel in by_place.values()}) == 4
    assert all(kernels.load(spec, gpu) is by_place[spec.digest, gpu.ordinal] for spec in specs for gpu in (HOPPER, SAME))


def test_a_pick_of_the_model_that_the_compiler_spoils_is_passed_over() -> None:
    problem, workload, target = PROBLEM, WORKLOAD, HOPPER.device.target
    default = default_spec(problem, target)
    first, second, third = (
        KernelSpec(candidate.family, problem, candidate.config, target)
        for candidate in shortlist(problem, workload, HOPPER.device, 3, [default.family])
    )
    for broken, expected in (
        ((), first),
        ((first,), second),
        ((first, second), third),
        ((first, second, third), default),
    ):
        kernels = FakeKernels()
        kernels.broken = {spec.digest for spec in broken} - {default.digest}
        assert kernels.choose(problem, workload, HOPPER).spec == expected


def test_where_the_default_spills_others_are_tried_and_at_last_what_spills_least() -> None:
    """As many modifiers together may have it."""
    every = list(model_picks(PROBLEM, WORKLOAD, HOPPER.device))
    default = default_spec(PROBLEM, HOPPER.device.target)
    assert every.index(default) < len(every) - 2
    kernels = FakeKernels()
    kernels.broken = {spec.digest for spec in every[:-1]} - {every[-1].digest}
    assert kernels.choose(PROBLEM, WORKLOAD, HOPPER).spec == every[-1]
    kernels, least = FakeKernels(), every[-2]
    kernels.broken, kernels.spills = {spec.digest for spec in every}, {spec.digest: 40 for spec in every} | {least.digest: 16}
    assert kernels.choose(PROBLEM, WORKLOAD, HOPPER).spec == least


def test_of_configs_that_the_model_cannot_tell_apart_two_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would crowd out what differs."""
    seconds = [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 4.0]
    made = [Candidate(FAMILY, config, s, "issue") for config, s in zip(CONFIGS[: len(seconds)], seconds, strict=True)]
    monkeypatch.setattr(ranking, "ranked", lambda *_: made)
    for count, expected in ((1, [0]), (3, [0, 1, 3]), (5, [0, 1, 3, 4, 5]), (9, [0, 1, 3, 4, 5, 8])):
        assert shortlist(PROBLEM, WORKLOAD, HOPPER.device, count) == [made[i] for i in expected]


def test_each_family_has_a_share_of_what_is_tried() -> None:
    """The model of one may expect too little: of 64-row tiles on few heads `attention_forward` is expected to be faster than it is."""
    problem, workload = Problem(Dtype.BF16, 128, mask=Mask.CAUSAL), Workload(1, 8, 8, 1024, 1024)
    able = families_for(problem, HOPPER.device.target)
    chosen = shortlist(problem, workload, HOPPER.device, 16)
    assert len(chosen) == 16
    assert len(able) > 1
    for family in able:
        own = [candidate.config for candidate in chosen if candidate.family is family]
        assert len(own) >= 2
        assert own == [candidate.config for candidate in shortlist(problem, workload, HOPPER.device, len(own), [family])]


def test_imported_kernels_are_for_their_gpu_and_problem() -> None:
    imports, spec = loaded.imports, default_spec(PROBLEM, HOPPER.device.target)
    kernel: Any = SimpleNamespace(spec=spec, gpu=SAME)
    imports.add(kernel)
    assert imports.find(PROBLEM, WORKLOAD, SAME) is kernel
    assert imports.find(PROBLEM, WORKLOAD, HOPPER) is None
    assert imports.find(dataclasses.replace(PROBLEM, mask=Mask.CAUSAL), WORKLOAD, SAME) is None
    assert imports.find(PROBLEM, WORKLOAD, SAME, frozenset({spec.family.name})) is None
    imports.clear()
    assert imports.find(PROBLEM, WORKLOAD, SAME) is None


def test_choices_are_made_anew_after_an_import_and_after_it_is_gone() -> None:
    before = loaded.kernels.generation
    imports = loaded.imports
    kernel: Any = SimpleNamespace(spec=default_spec(PROBLEM, HOPPER.device.target), gpu=HOPPER)
    imports.add(kernel)
    between = loaded.kernels.generation
    imports.clear()
    assert before < between < loaded.kernels.generation


def test_records_speak_for_their_own_device(no_records: Records) -> None:
    """A device is a name and a number of SMs: boards of one name differ."""
    target = HOPPER.device.target
    preferred = default_spec(PROBLEM, target)
    slow = KernelSpec(FAMILY, PROBLEM, CONFIGS[-1], target)
    assert slow != preferred
    no_records.put(make(1e-3, spec=slow.to_json()))
    assert FakeKernels().choose(PROBLEM, WORKLOAD, HOPPER).spec == slow
    for changes in ({"sm_count": 114}, {"name": "NVIDIA H100"}):
        other = dataclasses.replace(HOPPER, device=dataclasses.replace(HOPPER.device, **changes))
        assert FakeKernels().choose(PROBLEM, WORKLOAD, other).spec != slow


def test_records_of_workloads_that_differ_in_one_size_are_apart(no_records: Records) -> None:
    configs = iter(CONFIGS)
    workloads = [WORKLOAD, *(dataclasses.replace(WORKLOAD, **{name: 3 * 1024}) for name in ("len_q", "len_kv"))]
    workloads += [
        dataclasses.replace(WORKLOAD, batch=24),
        dataclasses.replace(WORKLOAD, heads_kv=4),
        dataclasses.replace(WORKLOAD, heads_q=64),
    ]
    specs = {}
    for at, workload in enumerate(workloads):
        specs[workload] = KernelSpec(FAMILY, PROBLEM, next(configs), HOPPER.device.target)
        no_records.put(make(1e-3 * (at + 1), workload=workload, spec=specs[workload].to_json()))
    for workload, spec in specs.items():
        choice = no_records.best(PROBLEM, workload, HOPPER.device, "13.0", "13.0", BENCHMARK_VERSION)
        assert choice is not None
        assert choice.exact_workload
        assert choice.record.spec == spec.to_json()


def test_a_bucket_keeps_batch_and_heads_together() -> None:
    assert bucket(Workload(3, 8, 2, 100, 200)) == Workload(1, 32, 8, 128, 256)
    assert bucket(Workload(6, 4, 1, 100, 200)) == Workload(1, 32, 8, 128, 256)
    assert bucket(Workload(1, 4, 1, 100, 200)) == Workload(1, 4, 1, 128, 256)


def test_the_bucket_of_packed_sequences_is_that_of_their_mean_lengths() -> None:
    packed = Workload(3, 8, 2, 4000, 4000, tokens_q=300, tokens_kv=750)
    assert bucket(packed) == bucket(Workload(3, 8, 2, 100, 250)) == Workload(1, 32, 8, 128, 256)


def test_packed_sequences_are_as_far_as_ones_of_their_mean_lengths() -> None:
    packed, equal = Workload(3, 8, 2, 4000, 4000, window_left=20, tokens_q=300, tokens_kv=750), Workload(3, 8, 2, 100, 250, window_left=20)
    other = Workload(1, 8, 2, 512, 512, window_left=9)
    assert distance(packed, equal) == 0
    assert distance(packed, other) == distance(equal, other) == distance(other, packed) > 0
