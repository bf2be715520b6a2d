"""Caches of e4m3 numbers: the decode kernel in the emulator, by the numerics rule. What no sequence uses of the cache is NaN; faults that
show."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig
from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Sequences
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.caches import poison_unused
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_cases, planned_faults, why_caught
from tests.support.runs import emulated_text

Quantised = partial(NamedKernel, sequences=Sequences.CACHED, dtype_kv=CacheDtype.E4M3)
WARPS = AttentionDecodeConfig(16, 16, 64, 2, 3, QueryPlace.REGISTERS)  # two, each with 32 keys of its own
ROW_GROUPS = AttentionDecodeConfig(32, 16, 32, 4, 2, QueryPlace.SHARED)  # two, of two key groups
WIDE_WARPS = AttentionDecodeConfig(32, 32, 32, 2, 2, QueryPlace.SHARED)
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default, dtype of Q.
KERNELS = {
    "bf16": Quantised("attention_decode", 64, Mask.CAUSAL, False, (), WARPS, Dtype.BF16),
    "fp16": Quantised("attention_decode", 128, Mask.FULL, False, (), ROW_GROUPS),
    "odd": Quantised("attention_decode", 80, Mask.CAUSAL, False, (), WIDE_WARPS, Dtype.BF16),
    "narrow": Quantised("attention_decode", 16, Mask.FULL, False, (), WARPS, Dtype.BF16),
    "wide": Quantised("attention_decode", 256, Mask.FULL, False, ()),
    "modified": Quantised("attention_decode", 64, Mask.CAUSAL, False, ("alibi", "sinks", "softcap", "window"), WARPS),
}
FAMILIES = ("attention_decode",)


def drawn(spec: KernelSpec, table: bool = True) -> Tensors:
    """Sequences of some lengths; without a table each has a page alone. Descales of heads and sequences are unlike each other."""
    page, pages, table_pages = (48, 22, 4) if table else (150, 6, 1)
    workload = Workload(5, 6, 2, 3, table_pages * page, pages=pages, page_size=page, table_pages=table_pages)
    tensors = Tensors.random(spec.problem, with_sizes_to_verify(spec.problem, workload, 1), torch.Generator().manual_seed(5))
    for name, first in (("k_descale", 0.3), ("v_descale", 3.0)):
        tensors[name].copy_(first * 1.37 ** torch.arange(10).view(5, 2))
    if not table:
        tensors = Tensors(spec.problem, tensors.workload, {name: one for name, one in tensors.items() if name != "block_table"})
    poison_unused(tensors)
    return tensors


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


def rejected(spec: KernelSpec, tensors: Tensors, scale: float | None = None) -> str:
    """What the rule finds wrong."""
    verdict = judged(spec, emulated_text(spec), tensors, None if scale is None else {"scale": scale})
    return "" if verdict.ok else verdict.message


@pytest.mark.parametrize(("kernel", "form"), planned_cases(itertools.product(KERNELS, ("pages", "apart", "alone")), KERNELS, 1.5, FAMILIES))
def test_values_are_elements_times_descales(kernel: str, form: str) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, table=form != "alone")
    assert not rejected(spec, tensors.apart() if form == "apart" else tensors)


@pytest.mark.parametrize("kernel", planned_cases([("bf16",), ("fp16",)], KERNELS, 2.0, ()))
@pytest.mark.parametrize("shared", ["none", "heads", "sequences", "all"])
def test_descales_may_be_shared(kernel: str, shared: str) -> None:
    """By strides of 0; where there are none at all elements are the values."""
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec)
    first = {"heads": (5, 1), "sequences": (1, 2), "all": (1, 1)}.get(shared, (5, 2))
    descales = {name: tensors[name][: first[0], : first[1]].expand(5, 2) for name in ("k_descale", "v_descale")}
    if shared == "none":
        tensors = Tensors(spec.problem, tensors.workload, {name: one for name, one in tensors.items() if name not in descales})
    assert not rejected(spec, tensors if shared == "none" else tensors.replacing(**descales))


@pytest.mark.parametrize("kernel", planned_cases([("bf16",), ("fp16",), ("modified",)], KERNELS, 2.0, ()))
@pytest.mark.parametrize("power", [-130, -24, 15, 100])
def test_queries_of_any_magnitude(kernel: str, power: int) -> None:
    """bf16 holds numbers that fp16 does not: they neither overflow nor vanish. Rows of one head are far apart, too."""
    spec = KERNELS[kernel].spec()
    power = max(-14, min(power, 12)) if spec.problem.dtype is Dtype.FP16 else power
    tensors = drawn(spec)
    tensors["q"].mul_(2.0**power)
    tensors["q"][:, ::2].mul_(2.0**-3)
    if spec.problem.modifiers:
        assert not rejected(spec, tensors)
        return
    assert not rejected(spec, tensors, scale=max(2.0**-126, min(2.0**126, spec.problem.head_dim**-0.5 * 2.0**-power)))


def test_every_element_is_exact() -> None:
    """A key has one column that is not 0, and each row of Q sees it alone."""
    spec = KERNELS["bf16"].spec()
    workload = Workload(4, 64, 1, 1, 64, pages=4, page_size=64, table_pages=1)
    tensors = Tensors.random(spec.problem, workload, torch.Generator().manual_seed(5)).without_optional_inputs()
    tensors["cache_seqlens"].fill_(1)
    elements = torch.arange(256, dtype=torch.uint8).masked_fill(torch.arange(256) % 128 == 127, 0).view(torch.float8_e4m3fn)  # none is NaN
    for name in ("q", "k", "v"):
        tensors[name].view(torch.uint8).zero_()
    for sequence, some in enumerate(elements.view(torch.uint8).view(4, 64)):
        tensors["k"].view(torch.uint8)[sequence, 0, 0] = some
        tensors["v"].view(torch.uint8)[sequence, 0, 0] = some
        tensors["q"][sequence, 0] = torch.eye(64, dtype=torch.bfloat16)
    judged(spec, emulated_text(spec), tensors, {"scale": 1.0})
    values = elements.float().view(4, 64)
    torch.testing.assert_close(tensors["lse"][..., 0], values, atol=0, rtol=2**-23)
    torch.testing.assert_close(tensors["out"][:, 0].float(), values[:, None].expand(4, 64, 64), atol=0, rtol=0)


_STORED = "store_shared_v4(tile.at(row, group * 2), {scaled[0], scaled[2], scaled[4], scaled[6]});"
FAULTS = [
    fault_of(
        "descale-of-the-neighbour",
        "batch * batch_stride + head * head_stride];",
        "batch * batch_stride + (head ^ 1) * head_stride];",
        "bf16",
    ),
    fault_of("descale-of-the-first-sequence", "descales[batch * batch_stride + head", "descales[head", "fp16"),
    fault_of("k-descale-for-values", "descale_of(p.v_descale, p.v_descale_batch", "descale_of(p.k_descale, p.k_descale_batch", "bf16"),
    fault_of("values-without-descale", "merged.columns[i] * inverse * descale;", "merged.columns[i] * inverse;", "odd"),
    fault_of("row-power-lost", "power.down * factor", "factor", "bf16"),
    fault_of("row-power-of-a-lane", "fmaxf(maximum, shfl_sync_bfly(maximum, distance));", "fmaxf(maximum, 0.0f * distance);", "bf16"),
    fault_of(
        "factor-of-the-first-row", "(first_row + i * 16 + h * 8 + lane_index() / 4) * 4));", "(first_row + i * 16 + h * 8) * 4));", "fp16"
    ),
    fault_of("factor-of-the-other-row", "*= of_row[i][e / 2];", "*= of_row[i][e % 2];", "modified"),
    fault_of(
        "columns-of-queries-in-order",
        _STORED,
        _STORED.replace("scaled[2], scaled[4], scaled[6]", "scaled[1], scaled[2], scaled[3]"),
        "bf16",
    ),
    fault_of("halves-of-keys-swapped", "four[j / 2][j % 2 * 2 + half]", "four[j / 2][j % 2 * 2 + 1 - half]", "fp16"),
    fault_of("keys-of-the-first-eight", "four[j / 2][j % 2 * 2 + half]", "four[j / 2][half]", "odd"),
    fault_of("pair-of-values-swapped", "constexpr u32 kByColumn = 0x3120;", "constexpr u32 kByColumn = 0x1302;", "bf16"),
    fault_of("pair-of-values-not-gathered", "constexpr u32 kByColumn = 0x3120;", "constexpr u32 kByColumn = 0x3210;", "fp16"),
    fault_of("columns-of-values-in-order", "lane % 4 * 4),", "lane % 4 * 4 ^ 4),", "bf16"),
    fault_of(
        "odd-columns-first",
        "{__float_as_uint(O[i][j][h * 2]), __float_as_uint(O[i][j + 1][h * 2]),",
        "{__float_as_uint(O[i][j + 1][h * 2]), __float_as_uint(O[i][j][h * 2]),",
        "fp16",
    ),
    fault_of("columns-behind-the-last", "kCopied = kHeadDim / 2", "kCopied = kColumns / 2", "odd"),
    fault_of("stale-tail", "if (keys >= kGroupKv)", "if (keys != Entries::kNoTile)", "bf16"),
]


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS))
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec)
    tensors["q"][:, 1:].mul_(1.7)  # rows of other powers
    assert why_caught(KERNELS[kernel], planted, lambda text: judged(spec, text, tensors.apart()))
