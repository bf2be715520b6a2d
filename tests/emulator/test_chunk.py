"""Chunks: the kernels of every family that has them, in the emulator, by the numerics rule, also with windows; and faults that show."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_cases, planned_faults
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

ALONE, WINDOW = ("chunk",), ("chunk", "window")
GENERIC = AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
DECODE = AttentionDecodeConfig(16, 16, 32, 2, 2, QueryPlace.SHARED)
KERNELS = {
    "generic": NamedKernel("attention_forward", 64, Mask.CAUSAL, False, ALONE, GENERIC),
    "generic-window": NamedKernel("attention_forward", 64, Mask.FULL, False, WINDOW, GENERIC),
    "sm90": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, ALONE, AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "packed": NamedKernel("attention_forward_sm90", 64, Mask.CAUSAL, False, ALONE, AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=2)),
    "decode": NamedKernel("attention_decode", 64, Mask.CAUSAL, False, ALONE, DECODE),
    "decode-sm90": NamedKernel("attention_decode_sm90", 64, Mask.FULL, False, WINDOW, AttentionDecodeSm90Config(2, 1, 48, 3)),
    "backward": NamedKernel("attention_backward", 64, Mask.FULL, False, ALONE),
    "backward-ordered": NamedKernel("attention_backward", 64, Mask.CAUSAL, True, ALONE),
    "backward-window-ordered": NamedKernel("attention_backward", 64, Mask.FULL, True, WINDOW),
    "backward-sm90": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, False, ALONE),
    "backward-sm90-ordered": NamedKernel("attention_backward_sm90", 64, Mask.FULL, True, ALONE),
    "backward-persistent": NamedKernel("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ALONE),
    "backward-persistent-window": NamedKernel("attention_backward_persistent_sm90", 64, Mask.FULL, False, WINDOW),
    "backward-wide": NamedKernel("attention_backward_wide_sm90", 256, Mask.CAUSAL, False, ALONE),
    "backward-sm90-window-ordered": NamedKernel("attention_backward_sm90", 64, Mask.FULL, True, WINDOW),
    "backward-wide-ordered": NamedKernel("attention_backward_wide_sm90", 256, Mask.FULL, True, ALONE),
    "backward-wide-window-ordered": NamedKernel("attention_backward_wide_sm90", 256, Mask.FULL, True, WINDOW),
}
CHUNKS = (1, 3, 50, 64, 128, 130, 1000)
LENGTHS = ((150, 300), (200, 90), (70, 70), (1, 129))
ENDS = {False: (OPEN, OPEN), True: (40, -20)}  # of a window that meets no key of its query's chunk where the query is near its beginning
CASES = list(itertools.product(KERNELS, CHUNKS, LENGTHS))


def drawn(kernel: str, spec: KernelSpec, lengths: tuple[int, int], chunk: int) -> Tensors:
    workload = Workload(1, 4, 2, *lengths, *ENDS[KERNELS[kernel].modifiers == WINDOW], chunk)
    return Tensors.random(spec.problem, workload, torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(
    ("kernel", "chunk", "lengths"),
    planned_cases(CASES, KERNELS),
)
def test_a_query_sees_its_own_chunk(kernel: str, chunk: int, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(kernel, spec, lengths, chunk))
    assert verdict.ok, verdict.message


_OF = "{len_kv - len_q, p.chunk,"
_FIRST = "return (static_cast<int>(product >> 32) >> shift) * size;"
_KEYS = "{first, position < 0 ? 0 : first + size}"
_VISIBLE = "static_cast<u32>(query - (first_of(key) - causal_offset)) < static_cast<u32>(size)"
_MASKED = "static_cast<u32>(from + j * 8 + e) >= static_cast<u32>(count)"
_BEGIN, _END = "begin = max(0, first - causal_offset)", "end = max(0, last + size - causal_offset)"
FAULTS = [
    fault_of("aligned-top-left", _OF, "{0, p.chunk,", "sm90"),
    fault_of("a-position-off", _OF, "{len_kv - len_q + 1, p.chunk,", "backward-sm90"),
    fault_of("border-one-late", _FIRST, _FIRST.replace(";", " + 1;"), "generic"),
    fault_of("border-one-early", _FIRST, "return max(0, (static_cast<int>(product >> 32) >> shift) * size - 1);", "packed"),
    fault_of("first-key-not-hidden", _KEYS, "{0, position < 0 ? 0 : first + size}", "packed"),
    fault_of("last-key-not-hidden", _KEYS, "{first, position < 0 ? 0 : 0x7fffffff}", "sm90"),
    fault_of("queries-before-the-first-key", _KEYS, "{first, first + size}", "sm90"),
    fault_of("later-queries-not-hidden", _MASKED, "from + j * 8 + e < 0", "backward-sm90"),
    fault_of("later-queries-not-hidden", _VISIBLE, "query >= first_of(key) - causal_offset", "backward"),
    fault_of("earlier-queries-not-hidden", _VISIBLE, "query - (first_of(key) - causal_offset) < size", "backward"),
    fault_of("earlier-queries-not-hidden", _MASKED, "from + j * 8 + e >= count", "backward-sm90"),
    fault_of("of-one-row-for-all", "own = key + i * 16 + h * 8", "own = key + i * 16", "backward-wide"),
    fault_of("one-query-off", _BEGIN, f"{_BEGIN} + 1", "backward-sm90"),
    fault_of("first-queries-skipped", _BEGIN, "begin = max(0, first - causal_offset) + 128", "backward"),
    fault_of("last-queries-skipped", _END, "end = max(0, last + size - causal_offset - 128)", "backward-sm90"),
    fault_of("a-position-off", _OF, "{len_kv - len_q + 1, p.chunk,", "backward-persistent"),
    fault_of("one-query-off", _BEGIN, f"{_BEGIN} + 1", "backward-persistent"),
    fault_of("last-queries-skipped", _END, "end = max(0, last + size - causal_offset - 128)", "backward-persistent"),
    fault_of("taken-for-full", "first == last ? end : 0", "0x7fffffff", "backward"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned_faults(FAULTS, KERNELS),
)
def test_a_fault_of_chunks_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    lengths = (700, 650) if "before" in planted.name else (500, 650)
    assert not judged(spec, text, drawn(kernel, spec, lengths, 150)).ok


@pytest.mark.parametrize(
    "kernel",
    planned_cases([("generic",), ("sm90",), ("backward",), ("backward-sm90",), ("backward-persistent",), ("backward-wide",)], KERNELS, 1.5),
)
def test_tiles_of_other_chunks_are_not_visited(kernel: str) -> None:
    """NaN in values, times probabilities of 0, or in keys, times gradients of 0, would show."""
    spec = KERNELS[kernel].spec()
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 128, 640, chunk=128), torch.Generator().manual_seed(5))
    for name in ("k", "v"):
        tensors[name][:, :512] = torch.nan
    run_on_cpu(emulated_kernel(spec, emulated_text(spec)), tensors, limits=LIMITS)
    for name in ("out", "lse") if spec.problem.operation == "forward" else ("d_q",):
        assert torch.isfinite(tensors[name]).all(), name
    if spec.problem.operation == "backward":
        assert not any(tensors[name][:, :512].any() for name in ("d_k", "d_v"))
