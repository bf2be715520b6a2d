"""Softcap, ALiBi, sinks, bias, masks and dropout in the emulator, alone, together and with windows, chunks and prefixes: kernels of every
family that has them, by the numerics rule, and faults that show. Windows alone: test_window; chunks: test_chunk; prefixes: test_prefix."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_backward_sm90.config import AttentionBackwardSm90Config
from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config
from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.family import find_family
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.traced.modifier import modifier_in_call
from flashgen.verification.expected import Expected
from tests.support.fault import Fault, Setting
from tests.support.plan import planned, to_run
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text
from tests.support.sinks import put_near_scores

# A score_mod that differs by heads.
BY_HEAD = name_of_functions(modifier_in_call(score_mod=lambda score, batch, head, query, key: score + key % 3 * head * 0.25).modifier)
TABLE = torch.zeros(2, 2, dtype=torch.bfloat16)
# Of the distance from query to key alone: by a table in which many distances have no element; by one that goes the other way; without one,
# and NaN for distances that begin where queries end.
BY_DISTANCE = name_of_functions(
    modifier_in_call(lambda score, batch, head, query, key: score + TABLE[query - key + 25, head] * 3.0).modifier
)
UPWARDS = name_of_functions(modifier_in_call(lambda score, batch, head, query, key: score + TABLE[head, key - query + 30] * head).modifier)
ROOTS = name_of_functions(modifier_in_call(lambda score, batch, head, query, key: score + torch.sqrt((170 - query + key).float())).modifier)
PACKED = AttentionForwardSm90Config(1, 64, 2, 2, 1, ping_pong=False, pack_gqa=16)
DECODE = AttentionDecodeConfig(32, 16, 64, 4, 2, QueryPlace.REGISTERS)
WIDE_DECODE = AttentionDecodeConfig(64, 32, 32, 4, 2, QueryPlace.SHARED)
DECODE_SM90, ROWS_DECODE_SM90 = AttentionDecodeSm90Config(1, 2, 32, 4), AttentionDecodeSm90Config(2, 1, 48, 3)
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default.
KERNELS: dict[str, tuple[str, int, Mask, bool, tuple[str, ...], Config | None]] = {
    "softcap": ("attention_forward", 64, Mask.CAUSAL, False, ("softcap",), None),
    "softcap-causal-sm90": (
        "attention_forward_sm90",
        64,
        Mask.CAUSAL,
        False,
        ("softcap",),
        AttentionForwardSm90Config(1, 64, out_panels=1, ping_pong=False),
    ),
    "softcap-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("softcap",), AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "alibi": ("attention_forward", 64, Mask.FULL, False, ("alibi",), None),
    "alibi-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("alibi",), AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "alibi-causal-sm90": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("alibi",), AttentionForwardSm90Config(2, 64, 2, 2, 1)),
    "alibi-packed-4": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("alibi",), replace(PACKED, pack_gqa=4)),
    "alibi-packed": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("alibi",), PACKED),
    "alibi-softcap-sm90": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("alibi", "softcap"), None),
    "softcap-window-sm90": ("attention_forward_sm90", 128, Mask.FULL, False, ("softcap", "window"), None),
    "sinks": ("attention_forward", 64, Mask.CAUSAL, False, ("sinks",), None),
    "sinks-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("sinks",), None),
    "sinks-packed": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("sinks",), PACKED),
    "mask": ("attention_forward", 64, Mask.CAUSAL, False, ("boolean_mask",), None),
    "mask-packed": ("attention_forward_sm90", 64, Mask.FULL, False, ("boolean_mask",), PACKED),
    "bias": ("attention_forward", 64, Mask.FULL, False, ("bias",), None),
    "bias-sm90": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("bias",), None),
    "bias-fp32-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("bias_fp32", "softcap"), None),
    "all-chunk": ("attention_forward", 64, Mask.CAUSAL, False, ("alibi", "bias", "boolean_mask", "chunk", "sinks", "softcap"), None),
    "chunk-softcap-sm90": ("attention_forward_sm90", 128, Mask.CAUSAL, False, ("chunk", "softcap"), None),
    "alibi-chunk-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("alibi", "chunk", "sinks", "window"), None),
    "all-prefix": ("attention_forward", 64, Mask.CAUSAL, False, ("alibi", "boolean_mask", "prefix_len", "sinks", "softcap"), None),
    "prefix-softcap-sm90": ("attention_forward_sm90", 128, Mask.CAUSAL, False, ("chunk", "prefix_len", "softcap", "window"), None),
    "mask-prefix-packed": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("boolean_mask", "prefix_len", "sinks"), PACKED),
    "dropout": ("attention_forward", 64, Mask.CAUSAL, False, ("dropout",), None),
    "dropout-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("dropout",), None),
    "dropout-packed": ("attention_forward_sm90", 64, Mask.CAUSAL, False, ("dropout",), PACKED),
    "dropout-softcap-sm90": ("attention_forward_sm90", 128, Mask.FULL, False, ("dropout", "sinks", "softcap"), None),
    "all": ("attention_forward", 64, Mask.FULL, False, ("alibi", "dropout", "sinks", "softcap", "window"), None),
    "all-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("alibi", "sinks", "softcap", "window"), None),
    "decode": ("attention_decode", 64, Mask.CAUSAL, False, ("alibi",), DECODE),
    "softcap-decode": ("attention_decode", 64, Mask.FULL, False, ("sinks", "softcap"), WIDE_DECODE),
    "all-decode": ("attention_decode", 64, Mask.FULL, False, ("alibi", "chunk", "sinks", "softcap", "window"), DECODE),
    "mask-decode": ("attention_decode", 64, Mask.CAUSAL, False, ("bias", "boolean_mask", "prefix_len", "sinks", "window"), DECODE),
    "traced-decode": ("attention_decode", 64, Mask.FULL, False, (BY_HEAD, "bias_fp32", "tree_mask"), DECODE),
    "distances-decode": ("attention_decode", 64, Mask.CAUSAL, False, (BY_DISTANCE,), DECODE),
    "decode-sm90": ("attention_decode_sm90", 64, Mask.CAUSAL, False, ("alibi", "sinks"), DECODE_SM90),
    "softcap-decode-sm90": (
        "attention_decode_sm90",
        64,
        Mask.FULL,
        False,
        ("softcap", "tree_mask"),
        AttentionDecodeSm90Config(2, 1, 48, 3),
    ),
    "all-decode-sm90": ("attention_decode_sm90", 64, Mask.FULL, False, ("alibi", "chunk", "sinks", "softcap", "window"), DECODE_SM90),
    "mask-decode-sm90": ("attention_decode_sm90", 64, Mask.CAUSAL, False, ("bias", "boolean_mask", "window"), DECODE_SM90),
    "bias-decode-sm90": ("attention_decode_sm90", 64, Mask.CAUSAL, False, ("bias_fp32", "sinks"), AttentionDecodeSm90Config(1, 1, 96, 2)),
    "backward-softcap": ("attention_backward", 64, Mask.FULL, False, ("softcap",), None),
    "backward-alibi": ("attention_backward", 64, Mask.CAUSAL, True, ("alibi",), None),
    "backward-all": ("attention_backward", 64, Mask.FULL, False, ("alibi", "sinks", "softcap", "window"), None),
    "backward-all-chunk": ("attention_backward", 64, Mask.CAUSAL, True, ("alibi", "bias", "boolean_mask", "chunk", "sinks"), None),
    "backward-chunk-softcap-sm90": ("attention_backward_sm90", 64, Mask.CAUSAL, False, ("alibi", "chunk", "softcap", "sinks"), None),
    "backward-chunk-wide": ("attention_backward_wide_sm90", 256, Mask.CAUSAL, True, ("alibi", "boolean_mask", "chunk", "sinks"), None),
    "backward-all-prefix": (
        *("attention_backward", 64, Mask.CAUSAL, True),
        *(("alibi", "bias", "boolean_mask", "chunk", "prefix_len", "sinks", "window"), None),
    ),
    "backward-prefix-softcap-sm90": ("attention_backward_sm90", 64, Mask.CAUSAL, False, ("alibi", "prefix_len", "softcap", "sinks"), None),
    "backward-bias-prefix-persistent": ("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("bias", "prefix_len"), None),
    "backward-mask-prefix-wide": ("attention_backward_wide_sm90", 256, Mask.CAUSAL, True, ("boolean_mask", "prefix_len", "sinks"), None),
    "backward-softcap-sm90": ("attention_backward_sm90", 64, Mask.CAUSAL, False, ("softcap",), None),
    "backward-alibi-sm90": ("attention_backward_sm90", 64, Mask.FULL, True, ("alibi",), None),
    "backward-alibi-window-sm90": ("attention_backward_sm90", 64, Mask.FULL, False, ("alibi", "window"), None),
    "backward-all-sm90": ("attention_backward_sm90", 64, Mask.FULL, False, ("alibi", "sinks", "softcap", "window"), None),
    "backward-softcap-persistent": ("attention_backward_persistent_sm90", 64, Mask.FULL, False, ("softcap",), None),
    "backward-alibi-persistent": ("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("alibi",), None),
    "backward-alibi-softcap-persistent": ("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("alibi", "softcap"), None),
    "backward-mask": ("attention_backward", 64, Mask.CAUSAL, True, ("boolean_mask",), None),
    "backward-mask-wide": ("attention_backward_wide_sm90", 256, Mask.FULL, False, ("boolean_mask",), None),
    "backward-bias": ("attention_backward", 64, Mask.FULL, True, ("bias",), None),
    "backward-bias-softcap": ("attention_backward", 64, Mask.CAUSAL, False, ("bias", "softcap"), None),
    "backward-bias-dropout-softcap": ("attention_backward", 64, Mask.FULL, False, ("bias", "dropout", "softcap"), None),
    "backward-bias-sm90": ("attention_backward_sm90", 64, Mask.CAUSAL, False, ("bias", "boolean_mask"), None),
    "backward-bias-fp32-sm90": ("attention_backward_sm90", 128, Mask.FULL, True, ("bias_fp32", "window"), None),
    "backward-bias-persistent": ("attention_backward_persistent_sm90", 64, Mask.FULL, False, ("bias",), None),
    "backward-dropout": ("attention_backward", 64, Mask.CAUSAL, True, ("dropout",), None),
    "backward-dropout-softcap": ("attention_backward", 64, Mask.FULL, False, ("dropout", "softcap"), None),
    "backward-dropout-sm90": ("attention_backward_sm90", 64, Mask.FULL, False, ("dropout",), None),
    "backward-dropout-bias-sm90": ("attention_backward_sm90", 128, Mask.CAUSAL, True, ("bias", "dropout", "sinks"), None),
    "traced": ("attention_forward", 64, Mask.FULL, False, ("traced",), None),
    "traced-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, ("sinks", "softcap", "traced"), None),
    "traced-packed": ("attention_forward_sm90", 64, Mask.CAUSAL, False, (BY_HEAD,), PACKED),
    "backward-traced": ("attention_backward", 64, Mask.CAUSAL, True, ("traced", "window"), None),
    "backward-traced-sm90": ("attention_backward_sm90", 64, Mask.FULL, False, ("dropout", "traced"), None),
    "backward-traced-full-sm90": ("attention_backward_sm90", 128, Mask.FULL, False, ("traced",), None),
    "distances": ("attention_forward", 64, Mask.CAUSAL, False, (BY_DISTANCE,), None),
    "distances-sm90": ("attention_forward_sm90", 64, Mask.FULL, False, (BY_DISTANCE,), AttentionForwardSm90Config(2, 32, 2, 2, 1)),
    "distances-packed": ("attention_forward_sm90", 64, Mask.FULL, False, (UPWARDS,), PACKED),
    "backward-distances": ("attention_backward", 64, Mask.CAUSAL, False, (UPWARDS,), None),
    "backward-distances-sm90": ("attention_backward_sm90", 64, Mask.FULL, False, (BY_DISTANCE,), AttentionBackwardSm90Config(32, 2, True)),
    "backward-upwards-sm90": ("attention_backward_sm90", 64, Mask.CAUSAL, True, (UPWARDS, "sinks"), AttentionBackwardSm90Config(32)),
    "backward-roots": ("attention_backward", 64, Mask.CAUSAL, False, (ROOTS,), None),
    "backward-sinks": ("attention_backward", 64, Mask.CAUSAL, True, ("sinks",), None),
    "backward-sinks-sm90": ("attention_backward_sm90", 64, Mask.FULL, True, ("sinks",), None),
    "backward-sinks-window-sm90": ("attention_backward_sm90", 128, Mask.FULL, False, ("sinks", "window"), None),
    "backward-sinks-persistent": ("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("sinks",), None),
    "backward-sinks-wide": ("attention_backward_wide_sm90", 256, Mask.FULL, False, ("sinks",), None),
    "backward-sinks-pair": ("attention_backward_pair_sm90", 256, Mask.CAUSAL, False, ("sinks",), None),
    "backward-alibi-wide": ("attention_backward_wide_sm90", 256, Mask.CAUSAL, False, ("alibi",), None),
    "backward-alibi-window-wide": ("attention_backward_wide_sm90", 256, Mask.FULL, False, ("alibi", "window"), None),
}


class Values(NamedTuple):
    """The cap, and factors: of q and sinks, of slopes, and of keys in the first half and quarter, which some kernels visit last."""

    cap: float
    magnitude: float
    slopes: float
    first_half: float = 1.0
    first_quarter: float = 1.0


# Scores far below a cap, about as high, and far above; slopes of either sign. Those that are huge have rows whose scores are shifted before
# they are scaled (softmax_rows.cuh).
VALUES = {
    "far-below": Values(50.0, 1.0, 1.0),
    "near": Values(15.0, 4.0, -0.2),
    "above": Values(1.0, 4.0, 0.0),
    "late": Values(15.0, 0.5, 0.2, first_half=5.0),
    "rising": Values(30.0, 0.5, 0.2, first_half=5.0, first_quarter=5.0),
    "huge": Values(2.0**14, 3000.0, 1.0),
    "huge-first": Values(2.0**13, 3000.0, 1.0, first_half=2.0**-10),
}
LENGTHS = ((90, 170), (140, 40))
CASES = [case for case in itertools.product(KERNELS, VALUES, LENGTHS) if "huge" not in case[1] or "backward" not in case[0]]
# How many cases of a family every run has; --slow has all.
EACH = {"attention_forward": 2, "attention_forward_sm90": 2, "attention_backward": 1, "attention_backward_sm90": 1}
HEADS = (32, 2)  # of q and of k and v: PackGQA has 16 heads in a tile


def spec_of(kernel: str, dtype: Dtype = Dtype.FP16) -> KernelSpec:
    name, head_dim, mask, deterministic, modifiers, config = KERNELS[kernel]
    family, target = find_family(name), find_target("sm_90a")
    problem = Problem(dtype, head_dim, head_dim, mask, family.operation, deterministic, modifiers)
    return KernelSpec(family, problem, config or family.default(problem, target), target)


def judged(spec: KernelSpec, text: Source, lengths: tuple[int, int], values: Values) -> Verdict:
    ends = (60, 20) if "window" in spec.problem.modifiers else (OPEN, OPEN)
    chunk = 50 if "chunk" in spec.problem.modifiers else OPEN
    heads = HEADS if getattr(spec.config, "pack_gqa", 1) > 1 else (3, 1) if "attention_decode" in spec.family.name else (2, 1)
    tensors = Tensors.random(spec.problem, Workload(1, *heads, *lengths, *ends, chunk), torch.Generator().manual_seed(5))
    scalars = {"softcap": values.cap} if "softcap" in spec.problem.modifiers else {}
    if "dropout" in spec.problem.modifiers:
        scalars["dropout_p"] = 0.97 if values.cap == 1.0 else 0.3  # those above 0.9688 are compared the other way round
    tensors["q"].mul_(values.magnitude)
    for part, factor in ((2, values.first_half), (4, values.first_quarter)):
        tensors["k"][:, : lengths[1] // part].mul_(factor)
    if "alibi_slopes" in tensors:
        tensors["alibi_slopes"].mul_(values.slopes)
    if "sinks" in tensors:
        put_near_scores(tensors["sinks"], values.magnitude)
    tensors.derive(scalars)
    run_on_cpu(emulated_kernel(spec, text), tensors, scalars, limits=LIMITS)
    return Expected.of(tensors, scalars).judge(tensors)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    wanted = {params["kernel"] for params in to_run(request) if "kernel" in params}
    compile_ahead(emulated_text(spec_of(kernel)) for kernel in KERNELS if kernel in wanted)


@pytest.mark.parametrize(
    ("kernel", "values", "lengths"),
    planned(
        CASES,
        lambda family: EACH.get(family, 0),
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: (case[0], case[1], KERNELS[case[0]][4]),
        name=lambda case: f"{case[0]}-{case[1]}-{case[2]}",
        seconds=lambda case: 1.5,
    ),
)
def test_scores_change_as_they_should(kernel: str, values: str, lengths: tuple[int, int]) -> None:
    spec = spec_of(kernel)
    verdict = judged(spec, emulated_text(spec), lengths, VALUES[values])
    assert verdict.ok, verdict.message


def judged_where_scores_are_alike(text: Source, cap: float) -> Verdict:
    """Of rows with one score each, from -6.25 to -7.8, of so many keys that lse is near 0: fp32 has little noise there, and what scores err
    by shows."""
    spec = spec_of("softcap")
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 128, 512), torch.Generator().manual_seed(5))
    tensors["q"].copy_((1 + torch.arange(256) / 1024).view(2, 128).T[None, :, :, None])
    tensors["k"].fill_(-25 / 32)  # products are exact
    run_on_cpu(emulated_kernel(spec, text), tensors, {"softcap": cap}, limits=LIMITS)
    return Expected.of(tensors, {"softcap": cap}).judge(tensors)


def judged_with_steep_slopes(text: Source, scores: float = 1.0) -> Verdict:
    """Rows whose nearest keys count for most, in blocks whose last key may be far beyond the diagonal, with a term of 75 in base 2."""
    spec = spec_of("alibi-causal-sm90")
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 170, 170), torch.Generator().manual_seed(5))
    tensors["alibi_slopes"].fill_(0.84)
    tensors["q"].mul_(scores)
    tensors.derive({})
    run_on_cpu(emulated_kernel(spec, text), tensors, {}, limits=LIMITS)
    return Expected.of(tensors, {}).judge(tensors)


@pytest.mark.parametrize("scores", [0.01, 1.0])
def test_lse_of_steep_slopes_does_not_show_how_terms_are_rounded(scores: float) -> None:
    assert judged_with_steep_slopes(emulated_text(spec_of("alibi-causal-sm90")), scores).ok


@pytest.mark.slow
def test_steep_slopes_that_share_where_scores_are_near_zero_are_found() -> None:
    spec = spec_of("alibi-causal-sm90")
    planted = Fault("shared-near-zero", "score * scale_log2 >= kNearZero", "score > -infinity()", Setting(spec.config, ()))
    assert not judged_with_steep_slopes(planted.apply(emulated_text(spec), Atoms.EMULATED), 0.01).ok


@pytest.mark.slow
def test_terms_that_are_rounded_for_many_keys_are_found() -> None:
    spec = spec_of("alibi-causal-sm90")
    planted = Fault("rounded-for-many-keys", "return kLn2 * (", "return 0.0f * (", Setting(spec.config, ()))
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    assert not judged_with_steep_slopes(text).ok


@pytest.mark.parametrize("cap", [10.0, 12.0, 15.0, 20.0, 30.0])
def test_capped_scores_do_not_err_to_one_side(cap: float) -> None:
    verdict = judged_where_scores_are_alike(emulated_text(spec_of("softcap")), cap)
    assert verdict.ok, verdict.message


@pytest.mark.slow
def test_capped_scores_that_err_to_one_side_are_found() -> None:
    """As near to tanh as the polynomial of the kernel by its largest error, but for a factor of 2."""
    text, first = emulated_text(spec_of("softcap")), "kQ[] = {-0x1.a67272p-24f, 0x1.83102ep-19f, -0x1.d30ec6p-15f, 0x1.03114cp-10f"
    assert text.text.count(first) == 1
    other = "kQ[] = {-0x1.a1bc3cp-24f, 0x1.81734ap-19f, -0x1.d2a836p-15f, 0x1.030bc0p-10f"
    one_sided = text.text.replace(first, other).replace("-0x1.1fff6ap-6f", "-0x1.1fff2cp-6f")
    assert judged_where_scores_are_alike(replace(text, text=one_sided), 10.0).message.startswith("lse rms error")


def judged_where_scores_fall(text: Source, spec: KernelSpec, last: float, first: float, columns: str = "all") -> Verdict:
    """Under a cap of 30, of scores near `last` in the block of keys that the kernel visits first, and near `first` in these columns of all
    others, from the first row to the last one 1 to 1.25 times as much."""
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 128, 256), torch.Generator().manual_seed(5))
    tensors["q"].copy_((1 + torch.arange(256) / 1024).view(2, 128).T[None, :, :, None].expand(tensors["q"].shape))
    tensors["k"].mul_(0.02).add_(last / 8)  # the scale is 1 / 8, of 64 products
    begin, end = COLUMNS[columns]
    for block in range(3):
        tensors["k"][:, block * 64 + begin : block * 64 + end] += (first - last) / 8
    run_on_cpu(emulated_kernel(spec, text), tensors, {"softcap": 30.0}, limits=LIMITS)
    return Expected.of(tensors, {"softcap": 30.0}).judge(tensors)


COLUMNS = {"all": (0, 64), "summed": (0, 48), "looked-at": (48, 64)}  # of a K block of 64 keys, of which sums or scores tell
FALLING = {"small-then-low": (-4.3, -8.0), "low": (-16.0, -16.0), "small-then-lower": (1.0, -200.0), "small-then-high": (1.0, 8.0)}


@pytest.mark.parametrize(("kernel", "dtype"), [("softcap-sm90", Dtype.FP16), ("softcap-causal-sm90", Dtype.BF16)])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scores", FALLING.values(), ids=FALLING)
def test_guesses_that_scores_are_small_are_right_or_taken_back(
    scores: tuple[float, float], columns: str, kernel: str, dtype: Dtype
) -> None:
    spec = spec_of(kernel, dtype)
    verdict = judged_where_scores_fall(emulated_text(spec), spec, *scores, columns)
    assert verdict.ok, verdict.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "by", "kernel", "scores", "columns"),
    [
        ("const u32 bits = __float_as_uint(least);", "const u32 bits = 0;", "softcap-sm90", "small-then-low", "summed"),
        ("__float_as_uint(most) - bits;", "0xff800000 - bits;", "softcap-sm90", "small-then-high", "summed"),
        ("fmaf(y, y, minus_reach2) < 0.0f", "true", "softcap-sm90", "small-then-high", "looked-at"),
        ("quad_sum(row_sum[h]) > 0.0f ? row_max[h] : kInitialRowMax", "row_max[h]", "softcap-sm90", "low", "all"),
        ("fminf(inverse, 1.0f)", "inverse", "softcap-causal-sm90", "small-then-low", "all"),
    ],
    ids=["low-sums-taken", "high-sums-taken", "last-scores-not-looked-at", "row-max-of-the-guess-kept", "low-totals-kept"],
)
def test_guesses_that_are_not_taken_back_are_found(find: str, by: str, kernel: str, scores: str, columns: str) -> None:
    spec = spec_of(kernel)
    text = emulated_text(spec)
    assert text.text.count(find) == 1
    assert not judged_where_scores_fall(replace(text, text=text.text.replace(find, by)), spec, *FALLING[scores], columns).ok


def judged_where_lanes_have_no_keys(text: Source, spec: KernelSpec) -> Verdict:
    """Of rows of which some lanes see no key of the first block, and some see one above the small ones in the next."""
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 130, 200), torch.Generator().manual_seed(44))
    tensors["q"].mul_(2)
    run_on_cpu(emulated_kernel(spec, text), tensors, {"softcap": 50.0}, limits=LIMITS)
    return Expected.of(tensors, {"softcap": 50.0}).judge(tensors)


def test_lanes_agree_whether_a_row_has_had_keys() -> None:
    spec = spec_of("softcap-causal-sm90", Dtype.BF16)
    text, find = emulated_text(spec), "quad_sum(row_sum[h]) > 0.0f ?"
    assert text.text.count(find) == 1
    assert judged_where_lanes_have_no_keys(text, spec).ok
    assert not judged_where_lanes_have_no_keys(replace(text, text=text.text.replace(find, "row_sum[h] > 0.0f ?")), spec).ok


def fault(name: str, find: str, replace: str, kernel: str, values: str = "near") -> tuple[str, Fault, str]:
    setting = Setting(KERNELS[kernel][5] or AttentionForwardSm90Config(2, 64), ())
    return kernel, Fault(f"{name}-{kernel}", find, replace, setting), values


_DISTANCE, _HEAD = "(Position::kRowsAreKeys ? -causal_offset : causal_offset)", "of_batch[first], of_batch[second]"
_CAPPED = "backward-softcap"
FAULTS = [
    fault("cap-before-scale", " p.softcap_step,\n", " p.softcap_step * 8.0f,\n", "softcap"),
    fault("no-map", "S[i][j][e] = tanh_of_small(S[i][j][e])", "S[i][j][e] *= 0.375f", "softcap"),
    fault("cubic-left-out", "fmaf(v, v, outer)", "fmaf(inner, inner, outer)", "softcap-sm90", "far-below"),
    fault("small-taken-for-all", "fmaf(y[j][e], y[j][e], minus_reach2)", "fmaf(y[j][e], y[j][e], 64.0f * minus_reach2)", "softcap-sm90"),
    fault("guess-not-checked", "kStaleRowMax && vote_sync_any(guessed && !small)", "false", "softcap-sm90", "rising"),
    fault("later-blocks-not-mapped", "small = map_unless", "small = !masked || map_unless", "softcap-sm90", "late"),
    fault("large-by-polynomial", "(bits & 0x40000000) != 0", "false", "softcap", "above"),
    fault("no-derivative", "(dp[i][j][e] - delta[e % 2]) * score_derivative(s[i][j][e], chain)", "dp[i][j][e] - delta[e % 2]", _CAPPED),
    fault("no-derivative", "score = p[e] * score_derivative(score, chain)", "score = p[e]", "backward-softcap-sm90"),
    fault("wrong-heads-slope", _HEAD, "of_batch[0], of_batch[0]", "alibi"),
    fault("wrong-heads-slope", _HEAD, "of_batch[first], of_batch[first]", "alibi-packed"),
    fault("other-side", "kBefore ? own : -own", "own", "backward-alibi-sm90"),
    fault("one-key-off", _DISTANCE, "(Position::kRowsAreKeys ? -causal_offset : causal_offset + 1)", "alibi-sm90"),
    fault("one-query-off", _DISTANCE, "(Position::kRowsAreKeys ? 1 - causal_offset : causal_offset)", "backward-alibi"),
    fault(
        "no-offset",
        "{offset[0].log2_less(row_max[0], scale_log2), offset[1].log2_less(row_max[1], scale_log2)}",
        "{-row_max[0], -row_max[1]}",
        "alibi-sm90",
    ),
    fault(
        "counts-from-another-key", "(j * 8 + e - kNearest), nearest)", "(j * 8 + e - kNearest + 1), nearest)", "alibi-causal-sm90", "late"
    ),
    fault("second-row-as-first", "own = row_max - less,", "own = row_max,", "alibi-causal-sm90", "late"),
    fault("one-query-for-each-row", "kRowStep = 8 / kPackGqa", "kRowStep = 8", "alibi-packed-4", "late"),
    fault("too-far-apart", "apart |= !(fits || has_no_key)", "apart |= false", "alibi-causal-sm90", "rising"),
    fault("left-out", "if (!seen) s = -infinity()", "(void)seen", "backward-mask"),
    fault("inverted", "if (!seen) s = -infinity()", "if (seen) s = -infinity()", "mask"),
    fault("wrong-head", "of_row[1] = of_batch + second_head * head_step", "of_row[1] = of_row[0]", "mask-packed"),
    fault("scaled", "s = fmaf(as_float(element), per_unit, s)", "s += as_float(element)", "bias-sm90"),
    fault("one-key-off", "change(S[i][j][h * 2 + 1], own[step])", "change(S[i][j][h * 2 + 1], own[0])", "bias"),
    fault("gradient-left-out", "if (j * kUnitQueries < columns) add", "if (j * kUnitQueries + 8 < columns) add", "backward-bias"),
    fault("gradient-of-another", "* kUnit + lane_index() * 4;", "* kUnit + (lane_index() ^ 1) * 4;", "backward-bias-sm90"),
    fault("neighbours-swapped", "odd ? own[h][1] : got);", "odd ? got : own[h][1]);", "backward-bias-sm90"),
    fault("last-pair-left", "query < len_q && key < len_kv) store", "query < len_q && key + 2 < len_kv) store", "backward-bias-persistent"),
    fault("left-out-of-the-sum", "factor * normaliser(fmaf(total, factor, ex2_approx_ftz(height - rise)))", "normaliser(total)", "sinks"),
    fault("wrong-heads-slope", "rows.at(row).head, rows.at(row + 8).head", "rows.at(row).head, rows.at(row).head", "decode"),
    fault("wrong-query", "{work.rows, first_row, first_key}", "{work.rows, 0, first_key}", "decode"),
    fault("other-warps-keys", "{work.rows, first_row, first_key}", "{work.rows, first_row, tile * kBlockKv}", "decode"),
    fault("wrong-heads-sink", "p.sinks[to.head]", "p.sinks[work.rows.head_kv]", "softcap-decode"),
    fault("left-out-of-lse", "= lse_with_sink(lse, sink);", "= lse;", "softcap-decode"),
    fault("left-out-of-lse", "lse = lse_with_sink(lse, p.sinks[head]);", "", "sinks-sm90"),
    fault("scaled", "fmaf(-origin.row_max, ln2_hi, sink)", "fmaf(-origin.row_max, ln2_hi, sink * unit)", "sinks-sm90"),
    fault("wrong-heads-sink", "sinks[head + (row + 8) % kPackGqa]", "sinks[head + row % kPackGqa]", "sinks-packed"),
    fault("wrong-heads-sink", "(batch) * p.heads_q + head", "(batch) * p.heads_q", "backward-sinks"),
    fault("no-probability", "fmaf(-probability, row_delta, -compensation)", "-row_delta - compensation", "backward-sinks-sm90"),
    fault("one-row-left-out", "row < p.len_q; row += kThreads", "row < p.len_q - 1; row += kThreads", "backward-sinks-persistent"),
    fault("not-in-units-of-scores", "batch, head, query, key), per_unit, s)", "batch, head, query, key), 1.0f, s)", "traced"),
    fault("inverted", "<u32>(tiles.visible_beside", "<u32>(!tiles.visible_beside", "backward-traced"),
    fault("wrong-stride", "sizes[dimension]) * strides[dimension]", "sizes[dimension]) * strides[0]", "backward-traced-sm90"),
    fault("queries-for-keys", "query = Position::kRowsAreKeys ? column : row", "query = row", "backward-traced-full-sm90"),
    fault("other-distances", "j = n - kBehind + row;", "j = n - kBehind + row / 2 * 2;", "distances"),
    fault("neighbours-alike", "tensor.first + step}", "tensor.first}", "distances"),
    fault("from-another-row", "column - row - kBehind * 8, last", "column - row, last", "distances-sm90"),
    fault("unknown-for-known", "if (!Terms::can_know(own, position, batch, heads[0], len_q)) return false;", "", "backward-distances"),
    fault("unknown-for-known", "return position.terms.are_known;", "return true;", "backward-upwards-sm90"),
    fault("past-the-end", " && position.first_column + kTiles * 8 <= len_q", "", "backward-roots"),
    fault("not-in-units-of-scores", "fmaf(term, per_unit, S[", "fmaf(term, 1.0f, S[", "backward-distances-sm90"),
    fault("of-the-tile-before", "if (next.left > 0) position = find_terms();", "", "backward-distances-sm90"),
    fault("other-keys", "first_key / 4u + lane_index() % 4;", "first_key / 4u + (lane_index() + 1) % 4;", "dropout"),
    fault("kept-for-dropped", "(set_lt_f16x2(word, limits) ^ inverted)", "set_lt_f16x2(word, limits)", "dropout", "above"),
    fault("not-divided", "O[i][j][e] *= dropout.scale", "(void)dropout", "dropout"),
    fault("not-divided", "normalisers[1] *= p.dropout_scale", "normalisers[1] *= 1.0f", "dropout-sm90"),
    fault("heads-alike", "{keys, queries, head + next_heads, 0}", "{keys, queries, next_heads, 0}", "dropout-sm90"),
    fault("wrong-head", "heads[Position::kTwoHeads * (e / 2)]", "heads[0]", "traced-packed"),
    fault("wrong-head", "(row + h * 8) % kPackGqa);", "0u);", "dropout-packed"),
    fault("other-queries", "lane % 4 * 2 + odd", "lane % 4 * 2 + !odd", "backward-dropout"),
    fault("d-v-not-divided", "dV, p.dropout_scale,", "dV, 1.0f,", "backward-dropout-sm90"),
    fault("d-p-not-dropped", "drop(dP, kept, 1.0f);", "", "backward-dropout-bias-sm90"),
    fault("no-offset", "offset_log2[i][e / 2] - lse[e % 2]", "-lse[e % 2]", "backward-alibi-sm90"),
]


@pytest.mark.parametrize(
    ("kernel", "planted", "values"),
    planned(
        FAULTS,
        0,
        family=lambda case: KERNELS[case[0]][0],
        kinds=lambda case: [case[1].find],
        name=lambda case: case[1].name,
        seconds=lambda case: 3.0,
        fault=True,
    ),
)
def test_a_fault_of_a_modifier_shows(kernel: str, planted: Fault, values: str) -> None:
    spec = spec_of(kernel)
    text = planted.apply(emulated_text(spec), Atoms.EMULATED)
    assert not judged(spec, text, (170, 300), VALUES[values]).ok


@pytest.mark.slow
@pytest.mark.parametrize(("condition", "where"), [("0 <= index", "past the end"), ("index < size", "before the begin")])
def test_elements_that_are_not_there_are_not_read(condition: str, where: str) -> None:
    """Of captured tensors whose elements have no look at each index, where the look at the first and the last one is left out."""
    kernel, planted, values = fault("no-look", "static_cast<u32>(index) < static_cast<u32>(size)", condition, "backward-distances-sm90")
    text = planted.apply(emulated_text(spec_of(kernel)), Atoms.EMULATED)
    with pytest.raises(EmulatorFaultError, match=f"{where} of traced_t0"):
        judged(spec_of(kernel), text, LENGTHS[0], VALUES[values])
