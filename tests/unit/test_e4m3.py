"""Keys and values in a cache that are e4m3 numbers: what problems say of them, who computes them, and what their oracle does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_decode.family import FAMILY
from flashgen.codegen.family import families
from flashgen.codegen.operation import operation_of
from flashgen.codegen.plain import from_plain, to_plain
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.caches import cached_keys, poison_unused
from flashgen.numerics.forward import exact_attention
from flashgen.numerics.oracle import oracle_of
from flashgen.selection.picks import picks

H200, TARGET = find_device("h200"), find_target("sm_90a")
BF16 = Problem(Dtype.BF16, 64, 96, Mask.CAUSAL, sequences=Sequences.CACHED)
E4M3 = replace(BF16, dtype_kv=CacheDtype.E4M3)
WORKLOAD = Workload(5, 4, 2, 3, 48, pages=20, page_size=16, table_pages=3)


def drawn() -> Tensors:
    return Tensors.random(E4M3, WORKLOAD, torch.Generator().manual_seed(3))


def test_name_and_json() -> None:
    assert E4M3.name == "bf16_d64x96_causal_cached_e4m3"
    assert from_plain(Problem, to_plain(E4M3), "problem") == E4M3
    assert "dtype_kv" not in to_plain(BF16)


def test_only_caches_have_another_type() -> None:
    with pytest.raises(ArgumentError, match="dtype_kv must be None where sequences are not cached; got e4m3"):
        Problem(Dtype.BF16, 64, dtype_kv=CacheDtype.E4M3)


def test_keys_and_values_have_a_byte_an_element() -> None:
    operation = operation_of(E4M3)
    keys = 5 * 48 * 2 * (64 + 96)
    assert E4M3.kv_bytes == 1
    assert BF16.kv_bytes == 2
    assert operation.io_bytes(BF16, WORKLOAD) - operation.io_bytes(E4M3, WORKLOAD) == keys
    read = {problem: FAMILY.traffic(problem, FAMILY.default(problem, TARGET), WORKLOAD, H200).read for problem in (BF16, E4M3)}
    queries = 5 * 3 * 4 * 64 * 2
    assert 2 * (read[E4M3] - queries) == read[BF16] - queries


def test_one_family_computes_them() -> None:
    able = [name for name, family in families().items() if family.operation == "forward" and not family.refusals(E4M3, TARGET)]
    assert able == ["attention_decode"]
    for name, family in families().items():
        if family.operation == "forward" and name not in able:
            assert any("dtype_kv must be None" in reason for reason in family.refusals(E4M3, TARGET)), name


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (E4M3, "sm_80", "target must be sm_89 or newer where keys and values are e4m3; got sm_80"),
        (E4M3, "sm_86", "target must be sm_89 or newer where keys and values are e4m3; got sm_86"),
        (replace(E4M3, head_dim=72), "sm_90a", "head_dim must be a multiple of 16 where keys and values are e4m3; got 72 (nearest: 80)"),
        (replace(E4M3, head_dim_v=8), "sm_90a", "head_dim_v must be a multiple of 16 where keys and values are e4m3; got 8 (nearest: 16)"),
        (replace(E4M3, dtype=Dtype.FP32), "sm_90a", "dtype must be bf16 or fp16; got fp32"),
    ],
)
def test_refusals(problem: Problem, target: str, reason: str) -> None:
    assert FAMILY.refusals(problem, find_target(target)) == [reason]


@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("width", [16, 80, 128, 256])
def test_configs_for_all_widths(target: str, width: int) -> None:
    problem = replace(E4M3, head_dim=width, head_dim_v=width)
    configs = list(FAMILY.space(problem, find_target(target)))
    assert FAMILY.default(problem, find_target(target)) in configs
    assert all(
        not KernelSpec(FAMILY, problem, config, find_target(target)).family.check(problem, config, find_target(target))
        for config in configs
    )


def test_strides_are_those_of_pairs() -> None:
    strides = {"k": (40960, 320, 160, 1), "v": (2**33, 640, 192, 1), "k_descale": (0, 0), "v_descale": (3, 7)}
    call = attention_call(E4M3, WORKLOAD, strides)
    values = FAMILY.program(FAMILY.default(E4M3, TARGET), call, H200).launches[0].values
    assert [values[f"k_{axis}"] for axis in ("batch", "row", "head")] == [20480, 160, 80]
    assert [values[f"v_{axis}"] for axis in ("batch", "row", "head")] == [2**32, 320, 96]
    assert [values[f"{name}_descale_{axis}"] for name in "kv" for axis in ("batch", "head")] == [0, 0, 3, 7]


@pytest.mark.parametrize("sampled", [False, True])
def test_values_are_elements_times_descales(sampled: bool) -> None:
    tensors = drawn()
    poison_unused(tensors)
    oracle, scalars = oracle_of(E4M3), {"scale": 0.25}
    rows = oracle.sample(E4M3, WORKLOAD, 13, seed=1) if sampled else None
    found = oracle.exact(E4M3, tensors, scalars, rows)
    for number, (page, row) in enumerate(cached_keys(tensors)):
        k, v = (tensors[name][page, row].double() * tensors[f"{name}_descale"][number].double()[:, None] for name in ("k", "v"))
        out, lse = exact_attention(tensors["q"][number : number + 1], k[None], v[None], causal=True, scale=0.25)
        if rows is not None:
            (of,) = (rows[:, 0] == number).nonzero(as_tuple=True)
            torch.testing.assert_close(found["out"][of], out[0, rows[of, 2], rows[of, 1]])
            torch.testing.assert_close(found["lse"][of], lse[0, rows[of, 1], rows[of, 2]])
        else:
            torch.testing.assert_close(found["out"][number], out[0])
            torch.testing.assert_close(found["lse"][number], lse[0])


def test_without_descales_elements_are_the_values() -> None:
    tensors = drawn()
    ones = tensors.replacing(**{name: torch.ones(5, 2) for name in ("k_descale", "v_descale")})
    without = Tensors(E4M3, WORKLOAD, {name: tensor for name, tensor in tensors.items() if "descale" not in name})
    of_ones, of_none = (oracle_of(E4M3).exact(E4M3, one, {"scale": 0.25}) for one in (ones, without))
    assert all(torch.equal(of_ones[name], of_none[name]) for name in of_ones)


def test_plain_computes_with_elements_of_q_s_type() -> None:
    """They are exact in it, so nothing is rounded before the product."""
    tensors = drawn()
    found = oracle_of(E4M3).plain(E4M3, tensors, {"scale": 0.25})
    exact = oracle_of(E4M3).exact(E4M3, tensors, {"scale": 0.25})
    assert found["out"].dtype == torch.bfloat16
    seen = exact["lse"].isfinite()
    assert (found["lse"] - exact["lse"])[seen].abs().max() < 1e-5


def test_drawn_tensors_lie_apart_on_aligned_rows() -> None:
    tensors = drawn().apart()
    assert tensors["k"].dtype == torch.float8_e4m3fn
    assert all(stride % 16 == 0 for name in ("k", "v") for stride in tensors[name].stride()[:-1])
    assert (tensors["k_descale"] > 0).all()


def test_records_of_plain_kernels_are_asked_for_without_the_type_of_caches() -> None:
    """Which no dense sequences have: where no record is of e4m3, the choice must go on to the model."""
    problem = replace(E4M3, head_dim=64, head_dim_v=64)
    found = list(picks(problem, Workload(8, 8, 2, 1, 2048, pages=256, page_size=64, table_pages=32), H200, ("580.1", "13.0"), frozenset()))
    assert all(pick.choice.spec(TARGET).problem == problem for pick in found)
