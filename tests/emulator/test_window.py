"""Sliding windows: the kernels of every family that has them, in the emulator, by the numerics rule; and faults of windows that show."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.fault import Fault, Setting
from tests.support.plan import planned, to_run
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text

# Family, head dim, whether gradients are deterministic, a config other than the default.
KERNELS: dict[str, tuple[str, int, bool, Config | None]] = {
    "generic": ("attention_forward", 64, False, AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)),
    "sm90": ("attention_forward_sm90", 64, False, AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "packed": ("attention_forward_sm90", 64, False, AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=2)),
    "backward": ("attention_backward", 64, False, None),
    "backward-ordered": ("attention_backward", 64, True, None),
    "backward-sm90": ("attention_backward_sm90", 64, False, None),
    "backward-sm90-ordered": ("attention_backward_sm90", 64, True, None),
    "backward-wide": ("attention_backward_wide_sm90", 256, False, None),
    "backward-wide-ordered": ("attention_backward_wide_sm90", 256, True, None),
}
# Both ends inside, rows that see no key at either side or at all, each side open, one key a row, ends beyond all keys.
WINDOWS = {
    "both-sides": (20, 30),
    "later-keys": (-20, 60),
    "earlier-keys": (90, -40),
    "one-key": (0, 0),
    "left-open": (OPEN, 5),
    "right-open": (7, OPEN),
    "right-open-later": (-130, OPEN),
    "left-open-earlier": (OPEN, -130),
    "empty": (40, -60),
    "beyond-all": (1000, -1000),
    "empty-past-a-tile": (-125, 0),
    "far-later": (-200, 300),
}
LENGTHS = ((150, 300), (200, 90), (70, 70))
CASES = list(itertools.product(KERNELS, WINDOWS, LENGTHS))


def spec_of(kernel: str, dtype: Dtype = Dtype.FP16) -> KernelSpec:
    name, head_dim, deterministic, config = KERNELS[kernel]
    family, target = find_family(name), find_target("sm_90a")
    problem = Problem(dtype, head_dim, head_dim, Mask.FULL, family.operation, deterministic, ("window",))
    return KernelSpec(family, problem, config or family.default(problem, target), target)


def judged(spec: KernelSpec, text: Source, lengths: tuple[int, int], ends: tuple[int, int]) -> Verdict:
    tensors = Tensors.random(spec.problem, Workload(1, 4, 2, *lengths, *ends), torch.Generator().manual_seed(5))
    run_on_cpu(emulated_kernel(spec, text), tensors, limits=LIMITS)
    return Expected.of(tensors).judge(tensors)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    wanted = {params["kernel"] for params in to_run(request) if "kernel" in params}
    compile_ahead(emulated_text(spec_of(kernel)) for kernel in KERNELS if kernel in wanted)


@pytest.mark.parametrize(
    ("kernel", "window", "lengths"),
    planned(
        CASES,
        1,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: case,
        name=lambda case: f"{case[0]}-{case[1]}-{case[2]}",
        seconds=lambda case: 1.0,
    ),
)
def test_a_window_hides_what_it_should(kernel: str, window: str, lengths: tuple[int, int]) -> None:
    spec = spec_of(kernel)
    verdict = judged(spec, emulated_text(spec), lengths, WINDOWS[window])
    assert verdict.ok, verdict.message


def fault(name: str, find: str, replace: str, kernel: str) -> tuple[str, Fault]:
    return kernel, Fault(f"{name}-{kernel}", find, replace, Setting(KERNELS[kernel][3] or AttentionForwardSm90Config(2, 64), ()))


_LEFT, _RIGHT = "len_kv - len_q - p.window_left", "len_kv - len_q + p.window_right"
_KEYS = "{max(0, query + first), query + last + 1}"
_VISIBLE = "static_cast<u32>(key - query - first) < static_cast<u32>(max(0, last - first + 1))"
_BEGIN, _END = "any ? begin : kNever", "end = max(0, end_key - first)"
FAULTS = [
    fault("left-end-one-short", _LEFT, f"{_LEFT} + 1", "generic"),
    fault("left-end-one-far", _LEFT, f"{_LEFT} - 1", "sm90"),
    fault("right-end-one-short", _RIGHT, f"{_RIGHT} - 1", "sm90"),
    fault("right-end-one-far", _RIGHT, f"{_RIGHT} + 1", "generic"),
    fault("aligned-top-left", _LEFT, "-p.window_left", "sm90"),
    fault("first-key-not-hidden", _KEYS, "{0, query + last + 1}", "generic"),
    fault("last-key-not-hidden", _KEYS, "{max(0, query + first), 0x7fffffff}", "sm90"),
    fault("left-end-one-short", _VISIBLE, "query + first < key && key <= query + last", "backward"),
    fault("right-end-one-short", _VISIBLE, "query + first <= key && key < query + last", "backward-sm90"),
    fault("right-end-not-seen", _VISIBLE, "query + first <= key", "backward"),
    fault("first-queries-skipped", _BEGIN, "any && begin + 128 < len_q ? begin + 128 : kNever", "backward"),
    fault("last-queries-skipped", _END, "end = max(0, end_key - first - 128)", "backward-sm90"),
    fault("taken-for-full", "max(0, first_key - first + 1)", "0x7fffffff", "backward"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned(
        FAULTS,
        0,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: [case[1].find],
        name=lambda case: case[1].name,
        seconds=lambda case: 2.0,
        fault=True,
    ),
)
def test_a_fault_of_a_window_shows(kernel: str, planted: Fault) -> None:
    spec = spec_of(kernel)
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    assert not judged(spec, text, (500, 650), (140, 150)).ok
