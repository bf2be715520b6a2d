"""Dropout in the kernels of FlashAttention's first version, in the emulator, by the numerics rule, and faults that show."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_cases, planned_faults
from tests.support.runs import emulated_text

DROPOUT = ("dropout",)
KERNELS = {
    "forward": NamedKernel("flash1_forward", 64, Mask.FULL, False, DROPOUT),
    "forward-causal": NamedKernel("flash1_forward", 40, Mask.CAUSAL, False, DROPOUT),
    "backward": NamedKernel("flash1_backward", 64, Mask.FULL, False, DROPOUT),
    "backward-causal": NamedKernel("flash1_backward", 128, Mask.CAUSAL, False, DROPOUT),
}
FAMILIES = ("flash1_forward", "flash1_backward")
LENGTHS = ((150, 300), (300, 170), (70, 70))


def drawn(spec: KernelSpec, lengths: tuple[int, int]) -> Tensors:
    return Tensors.random(spec.problem, Workload(2, 4, 2, *lengths), torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(("kernel", "lengths"), planned_cases(itertools.product(KERNELS, LENGTHS), KERNELS, 2.0, FAMILIES))
def test_dropout(kernel: str, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, lengths))
    assert verdict.ok, verdict.message


_SUM, _DROP = "add_row_sums(rows, S);\n", "drop(S, dropout, first_query + first_row, key_tile * kBlockKv);\n"
FAULTS = [
    fault_of("dropped-before-the-sum", f"{_SUM}        {_DROP}", f"{_DROP}        {_SUM}", "forward"),
    fault_of("keys-of-the-first-tile", "first_query + first_row, key_tile * kBlockKv);\n", "first_query + first_row, 0);\n", "forward"),
    fault_of("bits-of-the-neighbour", "j % 2 * 2 + e / 2 + e % 2 * 16", "j % 2 * 2 + e / 2 + (1 - e % 2) * 16", "forward-causal"),
    fault_of("not-divided", "        scale_kept(O, dropout);\n", "", "forward-causal"),
    fault_of("another-heads-elements", "Dropout::of(p, batch, head), first_key", "Dropout::of(p, batch, head_kv), first_key", "backward"),
    fault_of("kept-in-d-p", "drop(dP, kept, 1.0f);", "", "backward"),
    fault_of("d-v-not-divided", "dV, p.dropout_scale, value_columns", "dV, 1.0f, value_columns", "backward-causal"),
]


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS))
def test_a_fault_of_dropout_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    assert not judged(spec, planted.apply(emulated_text(spec), Atoms.EMULATED), drawn(spec, (300, 300))).ok
