"""Chunks: the kernels of every family that has them, in the emulator, by the numerics rule, also with windows; and faults that show."""

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

GENERIC = AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
# Family, head dim, mask, whether gradients are deterministic, whether there is a window, too, a config other than the default.
KERNELS: dict[str, tuple[str, int, Mask, bool, bool, Config | None]] = {
    "generic": ("attention_forward", 64, Mask.CAUSAL, False, False, GENERIC),
    "generic-window": ("attention_forward", 64, Mask.FULL, False, True, GENERIC),
    "sm90": ("attention_forward_sm90", 64, Mask.FULL, False, False, AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "packed": ("attention_forward_sm90", 64, Mask.CAUSAL, False, False, AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=2)),
    "backward": ("attention_backward", 64, Mask.FULL, False, False, None),
    "backward-ordered": ("attention_backward", 64, Mask.CAUSAL, True, False, None),
    "backward-window-ordered": ("attention_backward", 64, Mask.FULL, True, True, None),
    "backward-sm90": ("attention_backward_sm90", 64, Mask.CAUSAL, False, False, None),
    "backward-sm90-ordered": ("attention_backward_sm90", 64, Mask.FULL, True, False, None),
    "backward-wide": ("attention_backward_wide_sm90", 256, Mask.CAUSAL, False, False, None),
    "backward-sm90-window-ordered": ("attention_backward_sm90", 64, Mask.FULL, True, True, None),
    "backward-wide-ordered": ("attention_backward_wide_sm90", 256, Mask.FULL, True, False, None),
    "backward-wide-window-ordered": ("attention_backward_wide_sm90", 256, Mask.FULL, True, True, None),
}
CHUNKS = (1, 3, 50, 64, 128, 130, 1000)
LENGTHS = ((150, 300), (200, 90), (70, 70), (1, 129))
ENDS = {False: (OPEN, OPEN), True: (40, -20)}  # of a window that meets no key of its query's chunk where the query is near its beginning
CASES = list(itertools.product(KERNELS, CHUNKS, LENGTHS))


def spec_of(kernel: str, dtype: Dtype = Dtype.FP16) -> KernelSpec:
    name, head_dim, mask, deterministic, window, config = KERNELS[kernel]
    family, target = find_family(name), find_target("sm_90a")
    modifiers = ("chunk", "window") if window else ("chunk",)
    problem = Problem(dtype, head_dim, head_dim, mask, family.operation, deterministic, modifiers)
    return KernelSpec(family, problem, config or family.default(problem, target), target)


def judged(kernel: str, spec: KernelSpec, text: Source, lengths: tuple[int, int], chunk: int) -> Verdict:
    workload = Workload(1, 4, 2, *lengths, *ENDS[KERNELS[kernel][4]], chunk)
    tensors = Tensors.random(spec.problem, workload, torch.Generator().manual_seed(5))
    run_on_cpu(emulated_kernel(spec, text), tensors, limits=LIMITS)
    return Expected.of(tensors).judge(tensors)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    wanted = {params["kernel"] for params in to_run(request) if "kernel" in params}
    compile_ahead(emulated_text(spec_of(kernel)) for kernel in KERNELS if kernel in wanted)


@pytest.mark.parametrize(
    ("kernel", "chunk", "lengths"),
    planned(
        CASES,
        1,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: case,
        name=lambda case: f"{case[0]}-{case[1]}-{case[2]}",
        seconds=lambda case: 1.0,
    ),
)
def test_a_query_sees_its_own_chunk(kernel: str, chunk: int, lengths: tuple[int, int]) -> None:
    spec = spec_of(kernel)
    verdict = judged(kernel, spec, emulated_text(spec), lengths, chunk)
    assert verdict.ok, verdict.message


def fault(name: str, find: str, replace: str, kernel: str) -> tuple[str, Fault]:
    return kernel, Fault(f"{name}-{kernel}", find, replace, Setting(KERNELS[kernel][5] or AttentionForwardSm90Config(2, 64), ()))


_OF = "{len_kv - len_q, p.chunk,"
_FIRST = "return (static_cast<int>(product >> 32) >> shift) * size;"
_KEYS = "{first, position < 0 ? 0 : first + size}"
_VISIBLE = "static_cast<u32>(query - (first_of(key) - causal_offset)) < static_cast<u32>(size)"
_MASKED = "static_cast<u32>(from + j * 8 + e) >= static_cast<u32>(count)"
_BEGIN, _END = "begin = max(0, first - causal_offset)", "end = max(0, last + size - causal_offset)"
FAULTS = [
    fault("aligned-top-left", _OF, "{0, p.chunk,", "sm90"),
    fault("a-position-off", _OF, "{len_kv - len_q + 1, p.chunk,", "backward-sm90"),
    fault("border-one-late", _FIRST, _FIRST.replace(";", " + 1;"), "generic"),
    fault("border-one-early", _FIRST, "return max(0, (static_cast<int>(product >> 32) >> shift) * size - 1);", "packed"),
    fault("first-key-not-hidden", _KEYS, "{0, position < 0 ? 0 : first + size}", "packed"),
    fault("last-key-not-hidden", _KEYS, "{first, position < 0 ? 0 : 0x7fffffff}", "sm90"),
    fault("queries-before-the-first-key", _KEYS, "{first, first + size}", "sm90"),
    fault("later-queries-not-hidden", _MASKED, "from + j * 8 + e < 0", "backward-sm90"),
    fault("later-queries-not-hidden", _VISIBLE, "query >= first_of(key) - causal_offset", "backward"),
    fault("earlier-queries-not-hidden", _VISIBLE, "query - (first_of(key) - causal_offset) < size", "backward"),
    fault("earlier-queries-not-hidden", _MASKED, "from + j * 8 + e >= count", "backward-sm90"),
    fault("of-one-row-for-all", "own = key + i * 16 + h * 8", "own = key + i * 16", "backward-wide"),
    fault("one-query-off", _BEGIN, f"{_BEGIN} + 1", "backward-sm90"),
    fault("first-queries-skipped", _BEGIN, "begin = max(0, first - causal_offset) + 128", "backward"),
    fault("last-queries-skipped", _END, "end = max(0, last + size - causal_offset - 128)", "backward-sm90"),
    fault("taken-for-full", "first == last ? end : 0", "0x7fffffff", "backward"),
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
def test_a_fault_of_chunks_shows(kernel: str, planted: Fault) -> None:
    spec = spec_of(kernel)
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    lengths = (700, 650) if "before" in planted.name else (500, 650)
    assert not judged(kernel, spec, text, lengths, 150).ok


@pytest.mark.parametrize("kernel", ["generic", "sm90", "backward", "backward-sm90", "backward-wide"])
def test_tiles_of_other_chunks_are_not_visited(kernel: str) -> None:
    """NaN in values, times probabilities of 0, or in keys, times gradients of 0, would show."""
    spec = spec_of(kernel)
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 128, 640, chunk=128), torch.Generator().manual_seed(5))
    for name in ("k", "v"):
        tensors[name][:, :512] = torch.nan
    run_on_cpu(emulated_kernel(spec, emulated_text(spec)), tensors, limits=LIMITS)
    for name in ("out", "lse") if spec.problem.operation == "forward" else ("d_q",):
        assert torch.isfinite(tensors[name]).all(), name
    if spec.problem.operation == "backward":
        assert not any(tensors[name][:, :512].any() for name in ("d_k", "d_v"))
