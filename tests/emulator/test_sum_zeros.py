"""Sums of dQ that persistent blocks zero beside other work, under masks that hide keys of no range: on GPUs of so few SMs that a call has
heads which the preprocess kernel leaves to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.build.emulator.kernel import ORDERS, EmulationOrder
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Mask
from flashgen.codegen.program import Program
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import view_of
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.traced.modifier import modifier_in_call
from flashgen.verification.expected import Expected
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_faults, why_caught
from tests.support.plan import few_of
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

SMS = 2
FAMILY = "attention_backward_persistent_sm90"
BLOCKS = torch.zeros(1, 1, 9, 9, dtype=torch.bool)


def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
    return BLOCKS[0, 0, q // 128, k // 128]


KERNELS = {
    "blocks": NamedKernel(FAMILY, 64, Mask.FULL, False, (name_of_functions(modifier_in_call(None, seen).modifier),)),
    "documents": NamedKernel(FAMILY, 40, Mask.CAUSAL, False, ("document_ids",)),
}
# Batch, heads of queries and of keys, lengths: more query tiles than key tiles, fewer, and one key tile a head, in L2 groups of one.
WORKLOADS = {"queries": Workload(2, 8, 4, 330, 200), "keys": Workload(1, 5, 5, 70, 400), "short": Workload(1, 17, 17, 50, 60)}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


def program_of(spec: KernelSpec, tensors: Tensors, sm_count: int) -> Program:
    return spec.family.program(spec.config, tensors.call(), replace(device_of_target(spec.target), sm_count=sm_count))


def drawn(spec: KernelSpec, workload: str) -> Tensors:
    return Tensors.random(spec.problem, WORKLOADS[workload], torch.Generator().manual_seed(5))


def judged(spec: KernelSpec, text: Source, tensors: Tensors, orders: tuple[EmulationOrder, ...], sm_count: int, resident: int) -> Verdict:
    """What the rule says: of the first order in which it rejects, or the last one."""
    expected = Expected.of(tensors)
    for order in orders:
        tensors.poison()
        given = {one.name: view_of(one.name, tensors[one.name], writable=one.role is not Role.IN) for one in tensors.operands}
        program = program_of(spec, tensors, sm_count)
        fitting = min(resident, *(launch.grid for launch in program.launches))
        emulated_kernel(spec, text).launch(program, given, order, resident=fitting, limits=LIMITS)
        verdict = expected.judge(tensors)
        if not verdict.ok:
            break
    return verdict


@pytest.mark.parametrize(
    ("kernel", "workload"), few_of([*(("blocks", name) for name in WORKLOADS), ("documents", "short")], ("blocks", "queries"))
)
def test_heads_behind_the_first_ones_are_zeroed_in_time(kernel: str, workload: str) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, workload)
    main = next(launch for launch in program_of(spec, tensors, SMS).launches if not launch.suffix)
    assert main.values["zeroed_heads"] < WORKLOADS[workload].batch * WORKLOADS[workload].heads_kv
    for resident in (1, 2):
        verdict = judged(spec, emulated_text(spec), tensors, ORDERS[:2], SMS, resident)
        assert verdict.ok, verdict.message


@pytest.mark.slow
def test_one_block_zeroes_all_of_them() -> None:
    spec = KERNELS["blocks"].spec()
    assert judged(spec, emulated_text(spec), drawn(spec, "short"), ORDERS, 1, 1).ok


_COUNTED = "atom_add_acq_rel_gpu(p.d_q_progress + p.zeroed_counters + head_kv, 1);"
FAULTS = [
    fault_of("zeros-before-they-are-there", "        }\n        cp_async_bulk_wait_group<0>();", "        }", "blocks"),
    fault_of("zeros-not-counted", _COUNTED, "", "blocks"),
    fault_of("zeros-of-another-head-counted", _COUNTED, _COUNTED.replace("+ head_kv", "+ head_kv - 1"), "blocks"),
    fault_of("a-share-too-short", "min(begin + p.zeroed_share, head_tiles)", "min(begin + p.zeroed_share, head_tiles) - 1", "blocks"),
    fault_of(
        "zeros-of-the-next-head", "(static_cast<i64>(head_kv) * head_tiles +", "(static_cast<i64>(head_kv + 1) * head_tiles +", "blocks"
    ),
]


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS))
def test_a_fault_of_zeros_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, "queries")
    assert why_caught(KERNELS[kernel], planted, lambda text: judged(spec, text, tensors, ORDERS, SMS, SMS))
