"""Prefixes: the kernels of every family that has them, in the emulator, by the numerics rule, also with windows and chunks; faults."""

from __future__ import annotations

import itertools

import pytest
import torch

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

GENERIC = AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
SM90 = AttentionForwardSm90Config(2, 64, 2, 2, 1)
WINDOW, CHUNK = ("prefix_len", "window"), ("chunk", "prefix_len")
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default.
KERNELS = {
    "generic": NamedKernel("attention_forward", 64, Mask.CAUSAL, False, ("prefix_len",), GENERIC),
    "generic-window": NamedKernel("attention_forward", 64, Mask.FULL, False, WINDOW, GENERIC),
    "generic-chunk": NamedKernel("attention_forward", 64, Mask.CAUSAL, False, CHUNK, GENERIC),
    "generic-full": NamedKernel("attention_forward", 64, Mask.FULL, False, ("prefix_len",), GENERIC),
    "sm90": NamedKernel("attention_forward_sm90", 64, Mask.CAUSAL, False, ("prefix_len",), SM90),
    "sm90-window": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, WINDOW, SM90),
    "sm90-all": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, ("alibi", "chunk", "prefix_len", "window"), SM90),
    "packed": NamedKernel("attention_forward_sm90", 64, Mask.CAUSAL, False, CHUNK, AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=2)),
    "backward": NamedKernel("attention_backward", 64, Mask.CAUSAL, False, ("prefix_len",)),
    "backward-ordered": NamedKernel("attention_backward", 64, Mask.CAUSAL, True, ("prefix_len",)),
    "backward-window": NamedKernel("attention_backward", 64, Mask.FULL, False, WINDOW),
    "backward-window-ordered": NamedKernel("attention_backward", 64, Mask.FULL, True, WINDOW),
    "backward-all-ordered": NamedKernel("attention_backward", 64, Mask.CAUSAL, True, ("alibi", "chunk", "prefix_len", "window")),
    "backward-sm90": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, False, ("prefix_len",)),
    "backward-sm90-window-ordered": NamedKernel("attention_backward_sm90", 64, Mask.FULL, True, WINDOW),
    "backward-sm90-chunk-ordered": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, True, CHUNK),
    "backward-sm90-alibi": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, False, ("alibi", "prefix_len")),
    "backward-persistent": NamedKernel("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("prefix_len",)),
    "backward-persistent-full": NamedKernel("attention_backward_persistent_sm90", 64, Mask.FULL, False, ("alibi", "prefix_len")),
    "backward-persistent-window": NamedKernel("attention_backward_persistent_sm90", 64, Mask.FULL, False, WINDOW),
    "backward-persistent-chunk": NamedKernel("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, CHUNK),
    "backward-wide": NamedKernel("attention_backward_wide_sm90", 256, Mask.CAUSAL, False, ("prefix_len",)),
    "backward-wide-window-ordered": NamedKernel(
        "attention_backward_wide_sm90",
        256,
        Mask.FULL,
        True,
        ("alibi", "chunk", "prefix_len", "window"),
        None,
    ),
}
# Of two entries of the batch: none and some, whole tiles, one key, beyond both ends.
PREFIXES = {"some": (0, 70), "tiles": (64, 128), "one": (1, 33), "beyond": (-5, 1000), "far": (-(2**31), 2**31 - 1)}
LENGTHS = ((150, 300), (200, 90), (70, 70))
# Windows of earlier keys, with a gap behind the prefix; without any key; and of later keys, that end behind them.
ENDS = {"gap": (40, -20), "empty": (20, -60), "later": (-20, 60)}
CASES = [
    (kernel, prefix, lengths, ends)
    for kernel, prefix, lengths, ends in itertools.product(KERNELS, PREFIXES, LENGTHS, ENDS)
    if ends == "gap" or "window" in KERNELS[kernel].modifiers
]


def drawn(kernel: str, spec: KernelSpec, lengths: tuple[int, int], prefix: tuple[int, int], ends: tuple[int, int], chunk: int) -> Tensors:
    modifiers = KERNELS[kernel].modifiers
    ends, chunk = ends if "window" in modifiers else (OPEN, OPEN), chunk if "chunk" in modifiers else OPEN
    tensors = Tensors.random(spec.problem, Workload(2, 2, 1, *lengths, *ends, chunk), torch.Generator().manual_seed(5))
    tensors["prefix_len"].copy_(torch.tensor(prefix))
    tensors.derive()
    return tensors


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(
    ("kernel", "prefix", "lengths", "ends"),
    planned_cases(CASES, KERNELS),
)
def test_all_queries_see_the_prefix(kernel: str, prefix: str, lengths: tuple[int, int], ends: str) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(kernel, spec, lengths, PREFIXES[prefix], ENDS[ends], 50))
    assert verdict.ok, verdict.message


