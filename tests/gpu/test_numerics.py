"""Kernels against the numerics rule: random and fixed cases, launched directly so that any config can be had, and the public API."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain, product

import pytest
import torch

import flashgen
from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_many
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.devices import find_device
from flashgen.codegen.family import Family, find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target, targets
from flashgen.codegen.workload import Workload
from tests.support.cases import Case, Layout
from tests.support.configs import CHOSEN, CHOSEN_SM90
from tests.support.examples import families_of
from tests.support.fixed_cases import fixed_cases
from tests.support.plan import of_family
from tests.support.random_cases import random_cases

RANDOM = random_cases(320, seed=20240607)
FIXED = fixed_cases()
PUBLIC = random_cases(20, seed=314, head_dims=(64, 128))

KernelOf = Callable[[str, Case], Kernel]


def by_family(cases: Iterable[Case]) -> list[object]:
    """Every case for every family, or for the one family that its chosen config is of, with an id."""
    return [
        pytest.param(family.name, case, id=f"{family.name}-{case.name}")
        for family, case in product(families_of(), cases)
        if case.chosen is None or isinstance(case.chosen, family.config_type)
    ]


def compiled(specs: Iterable[KernelSpec]) -> dict[KernelSpec, Artifact]:
    """All of the specs, compiled on all cores. Fails with the compiler's log if one does not compile."""
    store = ArtifactStore()
    jobs = {spec.digest: (spec, partial(store.get_or_compile, render(spec), spec.target.name)) for spec in specs}
    artifacts = {}
    for spec, result in compile_many(jobs.values()):
        if isinstance(result, CompileError):
            pytest.fail(str(result), pytrace=False)
        artifacts[spec] = result
    return artifacts


@pytest.fixture(scope="module")
def kernel_of(request: pytest.FixtureRequest) -> KernelOf:
    """The kernel of each selected case: in its config, or in the default one where the compiler reports defects of its own."""
    on = gpu(0)
    wanted: dict[tuple[str, Case], KernelSpec] = {}
    for item in request.session.items:
        match getattr(getattr(item, "callspec", None), "params", {}):
            case {"family": str(name), "case": Case() as selected}:
                family = find_family(name)
                if not selected.refusals(family, on.device.target):
                    wanted[name, selected] = selected.spec(family, on.device.target)
    artifacts = compiled(wanted.values())
    unsound = [key for key, spec in wanted.items() if artifacts[spec].report.defects]
    wanted |= {(name, case): case.default_spec(find_family(name), on.device.target) for name, case in unsound}
    artifacts |= compiled(spec for spec in wanted.values() if spec not in artifacts)

    @cache
    def load(spec: KernelSpec) -> Kernel:
        return Kernel(spec, artifacts[spec], on)

    def find(family: str, case: Case) -> Kernel:
        if (family, case) not in wanted:
            pytest.skip(f"{family}: {'; '.join(case.refusals(find_family(family), on.device.target))}")
        return load(wanted[family, case])

    return find


def require_correct(kernel: Kernel, case: Case) -> None:
    tensors = case.make("cuda")
    case.launch(kernel, tensors)
    torch.cuda.synchronize()
    verdict = case.judge(tensors)
    outside = {name: poisoned.written_outside() for name, poisoned in (("out", tensors.out), ("lse", tensors.lse))}
    where = f"{case.name}, scale {case.scale}, layouts {[layout.value for layout in case.layouts]}, kernel {kernel.spec.name}"
    assert verdict.ok, f"{verdict.message}: {where}"
    assert outside == {"out": 0, "lse": 0}, f"elements written outside: {where}"


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "case"), by_family(RANDOM))
def test_random(family: str, case: Case, kernel_of: KernelOf) -> None:
    require_correct(kernel_of(family, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "case"), by_family(FIXED))
def test_fixed(family: str, case: Case, kernel_of: KernelOf) -> None:
    if "past-2^31" in case.name:
        torch.cuda.empty_cache()
        free, needed = torch.cuda.mem_get_info()[0], 48 * 2**30
        if free < needed:
            pytest.skip(f"needs {needed >> 30} GiB of free device memory; there are {free >> 30}")
    require_correct(kernel_of(family, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case.name)
def test_public(case: Case, layout: str) -> None:
    tensors = case.make("cuda")
    inputs = (tensors.q, tensors.k, tensors.v)
    if layout == "bhsd":
        inputs = tuple(t.transpose(1, 2) for t in inputs)  # type: ignore[assignment]
    out, lse = flashgen.attention(*inputs, causal=case.problem.mask is Mask.CAUSAL, scale=case.scale, layout=layout, return_lse=True)
    has_rows_first = layout == "bhsd" and inputs[0].stride(1) < inputs[0].stride(2)
    assert (out.transpose(1, 2) if has_rows_first else out).is_contiguous()
    verdict = case.judge_results(tensors, out.transpose(1, 2) if layout == "bhsd" else out, lse)
    assert verdict.ok, f"{verdict.message}: {case.name}, layouts {[x.value for x in case.layouts]}"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_no_queries(causal: bool) -> None:
    q, k = (torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16) for length in (0, 100))
    out, lse = flashgen.attention(q, k, k, causal=causal, return_lse=True)
    assert out.shape == (2, 0, 4, 64)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 0)
    assert lse.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_no_keys(causal: bool) -> None:
    q, k = (torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16) for length in (100, 0))
    out, lse = flashgen.attention(q, k, k, causal=causal, return_lse=True)
    assert out.shape == (2, 100, 4, 64)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 100, 4), (2, 100, 0)], ids=["no-batch", "no-heads"])
