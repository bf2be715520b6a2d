"""Keys that ALiBi makes negligible in the emulator, forward and backward: they are left out, those that count are not, and faults show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from flashgen.codegen import far_keys
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, Scheduler
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
from tests.support.plan import few_of, to_run
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text

FAMILY, TARGET = find_family("attention_forward_sm90"), find_target("sm_90a")
SLOPES = (0.0, 0.9, 3.0, 0.3, 0.05, -0.02)  # half of the heads share a head of keys
PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, modifiers=("alibi",))
SPECS = {
    "two-consumers": KernelSpec(FAMILY, PROBLEM, AttentionForwardSm90Config(2, 64, 2, 2, 1), TARGET),
    "one-consumer": KernelSpec(
        FAMILY,
        Problem(Dtype.FP16, 72, 64, Mask.CAUSAL, modifiers=("alibi",)),
        AttentionForwardSm90Config(1, 80, 2, 2, 1, ping_pong=False),
        TARGET,
    ),
    "three-consumers": KernelSpec(
        FAMILY, PROBLEM, AttentionForwardSm90Config(3, 64, 2, 1, 1, ping_pong=False, scheduler=Scheduler.DYNAMIC), TARGET
    ),
}
LENGTHS = ((450, 450), (200, 460), (300, 130))


def gradient_spec(family: str, head_dim: int, dtype: Dtype = Dtype.BF16) -> KernelSpec:
    problem = Problem(dtype, head_dim, mask=Mask.CAUSAL, operation="backward", modifiers=("alibi",))
    return KernelSpec(find_family(family), problem, find_family(family).default(problem, TARGET), TARGET)


GRADIENTS = {
    "backward": gradient_spec("attention_backward_sm90", 64, Dtype.FP16),
    "persistent": gradient_spec("attention_backward_persistent_sm90", 64),
    "wide": gradient_spec("attention_backward_wide_sm90", 136),
}


@pytest.fixture(autouse=True)
def _however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_keys, "FEWEST_KEYS", 1)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    wanted = {params["spec"] for params in to_run(request) if "spec" in params}
    compile_ahead(emulated_text(spec) for name, spec in {**SPECS, **GRADIENTS}.items() if name in wanted)


def random_tensors(spec: KernelSpec, lengths: tuple[int, int], heads_kv: int = 2) -> Tensors:
    tensors = Tensors.random(spec.problem, Workload(2, len(SLOPES), heads_kv, *lengths), torch.Generator().manual_seed(3))
    tensors["alibi_slopes"].copy_(torch.tensor(SLOPES))
    tensors["alibi_slopes"][1] *= 0.75
    return tensors


def run(spec: KernelSpec, text: Source, tensors: Tensors, **scalars: float) -> Verdict:
    tensors.derive(scalars)
    run_on_cpu(emulated_kernel(spec, text), tensors, scalars, limits=LIMITS)
    return Expected.of(tensors, scalars).judge(tensors)


@pytest.mark.parametrize(
    ("spec", "lengths", "magnitude"),
    few_of(
        itertools.product(SPECS, LENGTHS, (0.05, 1.0, 6.0)),
        *(("two-consumers", (450, 450), 1.0), ("two-consumers", (200, 460), 6.0)),
    ),
)
def test_results_are_right(spec: str, lengths: tuple[int, int], magnitude: float) -> None:
    tensors = random_tensors(SPECS[spec], lengths)
    tensors["q"].mul_(magnitude)
    verdict = run(SPECS[spec], emulated_text(SPECS[spec]), tensors)
    assert verdict.ok, verdict.message


def rows_without_far_values(spec: KernelSpec, text: Source) -> torch.Tensor:
    """Of each head, whether all of its last rows are finite, where the first values are not."""
    tensors = random_tensors(spec, (450, 450))
    tensors["v"][:, :64] = float("nan")
    run(spec, text, tensors)
    return tensors["out"].isfinite().all(-1)[:, 400:].all(1).all(0)


@pytest.mark.parametrize("spec", few_of(SPECS, "two-consumers"))
def test_values_of_far_keys_are_not_read(spec: str) -> None:
    found = rows_without_far_values(SPECS[spec], emulated_text(SPECS[spec]))
    assert found.tolist() == [slope > 0.25 for slope in SLOPES]  # nothing is left out where terms do not say so


@pytest.mark.slow
def test_keys_that_a_gentle_first_head_does_not_bound_are_found() -> None:
    spec = SPECS["two-consumers"]
    planted = Fault("first-head-alone", "!(counts || p.group_reciprocal != 0)", "!counts", Setting(spec.config, ()))
    assert not rows_without_far_values(spec, planted.apply(emulated_text(spec), Atoms.EMULATED))[1:3].all()


@pytest.mark.parametrize(
    ("spec", "lengths"),
    few_of(itertools.product(GRADIENTS, LENGTHS), ("backward", (450, 450)), ("backward", (200, 460))),
)
def test_gradients_are_right(spec: str, lengths: tuple[int, int]) -> None:
    verdict = run(GRADIENTS[spec], emulated_text(GRADIENTS[spec]), random_tensors(GRADIENTS[spec], lengths))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("spec", few_of(GRADIENTS, "backward"))
def test_gradients_of_far_queries_are_not_read(spec: str) -> None:
    tensors = random_tensors(GRADIENTS[spec], (450, 450), len(SLOPES))
    tensors["d_out"][:, 400:] = float("nan")
    run(GRADIENTS[spec], emulated_text(GRADIENTS[spec]), tensors)
    for name in ("d_k", "d_v"):
        finite = tensors[name].isfinite().all(-1)  # [batch, length, heads]
        assert finite[:, :128, torch.tensor(SLOPES) > 0.25].all()
        assert not finite[:, :, torch.tensor(SLOPES) < 0.1].any()


@pytest.mark.parametrize("spec", few_of(GRADIENTS, "backward"))
def test_gradients_of_long_keys_count_from_afar(spec: str) -> None:
    tensors = with_keys_that_count(GRADIENTS[spec])
    tensors["q"].mul_(0.3)
    verdict = run(GRADIENTS[spec], emulated_text(GRADIENTS[spec]), tensors)
    assert verdict.ok, verdict.message


def direction_of(spec: KernelSpec) -> torch.Tensor:
    return torch.randn(spec.problem.head_dim, generator=torch.Generator().manual_seed(7))


def with_keys_that_count(spec: KernelSpec) -> Tensors:
    """The longer keys are the farther they are away, so that their scores make up for most of their distance; queries and keys that are
    parallel have scores as high as their norms allow."""
    tensors = random_tensors(spec, (450, 450))
    direction = direction_of(spec)
    distance = 450 - torch.arange(450.0)
    tensors["q"].copy_(direction.expand_as(tensors["q"]) * 0.5)
    tensors["k"].copy_((direction * (0.1 + 0.007 * distance[:, None]))[None, :, None].expand_as(tensors["k"]))
    return tensors


@pytest.mark.parametrize("spec", few_of(SPECS, "two-consumers"))
def test_long_keys_count_from_afar(spec: str) -> None:
    verdict = run(SPECS[spec], emulated_text(SPECS[spec]), with_keys_that_count(SPECS[spec]))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("value", few_of((float("nan"), float("inf")), float("inf")))
def test_what_norms_cannot_bound_is_visited(value: float) -> None:
    """A row that sees it has NaN, as without leaving out keys."""
    spec = SPECS["two-consumers"]
    tensors = random_tensors(spec, (450, 450))
    tensors["k"][:, 3] = value
    run(spec, emulated_text(spec), tensors)
    finite = tensors["out"].isfinite().all(-1)  # [batch, length, heads]
    assert not finite[:, 3:].any(0).any(0)[torch.tensor(SLOPES) < 1.0].any()
    assert finite[:, :3].all()


def test_norms_below_what_squares_hold_bound_scores() -> None:
    spec = SPECS["two-consumers"]
    tensors = with_keys_that_count(spec)
    tensors["q"].mul_(2.0**-76), tensors["k"].mul_(2.0**61)
    verdict = run(spec, emulated_text(spec), tensors, scale=2.0**12)
    assert verdict.ok, verdict.message


_OWN, _FOUND = "bound.own = fminf(bound.own, own);", "return (first + trailing_zeros(counting)) * kFarRows;"
_PART = "if (part >= p.query_bounds_of_head) break;"
FAULTS = {
    "bound-of-nearest": ("own_key - (part + 1) * kFarRows + 1;", "own_key - part * kFarRows + 1;"),
    "no-own-score": ("(product - bound.own) * p.scale_log2", "product * p.scale_log2"),
    "highest-own-score": (_OWN, "bound.own = bound.own == infinity() ? own : fmaxf(bound.own, own);"),
    "norm-of-another-head": ("* p.heads_kv + divide(rows.head, p.group_reciprocal);", "* p.heads_kv;"),
    "one-query-tile-off": ("p.query_tiles + work.tile;", "p.query_tiles + min(work.tile + 1, p.query_tiles - 1);"),
    "bounded-by-one-part": (_PART, f"{_PART[:-8]} || i > 0) break;"),
    "counts-in-halves": (_FOUND, _FOUND.replace("* kFarRows", "* 2 * kFarRows")),
    "keys-of-the-first-entry": ("const Element* k = p.k + rows.batch * p.k_batch", "const Element* k = p.k"),
    "bounds-of-the-first-entry": ("const i64 head_kv = static_cast<i64>(rows.batch) * p.heads_kv", "const i64 head_kv = 0"),
}


@pytest.mark.parametrize("fault", few_of(FAULTS, "keys-of-the-first-entry"))
def test_faults_show(fault: str) -> None:
    spec = SPECS["two-consumers"]
    planted = Fault(fault, *FAULTS[fault], Setting(spec.config, ()))
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    assert any(not run(spec, text, tensors).ok for tensors in faulty_cases(spec))


_BY_LSE = "own = of_head_lse[min(query, p.len_q - 1)] * (kLog2E / p.scale_log2);"
GRADIENT_FAULTS = {
    "one-query-tile-less": ("(last + kBlockQ) / kBlockQ)", "last / kBlockQ)"),
    "first-head-of-a-group-alone": ("for (int member = 0; member < group; ++member", "for (int member = 0; member < 1; ++member"),
    "no-lse": (_BY_LSE, "own = 0.0f;"),
    "lse-of-another-scale": (_BY_LSE, _BY_LSE.replace("(kLog2E / p.scale_log2)", "kLog2E")),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_faults_of_gradients_show(fault: str) -> None:
    spec = GRADIENTS["backward"]
    planted = Fault(fault, *GRADIENT_FAULTS[fault], Setting(spec.config, ()))
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    opposed = with_keys_that_count(spec)  # to all queries near them
    opposed["k"][:, 320:].copy_(direction_of(spec) * -40.0)
    assert not all(run(spec, text, tensors).ok for tensors in (random_tensors(spec, (450, 450)), opposed))


def faulty_cases(spec: KernelSpec) -> Iterator[Tensors]:
    yield with_keys_that_count(spec)
    of_entries = with_keys_that_count(spec)  # keys of one entry of the batch are longer
    of_entries["q"].mul_(24.0)
    of_entries["k"][0].mul_(0.05)
    yield of_entries
    opposed = with_keys_that_count(spec)  # four queries have nothing to do with any key, the next four are opposed to all near them
    opposed["k"][:, 320:].copy_(direction_of(spec) * -40.0)
    opposed["q"][:, torch.arange(450) // 4 % 2 == 0] = 0.0
    yield opposed
    of_heads = with_keys_that_count(spec)  # keys of one head are longer
    of_heads["q"].mul_(12.0)
    of_heads["k"][:, :, 0].mul_(0.05)
    yield of_heads
    longer = with_keys_that_count(spec)  # a work tile's later queries are
    longer["q"].mul_((0.2 + (torch.arange(450) % 128 >= 64) * 12.0)[None, :, None, None].to(longer["q"].dtype))
    yield longer
