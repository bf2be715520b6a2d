"""A bias that Hopper's kernels bring to shared memory before its scores are there, in the emulator: by the numerics rule, and faults that
show. Keys are a multiple of 8, else each is read in place: test_modifiers."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_backward_sm90.config import AttentionBackwardSm90Config
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.fault import Fault, Setting
from tests.support.plan import planned
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

FORWARD, BACKWARD, PERSISTENT = "attention_forward_sm90", "attention_backward_sm90", "attention_backward_persistent_sm90"
SMALL = AttentionForwardSm90Config(2, 80, 2, 2, 1, row_max=RowMax.EXACT)
PACKED = AttentionForwardSm90Config(1, 64, 2, 2, 1, ping_pong=False, pack_gqa=16)
# Family, dtype, head dim, mask, modifiers beside the bias, a config other than the default.
KERNELS: dict[str, tuple[str, Dtype, int, Mask, tuple[str, ...], Config | None]] = {
    "forward": (FORWARD, Dtype.BF16, 64, Mask.FULL, (), None),
    "forward-causal": (FORWARD, Dtype.FP16, 40, Mask.CAUSAL, (), SMALL),
    "forward-packed": (FORWARD, Dtype.FP16, 64, Mask.CAUSAL, (), PACKED),
    "forward-others": (FORWARD, Dtype.FP16, 64, Mask.FULL, ("alibi", "dropout"), AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "backward": (BACKWARD, Dtype.FP16, 64, Mask.CAUSAL, ("boolean_mask",), None),
    "backward-narrow": (BACKWARD, Dtype.BF16, 72, Mask.FULL, (), AttentionBackwardSm90Config(48)),
    "backward-persistent": (PERSISTENT, Dtype.BF16, 64, Mask.FULL, (), None),
}
LENGTHS = ((150, 304), (40, 136), (300, 64))


def spec_of(kernel: str) -> KernelSpec:
    name, dtype, head_dim, mask, others, config = KERNELS[kernel]
    family, target = find_family(name), find_target("sm_90a")
    problem = Problem(dtype, head_dim, head_dim, mask, family.operation, False, tuple(sorted(("bias", *others))))
    return KernelSpec(family, problem, config or family.default(problem, target), target)


def judged(spec: KernelSpec, text: Source, lengths: tuple[int, int]) -> Verdict:
    heads = (32, 2) if getattr(spec.config, "pack_gqa", 1) > 1 else (4, 2)
    tensors = Tensors.random(spec.problem, Workload(2 if heads[0] == 4 else 1, *heads, *lengths), torch.Generator().manual_seed(7))
    scalars = {"dropout_p": 0.3} if "dropout" in spec.problem.modifiers else {}
    tensors.derive(scalars)
    run_on_cpu(emulated_kernel(spec, text), tensors, scalars, limits=LIMITS)
    return Expected.of(tensors, scalars).judge(tensors)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    planned(
        list(itertools.product(KERNELS, LENGTHS)),
        1,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: (case[0],),
        name=lambda case: f"{case[0]}-{case[1]}",
        seconds=lambda case: 3.0,
    ),
)
def test_scores_gain_what_was_fetched(kernel: str, lengths: tuple[int, int]) -> None:
    spec = spec_of(kernel)
    text = emulated_text(spec)
    assert "cp_async_16" in text.text
    verdict = judged(spec, text, lengths)
    assert verdict.ok, verdict.message


def fault(name: str, find: str, replace: str, kernel: str) -> tuple[str, Fault]:
    return kernel, Fault(f"{name}-{kernel}", find, replace, Setting(KERNELS[kernel][5] or AttentionForwardSm90Config(2, 64), ()))


FAULTS = [
    fault("block-before", "fetch(own, k_block - 1)", "fetch(own, k_block)", "forward"),
    fault("other-banks", "(own_chunk ^ chunks % 8 * 16)", "(own_chunk ^ chunks % 4 * 16)", "forward-causal"),
    fault("other-rows", "+ h * 8 * 128, own + i", "+ h * 8 * 64, own + i", "forward"),
    fault("wrong-head", "this->of_row[Position::kTwoHeads * h] + query", "this->of_row[0] + query", "forward-packed"),
    fault("not-awaited", "cp_async_wait_group<0>();", "", "forward"),
    fault("not-turned", "ldmatrix_x4_trans(pairs, own_chunk", "ldmatrix_x4(pairs, own_chunk", "backward"),
    fault("first-keys-twice", "own_chunk + i * 32, own + static", "own_chunk + i * 32, own - lane % 2 * 8 + static", "backward-persistent"),
    fault(
        "tile-before",
        "if (next.left > 0) fetch();\n            if (next.left > 0) consumer",
        "if (next.left > 0) consumer",
        "backward-narrow",
    ),
]


@pytest.mark.parametrize(
    ("kernel", "planted"),
    planned(
        FAULTS,
        0,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: [case[1].find],
        name=lambda case: case[1].name,
        seconds=lambda case: 4.0,
        fault=True,
    ),
)
def test_a_fault_of_fetching_shows(kernel: str, planted: Fault) -> None:
    spec = spec_of(kernel)
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    with suppress(EmulatorFaultError):  # a copy that nobody waits for
        assert not judged(spec, text, (150, 304)).ok
