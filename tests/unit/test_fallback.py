"""Several families for one problem: which is preferred, and who takes the calls that it cannot take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.artifact import EntryReport, Report
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen import family as codegen_family
from flashgen.codegen.attention import attention_call
from flashgen.codegen.config import Config
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward.family import AttentionForward
from flashgen.codegen.family import Family
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.operators import cpu as cpu_operators
from flashgen.records import sources
from flashgen.records.choice import bucket
from flashgen.records.exchange import to_text
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import families, loaded
from flashgen.selection import families as selection_families
from flashgen.selection.families import default_spec, excluded_families, families_for
from flashgen.selection.loaded import Kernels
from flashgen.verification.screen import NothingToJudgeError, Screen
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, WORKLOAD, make

GPU = Gpu(0, DEVICE, "uuid", "13.0")
NONE: frozenset[str] = frozenset()
PICKY = frozenset({"picky"})
NO_KEYS = Workload(1, 4, 2, 100, 0)


class Picky(AttentionForward):
    """As the generic family, and preferred; but only on sm_90a, and neither without keys nor with heads that share their rows."""

    name = "picky"
    preference = 1

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        return super().refusals(problem, target) or ([] if target.name == "sm_90a" else [f"target must be sm_90a; got {target.name}"])

    def call_refusals(self, call: Call, config: Config | None = None) -> list[str]:
        reasons = [] if call.workload.len_kv else ["k must have keys; got none"]
        shared = call.workload.heads_kv > 1 and call.views["k"].strides[2] == 0
        return reasons + (["k must have heads of its own; got a stride of 0"] if shared else []) + super().call_refusals(call, config)


class FakeKernels(Kernels):
    """Loads nothing: a kernel is its spec and a clean report."""

    def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
        return SimpleNamespace(spec=spec, gpu=gpu, artifact=SimpleNamespace(report=Report({"kernel": EntryReport(128)})))


@pytest.fixture(autouse=True)
def picky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The families are the generic one and this; there are no records."""
    family = Picky()
    both = {FAMILY.name: FAMILY, family.name: family}
    for module in (codegen_family, selection_families):
        monkeypatch.setattr(module, "families", lambda: both)
    own = Records(tmp_path / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: own)
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path))
    monkeypatch.setattr(loaded, "nvrtc_version", lambda: "13.0")
    return family


def names(families: Sequence[Family]) -> list[str]:
    return [family.name for family in families]


def test_the_preferred_family_comes_first_where_it_can(picky: Family) -> None:
    assert names(families_for(PROBLEM, DEVICE.target)) == ["picky", "attention_forward"]
    assert names(families_for(PROBLEM, find_target("sm_80"))) == ["attention_forward"]
    assert default_spec(PROBLEM, DEVICE.target).family is picky
    assert default_spec(PROBLEM, DEVICE.target, PICKY).family is FAMILY


def test_the_model_s_pick_is_of_the_preferred_family() -> None:
    assert FakeKernels().choose(PROBLEM, WORKLOAD, GPU).spec.family.name == "picky"
    assert FakeKernels().choose(PROBLEM, WORKLOAD, GPU, PICKY).spec.family.name == "attention_forward"


def test_which_families_cannot_take_a_call() -> None:
    shared = attention_call(PROBLEM, WORKLOAD, {"k": (10000, 64, 0, 1)})
    assert excluded_families(attention_call(PROBLEM, WORKLOAD), DEVICE.target) == NONE
    assert excluded_families(shared, DEVICE.target) == PICKY
    assert excluded_families(attention_call(PROBLEM, NO_KEYS), DEVICE.target) == PICKY


def test_a_call_without_strides_is_as_dense_as_pytorch_s_tensors() -> None:
    call = attention_call(Problem(PROBLEM.dtype, 64, 32), Workload(3, 8, 2, 50, 70))
    for view in call.views.values():
        assert view.strides == torch.empty(view.sizes, device="meta").stride()


def test_where_none_is_left_every_reason_is_given(monkeypatch: pytest.MonkeyPatch, picky: Family) -> None:
    monkeypatch.setattr(families, "automatic_families", lambda problem: (picky,))
    with pytest.raises(ArgumentError, match=r"^k must have keys; got none; k must have heads of its own; got a stride of 0$"):
        excluded_families(attention_call(PROBLEM, NO_KEYS, {"k": (0, 0, 0, 1)}), DEVICE.target)