_LOAD = "prefix = min(lengths[batch], len_kv);"
_KEYS = "{seen.begin, max(seen.end, prefix)}"
_VISIBLE = "key < prefix || others.visible(query, key)"
_COLUMNS = "visible |= columns_below(max(chain.prefix, 0) - origin);"
_OF_KEY = "if (key < prefix) return"
_FULL = "if (end_key <= prefix) return"
_QUERIES = "first_key < prefix ? 0 : seen.begin"
FAULTS = [
    fault_of("prefix-of-another-entry", _LOAD, _LOAD.replace("[batch]", "[0]"), "generic"),
    fault_of("prefix-of-another-entry", _LOAD, _LOAD.replace("[batch]", "[1 - batch]"), "backward-sm90"),
    fault_of("one-key-short", _LOAD, _LOAD.replace("[batch]", "[batch] - 1"), "sm90"),
    fault_of("one-key-far", _LOAD, _LOAD.replace("[batch]", "[batch] + 1"), "backward"),
    fault_of("beyond-the-end", _LOAD, "prefix = lengths[batch];", "backward-sm90"),
    fault_of("causal-mask-not-opened", _KEYS, "{seen.begin, seen.end}", "generic"),
    fault_of("window-not-opened", "key < seen.begin && key >= chain.prefix", "key < seen.begin", "generic-window"),
    fault_of("chunk-not-opened", _COLUMNS, "", "packed"),
    fault_of("gap-seen", _COLUMNS, "visible |= columns_below(seen.end - origin);", "sm90-window"),
    fault_of("prefix-wraps", _COLUMNS, "visible |= columns_below(chain.prefix - origin);", "sm90-window"),
    fault_of("gap-taken-for-full", "(of_last.begin + kBlockKv - 1) / kBlockKv", "begin / kBlockKv", "generic-window"),
    fault_of("prefix-tiles-skipped", "this->prefix > 0 ? 0 : of_first.begin", "of_first.begin", "sm90-window"),
    fault_of("causal-mask-not-opened", _OF_KEY, "if (false) return", "backward-persistent"),
    fault_of("last-queries-skipped", "prefix > 0 ? 0x7fffffff : seen.end", "seen.end", "backward-persistent-window"),
    fault_of("border-not-opened", _OF_KEY, "if (key + 1 < prefix) return", "backward-sm90"),
    fault_of("window-not-opened", _VISIBLE, "(key < prefix && key <= query) || others.visible(query, key)", "backward-window"),
    fault_of("taken-for-full", _FULL, "if (first_key <= prefix) return", "backward"),
    fault_of("first-queries-skipped", _QUERIES, "seen.begin", "backward-sm90"),
    fault_of("last-queries-skipped", "prefix > 0 ? 0x7fffffff : seen.end", "seen.end", "backward-window"),
    fault_of("another-entrys-tiles", "of_batch(chain, work.batch);", "of_batch(chain, 0);", "backward-wide"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned_faults(FAULTS, KERNELS),
)
def test_a_fault_of_a_prefix_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    prefix = (-(2**31) if "wraps" in planted.name else 3, 700 if "beyond" in planted.name else 200)
    tensors = drawn(kernel, spec, (650, 500), prefix, (100, 0), 150)
    if "beyond" in planted.name:  # a log-sum-exp far below 0, to which a score of 0, of a key that is not there, is huge
        tensors["q"].abs_().mul_(8)
        tensors["k"].abs_().neg_()
        tensors.derive()
    assert not judged(spec, text, tensors).ok


@pytest.mark.parametrize("kernel", planned_cases([("generic",), ("sm90",), ("generic-window",), ("sm90-window",)], KERNELS, 1.5))
def test_tiles_behind_a_prefix_are_not_visited(kernel: str) -> None:
    """NaN in values, times probabilities of 0, would show. Entries without a prefix skip what the window hides."""
    spec = KERNELS[kernel].spec()
    tensors = drawn(kernel, spec, (128, 640), (0, 512) if "window" in kernel else (0, 64), (100, 0), OPEN)
    if "window" in kernel:
        tensors["v"][0, :384] = torch.nan
    else:
        tensors = Tensors.random(spec.problem, Workload(2, 2, 1, 640, 640), torch.Generator().manual_seed(5))
        tensors["prefix_len"].copy_(torch.tensor((0, 64)))
        tensors["v"][:, 128:] = torch.nan
    run_on_cpu(emulated_kernel(spec, emulated_text(spec)), tensors, limits=LIMITS)
    assert torch.isfinite(tensors["out"][0] if "window" in kernel else tensors["out"][:, :64]).all()
