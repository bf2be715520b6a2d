"""What a call of a length not seen before costs, in counted work; and that its kernel follows from call, imports and records alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.artifact import EntryReport, Report
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.config import Config
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch import bound
from flashgen.launch import gpu as launch_gpu
from flashgen.operators import plans
from flashgen.records import choice, sources
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import loaded
from flashgen.selection.imports import Imports
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make
from tools import call_overhead
from tools.call_overhead import OnGpu

GPU = Gpu(0, DEVICE, "uuid", "13.0")
ONE, TWO, THREE = CONFIGS[1], CONFIGS[2], CONFIGS[3]
MOST_CALLS = 130  # of Python functions for a new length: 123 when this was written, 675 before what is the same for all was kept


def of(length: int) -> Workload:
    return Workload(2, 16, 16, length, length)


class FakeKernels(loaded.Kernels):
    """Loads nothing: a kernel is its spec and a clean report."""

    def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
        return SimpleNamespace(spec=spec, gpu=gpu, artifact=SimpleNamespace(report=Report({"kernel": EntryReport(128)})))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    """The user's records; none come with the package."""
    found, shipped = Records(tmp_path / "records.sqlite3"), ShippedRecords(tmp_path)
    monkeypatch.setattr(sources, "own_records", lambda: found)
    monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
    monkeypatch.setattr(loaded, "nvrtc_version", lambda: "13.0")
    return found


def config(kernels: loaded.Kernels, length: int, any_length: bool = False) -> Config:
    return kernels.choose(PROBLEM, of(length), GPU, any_length=any_length).spec.config


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], object]:
    """A call of d 128 on an H200 that is made up, of one query and so many keys; calls of 8193 and 16000 were made before."""
    call_overhead.pretend("h200", tmp_path, monkeypatch.setattr)
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    memory = torch.zeros(1, 2**14, 8, 128, dtype=torch.bfloat16)
    q = OnGpu(memory[:, :1].repeat(1, 1, 4, 1))

    def made(keys: int) -> object:
        tensor = OnGpu(memory[:, :keys])
        return plans.plan_for(q, tensor, tensor, False, None, "bshd").run(q, tensor, tensor, False)

    for keys in (8193, 16000):
        made(keys)
    return made


def python_calls(work: Callable[[], object]) -> int:
    """How many Python functions are called meanwhile."""
    found = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(found)


def test_a_call_of_a_new_length_does_little(call: Callable[[int], object]) -> None:
    for keys in (9001, 12345):
        assert python_calls(lambda keys=keys: call(keys)) <= MOST_CALLS  # type: ignore[misc]