def test_nothing(shape: tuple[int, int, int]) -> None:
    q = torch.randn(*shape, 64, device="cuda", dtype=torch.float16)
    out, lse = flashgen.attention(q, q, q, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (shape[0], shape[2], shape[1])


@pytest.mark.gpu
def test_odd_strides_of_size_1_dimensions() -> None:
    q = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.float16)
    odd = torch.as_strided(q, q.shape, (3, 5, 64, 1))
    assert odd.stride() == (3, 5, 64, 1)
    ordinary = flashgen.attention(q, q, q, return_lse=True)
    for x, y in zip(flashgen.attention(odd, odd, odd, return_lse=True), ordinary, strict=True):
        assert torch.equal(x, y)


def tiles(family: Family, case: Case, target: Target) -> int:
    return -(-case.workload.len_kv // int(case.config(family, target).to_json()["block_kv"]))


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow, of_family(family.name, 2.0)], id=family.name) for family in families_of()]
)
def test_enough_cases_cross_eight_tiles(family: Family) -> None:
    target = find_target("sm_90a")
    able = [case for case in RANDOM if not family.refusals(case.problem, target)]
    assert sum(tiles(family, case, target) >= 8 for case in able) * 5 >= len(able)


def test_cases_cover_what_varies() -> None:
    assert len(RANDOM) >= 300
    assert len({case.name for case in RANDOM}) == len(RANDOM)
    assert random_cases(5, seed=1) == random_cases(5, seed=1) != random_cases(5, seed=2)
    assert {case.problem.dtype for case in RANDOM} == {case.problem.dtype for case in FIXED}
    assert {case.problem.head_dim for case in RANDOM} == set(range(8, 257, 8))
    assert {case.workload.heads_q // case.workload.heads_kv for case in RANDOM} >= {1, 2, 4, 8}
    assert set(Layout) <= {layout for case in chain(RANDOM, FIXED) for layout in case.layouts}
    apart = [case for case in RANDOM if case.problem.head_dim != case.problem.head_dim_v]
    assert len(apart) * 4 >= len(RANDOM)
    lengths = sorted(case.workload.len_q for case in RANDOM)
    assert lengths[0] <= 4
    assert lengths[-1] >= 3000
    assert {case.rising > 0 for case in RANDOM if case.rising} == {True, False}


@pytest.mark.slow
def test_chosen_and_drawn_configs_cover_what_varies() -> None:
    family, target = find_family("attention_forward"), find_target("sm_90a")
    drawn = [case.config(family, target).to_json() for case in RANDOM if case.config_seed is not None]
    chosen = [config.to_json() for _, config in CHOSEN]
    for configs, warps in ((drawn, set(range(2, 17))), (chosen, {2, 3, 4, 5, 7, 12, 16})):
        values = {name: {config[name] for config in configs} for name in configs[0]}
        assert values["query"] == {"shared", "registers"}
        assert values["first_product"] == {"qk", "pv"}
        assert values["stages"] == {2, 3, 4}
        assert values["warps"] >= warps
        assert {int(config["block_q"]) // int(config["warps"]) for config in configs} == {16, 32}
        assert {int(config["block_kv"]) // int(config["step_kv"]) for config in configs} >= {1, 2, 3}
    assert values["step_kv"] >= {16, 32, 48, 64, 80}
    compared = {(dv > d) - (dv < d) for (d, dv), _ in CHOSEN}
    assert compared == {-1, 0, 1}, "v wider than q, as wide, and narrower"


def test_chosen_configs_are_legal_everywhere() -> None:
    family = find_family("attention_forward")
    for (width, config), target, dtype in product(CHOSEN, targets().values(), ELEMENTS):
        assert family.check(Problem(dtype, *width), config, target) == [], f"{config.name} {target.name}"


def test_chosen_hopper_configs_are_legal_and_cover_what_varies() -> None:
    family, target = find_family("attention_forward_sm90"), find_target("sm_90a")
    for (width, config), dtype in product(CHOSEN_SM90, ELEMENTS):
        assert family.check(Problem(dtype, *width), config, target) == [], config.name
    chosen = [config.to_json() for _, config in CHOSEN_SM90]
    values = {name: {config[name] for config in chosen} for name in chosen[0]}
    assert values["warpgroups"] == {1, 2, 3}
    assert values["stages"] == {2, 3, 4}
    assert values["query_stages"] == {1, 2}
    assert values["out_panels"] == {1, 2, 3, 4}
    assert values["row_max"] == {"stale", "exact"}
    assert values["scheduler"] == {"static", "dynamic"}
    assert values["ping_pong"] == {True, False}
    assert values["pack_gqa"] == {1, 2, 16}
    assert {(dv > d) - (dv < d) for (d, dv), _ in CHOSEN_SM90} == {-1, 0, 1}


@pytest.mark.slow
@of_family("attention_forward", 15.0)
def test_cases_run_in_their_own_config() -> None:
    """One with defects is replaced by the default, so that few may have any: none of the chosen ones, an eighth of those drawn."""
    family, target = find_family("attention_forward"), find_target("sm_90a")
    drawn = {case.spec(family, target) for case in RANDOM if case.config_seed is not None and not family.refusals(case.problem, target)}
    chosen = {case.spec(family, target) for case in FIXED if isinstance(case.chosen, family.config_type)}
    sample = {*chosen, *random.Random(0).sample(sorted(drawn, key=lambda spec: spec.name), 12)}
    defects = {spec: artifact.report.defects for spec, artifact in compiled(sample).items() if artifact.report.defects}
    assert {spec.name: defects[spec] for spec in chosen & defects.keys()} == {}
    assert len(defects) <= 2, f"{len(defects)} of 12 drawn configs have defects: they leave too few registers"


def scores_by_key(case: Case) -> torch.Tensor:
    """Scaled scores [len_q, len_kv] of the first head of the first batch."""
    tensors = case.make("cpu")
    return tensors.q[0, :, 0].float() @ tensors.k[0, :, 0].float().T * case.scale


@pytest.mark.parametrize("rising", [-4000.0, 40.0, 400.0, 4000.0])
@pytest.mark.parametrize("dtype", list(ELEMENTS))
def test_logits_rise_from_the_last_key_to_the_first(rising: float, dtype: Dtype) -> None:
    problem = Problem(dtype, 64)
    scores = scores_by_key(Case("", problem, Workload(2, 2, 1, 50, 300), 0.125, magnitude=0.0, rising=rising))
    assert scores[:, -1].abs().max() == 0
    torch.testing.assert_close(scores[:, 0], torch.full((50,), rising), rtol=0.02, atol=0)
    falls = scores.diff(dim=1).sign() * -rising
    assert (falls >= 0).all()
    assert (falls > 0).float().mean() > 0.3, "element types round neighbours to the same value, but not many"
    for len_kv in (0, 1):
        Case("", problem, Workload(2, 2, 1, 5, len_kv), 0.125, rising=rising).make("cpu")


def test_tensors_are_poisoned() -> None:
    small = [case for case in random_cases(60, seed=5) if case.workload.batch * case.workload.len_kv * case.workload.len_q < 2**16]
    assert len(small) >= 4
    for case in small[:4]:
        tensors = case.make("cpu")
        for tensor, shape in zip((tensors.q, tensors.k, tensors.v, tensors.out.view), case.shapes(), strict=True):
            assert tensor.shape == shape
            assert tensor.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in tensor.stride()[:3])
        assert not any(t.isnan().any() for t in (tensors.q, tensors.k, tensors.v))
        assert tensors.out.view.isnan().all()
        assert tensors.lse.view.isnan().all()
        assert tensors.out.written_outside() == 0
        tensors.out.buffer[-1] = 0.0
        assert tensors.out.written_outside() == 1
        assert not case.judge(tensors).ok, "a kernel that writes nothing must be rejected"


@pytest.mark.parametrize("family", families_of(), ids=lambda family: family.name)
def test_values_are_the_parameters(family: Family) -> None:
    target = find_target("sm_90a")
    case = next(case for case in random_cases(50, seed=9) if not family.refusals(case.problem, target))
    config = case.config(family, target)
    blocks = {kernel.suffix: kernel.parameters for kernel in family.kernels(case.problem, config)}
    for launch in case.program(family, config, find_device("h200")).launches:
        assert launch.values["len_kv"] == case.workload.len_kv
        assert blocks[launch.suffix].pack(launch.values)


def test_far_layouts_pass_2_31() -> None:
    for case in FIXED:
        if "past-2^31" in case.name:
            reach = [
                sum((size - 1) * stride for size, stride in zip(shape, layout.strides(shape), strict=True))
                for shape, layout in zip(case.shapes(), case.layouts, strict=True)
            ]
            assert max(reach) >= 2**31, case.name
