"""Documents: the kernels of every family that has them, in the emulator, by the numerics rule, alone and with others; which tiles are
visited, and faults that show, of what visits tiles as well."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_cases, planned_faults
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

GENERIC = AttentionForwardConfig(64, 32, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
SM90 = AttentionForwardSm90Config(2, 64, 2, 2, 1, scheduler=Scheduler.DYNAMIC)
EXACT = AttentionForwardSm90Config(1, 48, 2, 1, 1, RowMax.EXACT, ping_pong=False, scheduler=Scheduler.DYNAMIC)
ALONE = ("document_ids",)
INT64 = ("document_ids_int64",)
TOGETHER = ("document_ids", "prefix_len", "window")
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default.
KERNELS = {
    "generic": NamedKernel("attention_forward", 64, Mask.CAUSAL, False, ALONE, GENERIC),
    "generic-wide": NamedKernel("attention_forward", 72, Mask.FULL, False, ALONE),
    "generic-others": NamedKernel("attention_forward", 64, Mask.FULL, False, ("alibi", *TOGETHER, "sinks"), GENERIC),
    "sm90": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, ALONE, SM90),
    "sm90-causal": NamedKernel("attention_forward_sm90", 64, Mask.CAUSAL, False, ALONE, SM90),
    "sm90-exact": NamedKernel("attention_forward_sm90", 64, Mask.CAUSAL, False, ALONE, EXACT),
    "sm90-others": NamedKernel("attention_forward_sm90", 128, Mask.CAUSAL, False, ("chunk", "document_ids", "dropout", "softcap"), SM90),
    "sm90-prefix": NamedKernel("attention_forward_sm90", 64, Mask.CAUSAL, False, ("alibi", *TOGETHER), SM90),
    "backward": NamedKernel("attention_backward", 64, Mask.CAUSAL, False, ALONE),
    "backward-full": NamedKernel("attention_backward", 128, Mask.FULL, False, ALONE),
    "backward-ordered": NamedKernel("attention_backward", 64, Mask.CAUSAL, True, ALONE),
    "backward-others": NamedKernel("attention_backward", 64, Mask.CAUSAL, False, ("bias", *TOGETHER, "sinks")),
    "backward-sm90": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, False, ALONE),
    "backward-sm90-full": NamedKernel("attention_backward_sm90", 128, Mask.FULL, False, ALONE),
    "backward-sm90-ordered": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, True, ALONE),
    "backward-sm90-others": NamedKernel("attention_backward_sm90", 64, Mask.FULL, False, ("alibi", "document_ids", "softcap", "window")),
    "generic-int64": NamedKernel("attention_forward", 64, Mask.CAUSAL, False, INT64, GENERIC),
    "sm90-int64": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, INT64, SM90),
    "sm90-int64-others": NamedKernel(
        "attention_forward_sm90", 128, Mask.CAUSAL, False, ("alibi", "document_ids_int64", "prefix_len"), SM90
    ),
    "backward-int64": NamedKernel("attention_backward", 64, Mask.FULL, False, INT64),
    "backward-sm90-int64": NamedKernel("attention_backward_sm90", 128, Mask.CAUSAL, False, INT64),
    "backward-persistent": NamedKernel("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ALONE),
    "backward-persistent-others": NamedKernel("attention_backward_persistent_sm90", 128, Mask.FULL, False, (*TOGETHER, "sinks")),
    "backward-sm90-dropout": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, False, ("chunk", "document_ids", "dropout")),
}
LENGTHS = ((150, 300), (300, 170), (420, 420), (70, 70))


def tokens(length: int, *ends: int) -> torch.Tensor:
    """Documents that end there."""
    return (torch.arange(length)[:, None] >= torch.tensor(ends)).sum(-1)


def documents(kind: str, len_q: int, len_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two entries of the batch: one of documents in order, and one of the kind."""
    generator = torch.Generator().manual_seed(len_q)
    of_keys = tokens(len_kv, 64, 65, 130, 250)
    ordered = (of_keys[-len_q:] if len_q <= len_kv else tokens(len_q, 64, 65, 130, 250), of_keys)
    makers: dict[str, Callable[[int], torch.Tensor]] = {
        "one": lambda n: torch.zeros(n, dtype=torch.int64),
        "shuffled": lambda n: torch.randint(3, (n,), generator=generator),
        "turned": lambda n: -tokens(n, 40, 41, 160),
        "apart": lambda n: tokens(n, 20, 90) + (n == len_q) * tokens(n, 30) * 7,  # some queries see no key
        "upper": lambda n: tokens(n, 20, 90, 200) * 2**32 + 7,  # alike in their lower 32 bits
        "lower": lambda n: tokens(n, 20, 90, 200) % 2 + 2**40,  # and in their upper ones
        "farthest": lambda n: torch.where(tokens(n, 100) > 0, 2**63 - 1, -(2**63)),
        "far": lambda n: torch.where(tokens(n, 100) > 0, 2**31 - 1, -(2**31)),
    }
    other = makers[kind]
    return torch.stack((ordered[0], other(len_q))), torch.stack((ordered[1], other(len_kv)))


