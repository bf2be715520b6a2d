"""A relative bias by a table of all distances, as `flashgen bench --grid relative` has it, in the emulator: no element is out of range."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashgen.bench.relative import RELATIVE, TABLE
from flashgen.codegen.family import find_family
from flashgen.codegen.modifiers.traced import CAPTURED_NUMBER, shape_scalars
from flashgen.codegen.operation import dense
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
from tests.support.plan import few_of
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

FAMILIES = ("attention_forward_sm90", "attention_backward_sm90", "attention_backward")
LENGTHS = {"square": (320, 320), "long": (150, 300), "short": (200, 90)}


def spec_of(name: str, head_dim: int) -> KernelSpec:
    """In the config that the model picks."""
    family, target = find_family(name), find_target("sm_90a")
    problem = Problem(Dtype.BF16, head_dim, head_dim, Mask.CAUSAL, family.operation, False, (RELATIVE,))
    return KernelSpec(family, problem, family.default(problem, target), target)


def judged(spec: KernelSpec, text: Source, lengths: tuple[int, int], is_transposed: bool = False) -> Verdict:
    """is_transposed: whether neighbouring elements of the table are of neighbouring heads."""
    heads, distances = 4, sum(lengths) - 1
    generator = torch.Generator().manual_seed(7)
    drawn = Tensors.random(spec.problem, Workload(1, heads, 2, *lengths), generator)
    table = torch.randn(distances, heads, generator=generator).T
    table = table if is_transposed else table.contiguous()
    tensors = Tensors(drawn.problem, drawn.workload, {**drawn.by_name, TABLE: table})
    strides = (1, heads) if is_transposed else dense((heads, distances))
    scalars = {f"{CAPTURED_NUMBER}n0": lengths[1] - 1, **shape_scalars("t0", (heads, distances), strides)}
    tensors.derive(scalars)
    run_on_cpu(emulated_kernel(spec, text), tensors, scalars, limits=LIMITS)
    return Expected.of(tensors, scalars).judge(tensors)


@pytest.mark.parametrize(
    ("family", "head_dim", "lengths"),
    few_of(
        itertools.product(FAMILIES, (64, 128), LENGTHS), ("attention_backward_sm90", 64, "square"), ("attention_forward_sm90", 64, "long")
    ),
)
def test_scores_gain_their_elements(family: str, head_dim: int, lengths: str) -> None:
    spec = spec_of(family, head_dim)
    verdict = judged(spec, emulated_text(spec), LENGTHS[lengths], is_transposed=lengths == "short")
    assert verdict.ok, verdict.message


@pytest.mark.slow
@pytest.mark.parametrize("family", ["attention_forward_sm90", "attention_backward_sm90"])
def test_no_score_looks_at_its_own_index(family: str) -> None:
    """Where no tile goes beyond the last query: so it is right whatever becomes of scores that do."""
    spec, lengths = spec_of(family, 64), (320, 320)
    other = "s = fmaf(functions.added(0.0f, batch, head, query, key), per_unit, s);"
    planted = Fault("no-other-way", other, "s = 1e4f;", Setting(spec.config, ()))
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    assert judged(spec, text, lengths).ok


@pytest.mark.slow
def test_a_fault_of_the_first_element_shows() -> None:
    spec = spec_of("attention_backward_sm90", 64)
    planted = Fault(
        "one-too-far", "are_there ? offset : 0, step * 8}", "are_there ? offset + step : 0, step * 8}", Setting(spec.config, ())
    )
    assert not judged(spec, planted.apply(emulated_text(spec), Atoms.EMULATED), LENGTHS["square"]).ok
