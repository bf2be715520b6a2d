"""Every family compiles for every target, without a GPU: defaults are free of defects, and the space's estimates hold."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from functools import cache, partial

import pytest

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.nvrtc import compile_many, compile_source
from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target, targets
from tests.support.examples import example_problems, is_of_attention
from tests.support.plan import planned, sample

# The usual head dims, then awkward ones: narrower than a row of the matrix product, no multiple of 16, two that differ.
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (8, 8), (72, 72), (96, 96), (192, 128), (40, 256))
EXAMPLE = Problem(Dtype.BF16, 64)
QUICK_DEFAULTS = 1  # of each family for every run; --slow has many
# Right, but slower than they could be: no legal config does without spills. Each must spill, so that it is taken out once it does not.
SPILLING = re.compile("attention_backward_(bf16|fp16)_d256_full_document_ids(_int64)?(_deterministic)?_.*_sm_8[69]")


def problems(head_dims: tuple[int, int], operation: str = "forward") -> list[Problem]:
    every = itertools.product(ELEMENTS, Mask, (False, True))
    return list(dict.fromkeys(Problem(dtype, *head_dims, mask, operation, deterministic) for dtype, mask, deterministic in every))


def problems_of(family: Family) -> list[Problem]:
    """Those of its operation, of all head dims where it has any."""
    if not is_of_attention(family):
        return example_problems(family)
    plain = [problem for head_dims in HEAD_DIMS for problem in problems(head_dims, family.operation)]
    full = [problem for problem in plain if problem.mask is Mask.FULL]
    return [*plain, *(dataclasses.replace(problem, modifiers=(name,)) for name in family.modifiers for problem in full)]


def able(family: Family, problems: Iterable[Problem], target: Target) -> bool:
    """Whether it computes any of these there."""
    return not all(family.refusals(problem, target) for problem in problems)


def compile_spec(spec: KernelSpec) -> Artifact:
    return compile_source(render(spec), spec.target.name)


def compile_specs(specs: Iterable[KernelSpec]) -> Iterator[tuple[KernelSpec, Artifact]]:
    for spec, outcome in compile_many(((s, partial(compile_spec, s)) for s in specs), workers=2):
        if isinstance(outcome, CompileError):
            pytest.fail(f"{spec.name}: {outcome}")
        yield spec, outcome


def default_specs(family: Family, target: Target, chosen: Iterable[Problem]) -> list[KernelSpec]:
    return [KernelSpec(family, p, family.default(p, target), target) for p in chosen if not family.refusals(p, target)]


def registers_of_a_block(spec: KernelSpec, artifact: Artifact) -> int:
    """The most that a block of any of the text's kernels takes: the one with most registers a thread may have few threads."""
    return max(artifact.report.entries[spec.name + suffix].registers * block.threads for suffix, block in spec.resources.items())


def require_sound(specs: list[KernelSpec]) -> None:
    defects = {}
    for spec, artifact in compile_specs(specs):
        defects[spec.name] = artifact.report.defects
        assert registers_of_a_block(spec, artifact) <= spec.target.registers_per_sm, spec.name
        assert spec.largest_block.shared_bytes <= spec.target.shared_memory_per_block, spec.name
        assert artifact.cubin.startswith(b"\x7fELF"), spec.name
        assert artifact.arch == spec.target.name
    assert {name: found for name, found in defects.items() if bool(found) != bool(SPILLING.fullmatch(name))} == {}


def kinds(default: tuple[Problem, Target]) -> Iterable[Hashable]:
    """What the sample is spread over."""
    p, target = default
    masks = p.mask, p.deterministic, (p.mask, p.deterministic)
    return target.name, (p.head_dim, p.head_dim_v), (target.name, p.dtype), p.dtype, *masks, p.modifiers


@cache
def some_defaults() -> dict[str, list[tuple[Problem, Target]]]:
    """By family a sample of what it computes; together they are spread over targets, head dims and the rest."""
    found, seen = {}, Counter[Hashable]()
    for family in families().values():
        every = [(p, target) for p, target in itertools.product(problems_of(family), targets().values()) if not family.refusals(p, target)]
        assert every, f"{family.name} computes nothing of this: it would not be tested"
        found[family.name] = sample(every, QUICK_DEFAULTS, family.name, kinds, seen)
    return found


@pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
def test_defaults_are_free_of_defects(family: Family) -> None:
    """A sample; the slow test leaves none out."""
    require_sound([spec for p, target in some_defaults()[family.name] for spec in default_specs(family, target, [p])])


def test_the_samples_together_have_every_target_and_head_dim() -> None:
    together = [default for defaults in some_defaults().values() for default in defaults]
    assert {target.name for _, target in together} == set(targets())
    assert {(p.head_dim, p.head_dim_v) for p, _ in together} >= set(HEAD_DIMS)
    assert {(p.mask, p.deterministic) for p, _ in together} == set(itertools.product(Mask, (False, True)))


@pytest.mark.parametrize(
    ("family", "target"),
    planned(
        [(f, t) for f in families().values() for every in [problems_of(f)] for t in targets().values() if able(f, every, t)],
        0,
        family=lambda one: one[0].name,
        kinds=lambda one: (),
        name=lambda one: f"{one[0].name}-{one[1].name}",
        seconds=lambda one: 12.0,
    ),
)
def test_all_defaults_are_free_of_defects(family: Family, target: Target) -> None:
    require_sound(default_specs(family, target, problems_of(family)))


def test_every_target_has_a_family() -> None:
    """So that none of the tests above passes because it has nothing to do."""
    for target in targets().values():
        for head_dims in HEAD_DIMS:
            able = any(not family.refusals(problem, target) for family in families().values() for problem in problems(head_dims))
            assert able, f"no family computes head dims {head_dims} on {target.name}"


def test_the_space_is_worth_tuning() -> None:
    configs = families()["attention_forward"].legal_configs(EXAMPLE, find_target("sm_90a"))
    assert len(configs) >= 40
    assert len({c.name for c in configs}) == len(configs)


def sampled_specs(family: Family, count: int) -> list[KernelSpec]:
    draw = random.Random(7)
    specs: list[KernelSpec] = []
    while len(specs) < count:
        target = draw.choice(list(targets().values()))
        of_widths = problems(draw.choice(HEAD_DIMS), family.operation) if is_of_attention(family) else problems_of(family)
        problem = draw.choice(of_widths)
        if legal := family.legal_configs(problem, target):
            specs.append(KernelSpec(family, problem, draw.choice(legal), target))
    return specs


def counted(count: int) -> list[object]:
    """Every family with a number of configs as parameters: defaults are what every run compiles."""
    return planned(
        [(family, count) for family in families().values()],
        0,
        family=lambda one: one[0].name,
        kinds=lambda one: (),
        name=lambda one: f"{one[0].name}-{count}",
        seconds=lambda one: count * 0.35,
    )


@pytest.mark.parametrize(("family", "count"), [*counted(2), *counted(125)])
def test_legal_configs_compile(family: Family, count: int) -> None:
    """A legal config may spill, since only the compiler knows its registers; but then its report says so."""
    sound = 0
    for spec, artifact in compile_specs(sampled_specs(family, count)):
        report = artifact.report
        assert 16 <= report.registers <= spec.target.registers_per_thread, spec.name
        assert registers_of_a_block(spec, artifact) <= spec.target.registers_per_sm, spec.name
        assert bool(report.defects) == bool(report.spill_bytes or report.stack_bytes or report.warnings), spec.name
        sound += not report.defects
    assert sound >= count // 2, f"only {sound} of {count} legal configs are free of defects: the estimate of registers is off"


def test_a_spilling_kernel_is_a_defect() -> None:
    """The check above would be worth nothing if spills went unseen."""
    sums = " + ".join(f"v[{i}] * v[{(7 * i + 3) % 200}]" for i in range(200))
    text = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) hungry(float* p) { float v[200]; '
        "for (int i = 0; i < 200; ++i) v[i] = p[i * 32 + threadIdx.x]; __syncthreads(); "
        f"for (int i = 0; i < 200; ++i) p[i * 64] = v[i] + p[i]; p[0] = {sums}; }}"
    ).replace("for (int", "\n#pragma unroll\nfor (int")
    report = compile_source(Source("hungry", text), "sm_80").report
    assert report.spill_bytes > 0
    assert report.defects == [f"spills {report.spill_bytes} B a thread"]


def test_a_source_that_does_not_compile_gives_the_log() -> None:
    with pytest.raises(CompileError, match=r"broken does not compile for sm_80:\n.*broken\.cu\(1\): error"):
        compile_source(Source("broken", 'extern "C" __global__ void broken() { nonsense; }'), "sm_80")