KINDS = ("one", "shuffled", "turned", "apart", "far")
WIDE_KINDS = ("upper", "lower", "farthest")  # of int64
CASES = list(itertools.product(KERNELS, KINDS, LENGTHS))
WIDE_CASES = list(itertools.product([name for name in KERNELS if "int64" in name], WIDE_KINDS, LENGTHS))


def drawn(kernel: str, spec: KernelSpec, lengths: tuple[int, int], of_queries: torch.Tensor, of_keys: torch.Tensor) -> Tensors:
    modifiers = KERNELS[kernel].modifiers
    ends, chunk = (90, 20) if "window" in modifiers else (OPEN, OPEN), 100 if "chunk" in modifiers else OPEN
    tensors = Tensors.random(spec.problem, Workload(2, 2, 1, *lengths, *ends, chunk), torch.Generator().manual_seed(5))
    tensors["document_ids_q"].copy_(of_queries)
    tensors["document_ids_kv"].copy_(of_keys)
    tensors.derive()
    return tensors


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(
    ("kernel", "kind", "lengths"),
    planned_cases([*CASES, *WIDE_CASES], KERNELS, 1.5),
)
def test_queries_see_keys_of_their_documents(kernel: str, kind: str, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(kernel, spec, lengths, *documents(kind, *lengths)))
    assert verdict.ok, verdict.message


