"""A bias that Hopper's kernels bring to shared memory before its scores are there, in the emulator: by the numerics rule, and faults that
show. Keys are a multiple of 8, else each is read in place: test_modifiers."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.codegen.families.attention_backward_sm90.config import AttentionBackwardSm90Config
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax
from flashgen.codegen.problem import Dtype, Mask
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from tests.support import named_kernels
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_cases, planned_faults
from tests.support.runs import emulated_text

FORWARD, BACKWARD, PERSISTENT = "attention_forward_sm90", "attention_backward_sm90", "attention_backward_persistent_sm90"
SMALL = AttentionForwardSm90Config(2, 80, 2, 2, 1, row_max=RowMax.EXACT)
PACKED = AttentionForwardSm90Config(1, 64, 2, 2, 1, ping_pong=False, pack_gqa=16)
BESIDE = ("alibi", "bias", "dropout")
KERNELS = {
    "forward": NamedKernel(FORWARD, 64, Mask.FULL, False, ("bias",), dtype=Dtype.BF16),
    "forward-causal": NamedKernel(FORWARD, 40, Mask.CAUSAL, False, ("bias",), SMALL),
    "forward-packed": NamedKernel(FORWARD, 64, Mask.CAUSAL, False, ("bias",), PACKED),
    "forward-others": NamedKernel(FORWARD, 64, Mask.FULL, False, BESIDE, AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "backward": NamedKernel(BACKWARD, 64, Mask.CAUSAL, False, ("bias", "boolean_mask")),
    "backward-narrow": NamedKernel(BACKWARD, 72, Mask.FULL, False, ("bias",), AttentionBackwardSm90Config(48), Dtype.BF16),
    "backward-persistent": NamedKernel(PERSISTENT, 64, Mask.FULL, False, ("bias",), dtype=Dtype.BF16),
}
LENGTHS = ((150, 304), (40, 136), (300, 64))


def judged(spec: KernelSpec, text: Source, lengths: tuple[int, int]) -> Verdict:
    heads = (32, 2) if getattr(spec.config, "pack_gqa", 1) > 1 else (4, 2)
    tensors = Tensors.random(spec.problem, Workload(2 if heads[0] == 4 else 1, *heads, *lengths), torch.Generator().manual_seed(7))
    scalars = {"dropout_p": 0.3} if "dropout" in spec.problem.modifiers else {}
    tensors.derive(scalars)
    return named_kernels.judged(spec, text, tensors, scalars)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(("kernel", "lengths"), planned_cases(itertools.product(KERNELS, LENGTHS), KERNELS, 3.0, (FORWARD, BACKWARD)))
def test_scores_gain_what_was_fetched(kernel: str, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    text = emulated_text(spec)
    assert "cp_async_16" in text.text
    verdict = judged(spec, text, lengths)
    assert verdict.ok, verdict.message


FAULTS = [
    fault_of("block-before", "warp_row(), k_block - 1)", "warp_row(), k_block)", "forward"),
    fault_of("other-banks", "(own_chunk ^ chunks % 8 * 16)", "(own_chunk ^ chunks % 4 * 16)", "forward-causal"),
    fault_of("other-rows", "+ h * 8 * 128, own + i", "+ h * 8 * 64, own + i", "forward"),
    fault_of("wrong-head", "this->of_row[Position::kTwoHeads * h] + query", "this->of_row[0] + query", "forward-packed"),
    fault_of("not-awaited", "cp_async_wait_group<0>();", "", "forward"),
    fault_of("not-turned", "ldmatrix_x4_trans(pairs, own_chunk", "ldmatrix_x4(pairs, own_chunk", "backward"),
    fault_of(
        "first-keys-twice", "own_chunk + i * 32, own + static", "own_chunk + i * 32, own - lane % 2 * 8 + static", "backward-persistent"
    ),
    fault_of(
        "tile-before",
        "if (next.left > 0) fetch();\n            if (next.left > 0) consumer",
        "if (next.left > 0) consumer",
        "backward-narrow",
    ),
]


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS, 4.0))
def test_a_fault_of_fetching_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    with suppress(EmulatorFaultError):  # a copy that nobody waits for
        assert not judged(spec, text, (150, 304)).ok