def test_choices_are_kept_apart() -> None:
    kernels = FakeKernels()
    first = kernels.choose(PROBLEM, WORKLOAD, GPU)
    assert kernels.is_chosen(PROBLEM, WORKLOAD, GPU)
    assert not kernels.is_chosen(PROBLEM, WORKLOAD, GPU, PICKY)
    other = kernels.choose(PROBLEM, WORKLOAD, GPU, PICKY)
    assert kernels.choose(PROBLEM, WORKLOAD, GPU) is first is not other
    assert kernels.choose(PROBLEM, WORKLOAD, GPU, PICKY) is other


def specs_of(picky: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the preferred family, and of the generic one with a config that neither the model nor the default picks."""
    return tuple(KernelSpec(f, PROBLEM, CONFIGS[1], DEVICE.target).to_json() for f in (picky, FAMILY))  # type: ignore[return-value]


@pytest.mark.parametrize("whose", ["own", "shipped"])
def test_records_of_an_excluded_family_do_not_count(whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picky: Family) -> None:
    fast, slow = specs_of(picky)
    known = [make(1e-6, spec=fast), make(1e-3, spec=slow)]
    if whose == "own":
        for record in known:
            sources.own_records().put(record)
    else:
        (tmp_path / "gpu.json").write_text(to_text(known))
    kernels = FakeKernels()
    assert kernels.choose(PROBLEM, WORKLOAD, GPU).spec.to_json() == fast
    assert kernels.choose(PROBLEM, WORKLOAD, GPU, PICKY).spec.to_json() == slow
    assert kernels.choose(PROBLEM, WORKLOAD, GPU).spec.to_json() == fast


def test_imports_of_an_excluded_family_do_not_count(picky: Family) -> None:
    load = FakeKernels().load
    mine, generic = (load(KernelSpec(f, PROBLEM, CONFIGS[1], DEVICE.target), GPU) for f in (picky, FAMILY))
    again = load(mine.spec, GPU)
    try:
        loaded.imports.add(mine)
        assert loaded.imports.find(PROBLEM, WORKLOAD, GPU) is mine
        assert loaded.imports.find(PROBLEM, WORKLOAD, GPU, PICKY) is None
        assert FakeKernels().choose(PROBLEM, WORKLOAD, GPU, PICKY).spec.family is FAMILY
        loaded.imports.add(generic)
        assert loaded.imports.find(PROBLEM, WORKLOAD, GPU) is mine, "of both the one preferred"
        assert FakeKernels().choose(PROBLEM, WORKLOAD, GPU, PICKY) is generic
        loaded.imports.add(again)
        assert loaded.imports.find(PROBLEM, WORKLOAD, GPU) is again
        of_bucket = load(generic.spec, GPU)
        loaded.imports.add(of_bucket, bucket(WORKLOAD))
        assert loaded.imports.find(PROBLEM, WORKLOAD, GPU) is of_bucket, "before those for all, of whatever family"
    finally:
        loaded.imports.clear()


@pytest.mark.parametrize(("keys", "expected"), [(5, "picky"), (0, "attention_forward")])
def test_calls_on_the_cpu(keys: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    monkeypatch.setattr(cpu, "load_emulated", lambda spec: spec)
    monkeypatch.setattr(cpu, "run_on_cpu", lambda spec, tensors, scale: ran.append(spec.family.name))
    cpu_operators._default_kernel.cache_clear()
    q, k = (torch.zeros(1, length, 2, 64, dtype=torch.bfloat16) for length in (3, keys))
    flashgen.attention(q, k, k)
    cpu_operators._default_kernel.cache_clear()
    assert ran == [expected]


def test_a_kernel_is_not_verified_on_what_its_family_cannot_take(picky: Family) -> None:
    spec = KernelSpec(picky, PROBLEM, CONFIGS[1], DEVICE.target)
    kernel: Any = SimpleNamespace(spec=spec)  # could not be launched
    with pytest.raises(NothingToJudgeError, match=rf"^{picky.name} takes none of the cases that it is to be judged by: "):
        Screen(PROBLEM, "cpu", [(1, 2, 1, 3, 0)]).judge(kernel)