def test_a_call_of_a_new_length_walks_no_records(call: Callable[[int], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*arguments: Any) -> Any:
        raise AssertionError(f"records were walked for {arguments}")

    for place, name in ((loaded, "picks"), (loaded, "model_picks"), (choice, "_nearest"), (choice, "takes")):
        monkeypatch.setattr(place, name, walked)
    call(9001)
    with pytest.raises(AssertionError, match="records were walked"):
        call(2500)  # of another bucket


def test_a_new_length_is_still_checked(call: Callable[[int], object]) -> None:
    def asked(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        memory = torch.zeros(1, 9002, 8, 128, dtype=torch.bfloat16)
        tensor = OnGpu(change(memory))
        plans.plan_for(OnGpu(memory[:, :1]), tensor, tensor, False, None, "bshd")

    with pytest.raises(ArgumentError, match=r"^k must be contiguous in its last dimension"):
        asked(lambda memory: memory.transpose(1, 3).contiguous().transpose(1, 3))
    with pytest.raises(ArgumentError, match=r"^q must have a number of heads that is a multiple of k's 7; got 8$"):
        asked(lambda memory: memory[:, :, :7])
    with pytest.raises(ArgumentError, match=r"^k must have q's head_dim 128; got 64$"):
        asked(lambda memory: memory[..., :64])


def test_a_call_like_one_before_but_for_the_keys_of_k_or_of_v_is_no_new_length(call: Callable[[int], object]) -> None:
    call(9001)
    memory = torch.zeros(1, 2**14, 8, 128, dtype=torch.bfloat16)
    q = OnGpu(memory[:, :1].repeat(1, 1, 4, 1))

    def plan(k: torch.Tensor, v: torch.Tensor) -> launch_gpu.Plan:
        return plans.plan_for(q, OnGpu(k), OnGpu(v), False, None, "bshd")

    with pytest.raises(ArgumentError, match=r"^v must have k's length 9002; got 9003$"):
        plan(memory[:, :9002], memory[:, :9003])
    with pytest.raises(ArgumentError, match=r"^v must have k's number of heads 8; got 4$"):
        plan(memory[:, :9002], memory[:, :9002, :4])
    assert plan(memory[:, :9002], memory[:, :9002, :, :64]).numbers[0][0] == (1, 1, 32, 64)
    assert plan(memory[:, :1], memory[:, :1]) is not plan(memory[:, :9002], memory[:, :9002])


def test_a_new_length_takes_another_kernel_where_the_chosen_one_cannot(call: Callable[[int], object]) -> None:
    def family(keys: torch.Tensor) -> str:
        q = OnGpu(torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16))
        plan = plans.plan_for(q, keys, keys, False, None, "bshd")
        assert plan.bound is not None
        return str(plan.bound.launch.kernel.spec.family.name)

    class FarApart(OnGpu):
        def stride(self, *dim: int) -> Any:  # type: ignore[override]
            return 0, 2**41, 128, 1

    rows = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    assert family(OnGpu(rows.expand(1, 9003, 8, 128))) == "attention_decode_sm90"
    assert family(FarApart(rows.expand(1, 9003, 8, 128))) == "attention_decode", "no tensor map has such strides"
    assert family(OnGpu(rows.expand(1, 9004, 8, 128))) == "attention_decode_sm90"


def test_options_of_a_new_signature_are_checked_without_the_dispatcher(
    call: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_without_gradients", lambda *tensors: True)  # as for tensors that are on a GPU
    q = OnGpu(torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16))
    for options, named in (
        ((1, None, "bshd", False), "causal"),
        ((False, "1", "bshd", False), "scale"),
        ((False, None, "bshd", 1), "return_lse"),
    ):
        with pytest.raises(ArgumentError, match=f"^{named} must be"):
            plans.run_at_hand(q, q, q, *options)
    assert plans.run_at_hand(q, q, q, False, None, "bshd", False) is plans.plan_for(q, q, q, False, None, "bshd").run


def of_a_call(tensors: tuple[torch.Tensor, ...], causal: bool, scale: float | None, layout: str) -> list[object]:
    """What this thread's plan launches, to the byte of its parameters, and what it gives."""
    q, k, v = map(OnGpu, tensors)
    plan = plans.plan_for(q, k, v, causal, scale, layout)
    assert plan.bound is not None
    plan.run(q, k, v, False)  # writes the parameters
    launched = [(bytes(memory._buffer), memory.suffix) for memory in plan.bound.launch.memories]
    return [plan.bound.launch.kernel.spec.name, launched, plan.numbers[0]]


def test_a_plan_of_a_new_length_is_that_of_a_thread_that_called_nothing_before(
    call: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte of its parameters, whatever was kept of calls before. All that calls allocate lies at one address."""
    for module in (launch_gpu, bound):
        monkeypatch.setattr(module, "empty_strided", lambda *given: SimpleNamespace(data_ptr=lambda: 2**20))
    memory = torch.zeros(2**22, dtype=torch.bfloat16)

    def tensors(keys: int, q: tuple[int, ...] = (1, 3, 32, 128), heads: int = 8, v: int = 128, row: int = 0) -> tuple[torch.Tensor, ...]:
        row = row or heads * q[3]
        k = memory.as_strided((1, keys, heads, q[3]), (keys * row, row, q[3], 1))
        return memory[: 3 * 32 * q[3]].view(q), k, memory[: keys * heads * v].view(1, keys, heads, v)

    def asked(keys: int) -> list[list[object]]:
        plain = tensors(keys)
        swapped = tuple(tensor.transpose(1, 2) for tensor in plain)
        calls = [(plain, causal, scale, "bshd") for causal in (False, True) for scale in (None, 0.25)]
        for other in (tensors(keys, heads=4), tensors(keys, v=64), tensors(keys, row=2**11), tensors(keys, (1, 6, 16, 128))):
            calls.append((other, True, None, "bshd"))
        return [of_a_call(*one) for one in (*calls, (swapped, True, None, "bhsd"), (plain[::1], False, 0.5, "bshd"))]

    for keys in (1500, 1100, 2, 1, 1101):
        asked(keys)
    known = [asked(keys) for keys in (1400, 700, 3, 1)]
    for keys, found in zip((1400, 700, 3, 1), known, strict=True):
        monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
        monkeypatch.setattr(loaded, "kernels", loaded.Kernels())
        assert asked(keys) == found


def test_the_exact_record_counts_after_its_bucket_was_chosen(own: Records) -> None:
    kernels = FakeKernels()
    own.put(make(1e-3, of(1024), ONE))
    own.put(make(1e-3, of(900), TWO))
    assert [config(kernels, length) for length in (1000, 900, 901, 1024, 900)] == [ONE, TWO, ONE, ONE, TWO]
    assert config(kernels, 900, any_length=True) == ONE


def test_a_bucket_chosen_by_a_recorded_workload_is_no_other_s(own: Records) -> None:
    kernels = FakeKernels()
    own.put(make(1e-3, of(1024), ONE))
    own.put(make(1e-3, of(900), TWO))
    assert [config(kernels, length) for length in (900, 1000)] == [TWO, ONE]


def test_records_that_change_are_heard(own: Records) -> None:
    kernels = FakeKernels()
    model = config(kernels, 1000)
    assert kernels.cached(PROBLEM, of(999), GPU, frozenset(), False) is not None
    own.put(make(1e-3, of(1024), ONE))
    assert kernels.cached(PROBLEM, of(999), GPU, frozenset(), False) is None
    assert model != config(kernels, 999) == ONE
    own.add([make(1e-3, of(998), TWO)])
    assert [config(kernels, length) for length in (998, 997)] == [TWO, ONE]
    own.clear()
    assert config(kernels, 996) == model


def test_shipped_records_that_change_are_heard(own: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FakeKernels()
    model = config(kernels, 1000)
    other = ShippedRecords(tmp_path / "others")
    monkeypatch.setattr(other, "for_device", lambda *device: [make(1e-3, of(1024), ONE)])
    monkeypatch.setattr(sources, "shipped_records", lambda: other)
    assert model != config(kernels, 999) == ONE


@pytest.mark.usefixtures("own")
def test_imports_that_change_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FakeKernels()
    imports = Imports(changed=kernels.forget)
    monkeypatch.setattr(loaded, "imports", imports)
    model = config(kernels, 1000)
    imports.add(kernels.load(KernelSpec(FAMILY, PROBLEM, THREE, DEVICE.target), GPU))
    assert config(kernels, 999) == THREE
    imports.clear()
    assert config(kernels, 998) == model != THREE


@pytest.mark.usefixtures("own")
def test_what_is_kept_is_of_one_problem_one_gpu_and_the_same_families() -> None:
    kernels, none = FakeKernels(), frozenset[str]()
    config(kernels, 1000)
    assert kernels.cached(PROBLEM, of(999), GPU, none, False) is not None
    assert kernels.cached(Problem(Dtype.FP16, PROBLEM.head_dim), of(999), GPU, none, False) is None
    assert kernels.cached(PROBLEM, of(999), Gpu(1, find_device("h200"), "other", "13.0"), none, False) is None
    assert kernels.cached(PROBLEM, of(999), GPU, frozenset({"attention_forward_sm90"}), False) is None
    assert kernels.cached(PROBLEM, of(1025), GPU, none, False) is None
    assert kernels.cached(PROBLEM, Workload(2, 32, 16, 999, 999), GPU, none, False) is None, "another group"


def test_while_a_graph_is_captured_a_new_length_of_a_bucket_needs_no_kernel(
    call: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(9001)
    with pytest.raises(launch_gpu.CaptureError):
        call(100)


@pytest.mark.slow
def test_the_tool_tells_both_kinds_of_calls() -> None:
    """In a process of its own, which it leaves with a driver that is made up."""
    command = [sys.executable, "tools/call_overhead.py", "--calls", "3", "--causal"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True)
    told = re.fullmatch(r"known signature: median [\d.]+ us, .* [\d.]+ us\nnew length: median [\d.]+ us, .* [\d.]+ us\n", done.stdout)
    assert told, done.stdout
