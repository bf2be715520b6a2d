"""Sliding windows: the kernels of every family that has them, in the emulator, by the numerics rule; and faults of windows that show."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import ORDERS, EmulationOrder, Schedule
from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.verification.expected import Expected
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_cases, planned_faults
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

ALONE = ("window",)
GENERIC = AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
DECODE = AttentionDecodeConfig(16, 16, 32, 2, 2, QueryPlace.SHARED)
KERNELS = {
    "generic": NamedKernel(
        "attention_forward", 64, Mask.FULL, False, ALONE, AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
    ),
    "sm90": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, ALONE, AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    # Two words of columns.
    "sm90-wide": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, ALONE, AttentionForwardSm90Config(2, 160, 2, 2, 1)),
    "packed": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, ALONE, AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=2)),
    "decode": NamedKernel("attention_decode", 64, Mask.FULL, False, ALONE, DECODE),
    "decode-sm90": NamedKernel("attention_decode_sm90", 64, Mask.FULL, False, ALONE, AttentionDecodeSm90Config(1, 2, 32, 4)),
    "backward": NamedKernel("attention_backward", 64, Mask.FULL, False, ALONE),
    "backward-ordered": NamedKernel("attention_backward", 64, Mask.FULL, True, ALONE),
    "backward-sm90": NamedKernel("attention_backward_sm90", 64, Mask.FULL, False, ALONE),
    "backward-sm90-ordered": NamedKernel("attention_backward_sm90", 64, Mask.FULL, True, ALONE),
    "backward-persistent": NamedKernel("attention_backward_persistent_sm90", 64, Mask.FULL, False, ALONE),
    "backward-persistent-128": NamedKernel("attention_backward_persistent_sm90", 128, Mask.FULL, False, ALONE),
    "backward-wide": NamedKernel("attention_backward_wide_sm90", 256, Mask.FULL, False, ALONE),
    "backward-wide-ordered": NamedKernel("attention_backward_wide_sm90", 256, Mask.FULL, True, ALONE),
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


def drawn(spec: KernelSpec, lengths: tuple[int, int], ends: tuple[int, int]) -> Tensors:
    return Tensors.random(spec.problem, Workload(1, 4, 2, *lengths, *ends), torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(
    ("kernel", "window", "lengths"),
    planned_cases(CASES, KERNELS),
)
def test_a_window_hides_what_it_should(kernel: str, window: str, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, lengths, WINDOWS[window]))
    assert verdict.ok, verdict.message


_LEFT, _RIGHT = "len_kv - len_q - p.window_left", "len_kv - len_q + p.window_right"
_KEYS = "{max(0, query + first), query + last + 1}"
_VISIBLE = "static_cast<u32>(key - query - first) < static_cast<u32>(max(0, last - first + 1))"
_BEGIN, _END = "any ? begin : kNever", "end = max(0, end_key - first)"
_ONE_SHORT, _ONE_FAR = "query + first < key && key <= query + last", "query + first <= key && key <= query + last + 1"
FAULTS = [
    fault_of("left-end-one-short", _LEFT, f"{_LEFT} + 1", "generic"),
    fault_of("left-end-one-far", _LEFT, f"{_LEFT} - 1", "sm90"),
    fault_of("right-end-one-short", _RIGHT, f"{_RIGHT} - 1", "sm90"),
    fault_of("right-end-one-far", _RIGHT, f"{_RIGHT} + 1", "generic"),
    fault_of("aligned-top-left", _LEFT, "-p.window_left", "sm90"),
    fault_of("first-key-not-hidden", _KEYS, "{0, query + last + 1}", "generic"),
    fault_of("last-key-not-hidden", _KEYS, "{max(0, query + first), 0x7fffffff}", "sm90"),
    fault_of("second-column-hidden", "min(within % 8, 2)", "min(within % 8, 1)", "sm90"),
    fault_of("columns-of-the-first-word", "first_key + first * 8 + lane", "first_key + lane", "sm90-wide"),
    fault_of("first-keys-not-hidden", "(chain.kHidesFirstKeys && tile < work.full_begin)", "false", "decode"),
    fault_of("tiles-of-the-first-key", "work.begin = tiles.begin + part", "work.begin = part", "decode"),
    fault_of(
        "tiles-of-the-last-query",
        "(of_last.begin + kBlockKv - 1) / kBlockKv, max(0, of_first.end) / kBlockKv,",
        "0, max(0, of_first.end) / kBlockKv,",
        "decode",
    ),
    fault_of("left-end-one-short", _VISIBLE, "query + first < key && key <= query + last", "backward"),
    fault_of("right-end-one-short", _VISIBLE, "query + first <= key && key < query + last", "backward-sm90"),
    fault_of("right-end-not-seen", _VISIBLE, "query + first <= key", "backward"),
    fault_of("first-queries-skipped", _BEGIN, "any && begin + 128 < len_q ? begin + 128 : kNever", "backward"),
    fault_of("last-queries-skipped", _END, "end = max(0, end_key - first - 128)", "backward-sm90"),
    fault_of("left-end-one-short", _VISIBLE, _ONE_SHORT, "backward-persistent"),
    fault_of("left-end-one-far", _LEFT, f"{_LEFT} - 1", "backward-persistent"),
    fault_of("right-end-one-short", _RIGHT, f"{_RIGHT} - 1", "backward-persistent"),
    fault_of("right-end-one-far", _VISIBLE, _ONE_FAR, "backward-persistent"),
    fault_of("first-queries-skipped", _BEGIN, "any && begin + 128 < len_q ? begin + 128 : kNever", "backward-persistent-128"),
    fault_of("last-queries-skipped", _END, "end = max(0, end_key - first - 128)", "backward-persistent-128"),
    fault_of("dQ-of-the-first-head", "index += p.query_tiles - work.tiles.count();", "index -= work.tiles.count();", "backward-persistent"),
    fault_of("taken-for-full", "max(0, first_key - first + 1)", "0x7fffffff", "backward"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned_faults(FAULTS, KERNELS),
)
def test_a_fault_of_a_window_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    assert not judged(spec, text, drawn(spec, (500, 650), (140, 150))).ok


@pytest.mark.slow
@pytest.mark.parametrize("kernel", planned_cases([("sm90",)], KERNELS, 6.0))
def test_a_later_work_tile_of_a_block_begins_with_no_output(kernel: str) -> None:
    """More work tiles than blocks: the first product with V of one writes O, which nobody sets to zero; so it shows if it adds."""
    spec, writes = KERNELS[kernel].spec(), "store_pending = accumulate = false;"
    _, planted = fault_of("output-added-to-the-one-before", writes, "store_pending = false;", kernel)
    text = emulated_text(spec)
    tensors = Tensors.random(spec.problem, Workload(16, 16, 16, 10, 150, 60, 20), torch.Generator().manual_seed(5))
    assert judged(spec, text, tensors).ok
    assert not judged(spec, planted.apply(text, Atoms.EMULATED), tensors).ok


_IN_TURN = "            wait(empty(), parity);\n            mbarrier_arrive(done());\n"
MANY_UNSEEN = ((70, 900), (0, 0))  # the keys of six work tiles in a row


@pytest.mark.parametrize("kernel", planned_cases([("backward-persistent",), ("backward-persistent-128",)], KERNELS, 6.0))
def test_a_persistent_block_has_work_tiles_that_no_query_sees(kernel: str) -> None:
    """In every order of threads and copies. Gradients of their keys are 0, and not just small."""
    spec = KERNELS[kernel].spec()
    for order in ORDERS:
        tensors = drawn(spec, *MANY_UNSEEN)
        run_on_cpu(emulated_kernel(spec, emulated_text(spec)), tensors, interleaving=order, limits=LIMITS)
        assert Expected.of(tensors).judge(tensors).ok
        assert not any(tensors[name][:, : 900 - 70].any() for name in ("d_k", "d_v"))


@pytest.mark.parametrize("kernel", planned_cases([("backward-persistent",)], KERNELS, 3.0))
def test_a_work_tile_must_not_end_before_the_producer_has_looked_at_the_one_before(kernel: str) -> None:
    spec = KERNELS[kernel].spec()
    source = emulated_text(spec)
    assert source.text.count(_IN_TURN) == 1
    swapped = "".join(reversed(_IN_TURN.splitlines(keepends=True)))
    wrong = emulated_kernel(spec, Source(source.entry, source.text.replace(_IN_TURN, swapped)))
    with pytest.raises(EmulatorFaultError, match="spin that never ends"):
        run_on_cpu(wrong, drawn(spec, *MANY_UNSEEN), interleaving=EmulationOrder(Schedule.REVERSED), limits=LIMITS)