_ENTRY = "of_keys + batch * keys_step"
_SOME = "a.lowest <= b.highest && b.lowest <= a.highest"
_ALL = "some && a.lowest == a.highest && b.lowest == b.highest"
_BEFORE = "0xffffffffu >> (31 - ((tile - 1) & 31))"
_FROM = "0xffffffffu << (tile & 31)"
FAULTS = [
    fault_of("documents-of-another-entry", _ENTRY, "of_keys", "sm90"),
    fault_of("documents-of-another-entry", _ENTRY, "of_keys + (1 - batch) * keys_step", "backward-sm90"),
    fault_of("next-keys-document", "key_documents[min(key, len_kv - 1)]", "key_documents[min(key + 1, len_kv - 1)]", "generic"),
    fault_of("not-hidden", "if (own[i][h] != document)", "if (own[i][h] > document)", "sm90"),
    fault_of("not-hidden", "if (own[i][h] != document)", "if (own[i][h] < document)", "backward-full"),
    fault_of("columns-of-the-neighbour", "+ j * 8 + e;", "+ j * 8 + 1 - e;", "backward-sm90-full"),
    fault_of("partial-taken-for-full", _ALL, "some", "sm90"),
    fault_of("partial-taken-for-full", _ALL, "some && a.lowest == a.highest", "backward-sm90-full"),
    fault_of("keys-taken-for-queries", _ALL, "some && b.lowest == b.highest", "generic-wide"),
    fault_of("neighbours-skipped", _SOME, _SOME.replace("<=", "<"), "sm90"),
    fault_of("later-documents-skipped", _SOME, "a.lowest == b.lowest", "backward"),
    fault_of("a-tile-left-out", _BEFORE, "0x7fffffffu >> (31 - ((tile - 1) & 31))", "sm90"),
    fault_of("a-tile-left-out", _FROM, "0xfffffffeu << (tile & 31)", "backward"),
    fault_of("another-rows-tiles", "+ head * p.seen_head + row;", "+ head * p.seen_head;", "backward-sm90"),
    fault_of("another-entrys-tiles", "static_cast<i64>(batch) * p.seen_batch", "static_cast<i64>(0)", "sm90"),
    fault_of("hidden-keys-not-told", "block * 4 + hides * 2 + is_last", "block * 4 + is_last", "sm90"),
    fault_of("another-block", "return found / 4;", "return found / 8 * 2;", "sm90"),
    fault_of("hidden-keys-not-told", "tile * 4 + hides * 2 + is_last", "tile * 4 + is_last", "backward-sm90"),
    fault_of("another-tile", "go_to(found / 4, work, p);", "go_to(found / 8 * 2, work, p);", "backward-sm90"),
    fault_of("other-heads-left-out", "while (tile < 0 && ++head < end_head)", "while (tile < 0 && (head += 2) < end_head)", "backward"),
    fault_of("lower-bits-alone", "__forceinline__ Id of_key(int key)", "__forceinline__ int of_key(int key)", "sm90-int64"),
    fault_of("lower-bits-alone", "__forceinline__ Id of_query(int query)", "__forceinline__ int of_query(int query)", "backward-int64"),
    fault_of(
        "lower-bits-in-tiles", "-> i64 { return query_documents[query]; }", "-> int { return query_documents[query]; }", "generic-int64"
    ),
    fault_of(
        "lower-bits-in-tiles", "-> i64 { return key_documents[key]; }", "-> int { return key_documents[key]; }", "backward-sm90-int64"
    ),
    fault_of("values-of-another-tile", "v + tile * kBlockKv * v_row", "v + max(behind, 0) * kBlockKv * v_row", "generic"),
    fault_of("keys-of-an-earlier-tile", "k + behind * kBlockKv * k_row", "k + max(behind - 1, 0) * kBlockKv * k_row", "generic"),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned_faults(FAULTS, KERNELS),
)
def test_a_fault_of_documents_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(kernel, spec, (420, 420), *documents("upper" if "int64" in kernel else "turned", 420, 420))
    assert not judged(spec, planted.apply(emulated_text(spec), Atoms.EMULATED), tensors).ok


@pytest.mark.parametrize("kernel", planned_cases([("generic",), ("sm90",), ("backward",), ("backward-sm90-full",)], KERNELS, 2.0))
def test_tiles_of_other_documents_are_not_visited(kernel: str) -> None:
    """NaN, times a probability of 0, would show."""
    spec = KERNELS[kernel].spec()
    ids = tokens(512, 256).expand(2, -1)
    tensors = drawn(kernel, spec, (512, 512), ids, ids)
    if spec.problem.operation == "forward":
        tensors["v"][:, :256] = torch.nan
        run_on_cpu(emulated_kernel(spec, emulated_text(spec)), tensors, limits=LIMITS)
        assert torch.isfinite(tensors["out"][:, 256:]).all()
        assert torch.isnan(tensors["out"][:, :256]).any()
        return
    tensors["d_out"][:, 256:] = torch.nan
    run_on_cpu(emulated_kernel(spec, emulated_text(spec)), tensors, limits=LIMITS)
    assert all(torch.isfinite(tensors[name][:, :256]).all() for name in ("d_q", "d_k", "d_v"))
    assert torch.isnan(tensors["d_v"][:, 256:]).any()
