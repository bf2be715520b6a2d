"""`Problem` and `Workload`: what they refuse, their names and their counting."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operations.backward import OPERATION as BACKWARD
from flashgen.codegen.operations.forward import OPERATION as FORWARD
from flashgen.codegen.problem import Dtype, Mask, Pass, Problem, Sequences
from flashgen.codegen.workload import OPEN, Workload, equal_lengths


@pytest.mark.parametrize(("text", "dtype"), [("bf16", Dtype.BF16), ("bfloat16", Dtype.BF16), ("fp16", Dtype.FP16), ("half", Dtype.FP16)])
def test_dtype_aliases(text: str, dtype: Dtype) -> None:
    assert Dtype.parse(text) is dtype
    assert dtype.bytes == 2


@pytest.mark.parametrize("text", ["fp8", "BF16", ""])
def test_an_unknown_dtype_lists_the_known(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^dtype must be one of bf16, fp16, fp32; got '{text}'$"):
        Dtype.parse(text)


def test_head_dim_v_follows_head_dim() -> None:
    assert Problem(Dtype.BF16, 64).head_dim_v == 64
    assert Problem(Dtype.BF16, 64) == Problem(Dtype.BF16, 64, 64)
    assert dataclasses.replace(Problem(Dtype.BF16, 64), head_dim=128).head_dim_v == 64
    assert Problem(Dtype.BF16, 192, 128).head_dim_v == 128


def test_problem_names_tell_problems_apart() -> None:
    assert Problem(Dtype.BF16, 64, mask=Mask.CAUSAL).name == "bf16_d64_causal"
    assert Problem(Dtype.FP16, 192, 128).name == "fp16_d192x128_full"
    assert Problem(Dtype.BF16, 64, modifiers=("softcap",), sequences=Sequences.PACKED).name == "bf16_d64_full_packed_softcap"
    every = [Problem(t, d, v, m, sequences=s) for t, d, v, m, s in itertools.product(Dtype, (8, 64, 128), (64, 8, 128), Mask, Sequences)]
    assert len({p.name for p in every}) == len(set(every))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 0}, r"^head_dim must be an integer from 1 to 2147483647; got 0$"),
        ({"head_dim": -8}, r"^head_dim must be an integer from 1 to 2147483647; got -8$"),
        ({"head_dim": 64.0}, r"^head_dim must be an integer from 1 to 2147483647; got 64\.0$"),
        ({"head_dim": True}, r"^head_dim must be an integer from 1 to 2147483647; got True$"),
        ({"head_dim_v": 0}, r"^head_dim_v must be an integer from 1 to 2147483647; got 0$"),
        ({"head_dim_v": -1}, r"^head_dim_v must be an integer from 1 to 2147483647; got -1$"),
        ({"dtype": "bf16"}, r"^dtype must be one of .*BF16.*; got 'bf16'$"),
        ({"mask": True}, r"^mask must be one of .*FULL.*CAUSAL.*; got True$"),
        ({"operation": "sideways"}, r"^pass must be one of .*forward.*; got 'sideways'$"),
        ({"operation": 1}, r"^operation must be of type str; got 1"),
        ({"operation": ["softmax"]}, r"^operation must be of type str; got \['softmax'\]"),
        ({"sequences": "packed"}, r"^sequences must be one of .*DENSE.*PACKED.*; got 'packed'$"),
        (
            {"operation": "softmax", "head_dim": 0, "sequences": Sequences.PACKED},
            r"^sequences must be dense for softmax, which is not attention; got packed$",
        ),
        ({"operation": "softmax", "head_dim": -1}, r"^head_dim must be an integer from 0 to 2147483647; got -1$"),
    ],
)
def test_a_problem_refuses(arguments: dict[str, Any], message: str) -> None:
    legal: dict[str, Any] = {"dtype": Dtype.BF16, "head_dim": 64}
    with pytest.raises(ArgumentError, match=message):
        Problem(**(legal | arguments))


def test_problems_are_values() -> None:
    problem = Problem(Dtype.BF16, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.head_dim = 128  # type: ignore[misc]
    assert len({problem, Problem(Dtype.BF16, 64, 64, Mask.FULL, Pass.FORWARD)}) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 1, 1, 1, 1), r"^batch must be an integer from 0 to 2147483647; got -1$"),
        ((1, 1, 1, 2**31, 1), r"^len_q must be an integer from 0 to 2147483647; got 2147483648$"),
        ((1, 1, 1, 1, 1.5), r"^len_kv must be an integer from 0 to 2147483647; got 1\.5$"),
        ((1, 1, 1, 1, 1, OPEN, OPEN, OPEN, -1), r"^tokens_q must be an integer from 0 to 2147483647; got -1$"),
        ((1, 1, 1, 1, 1, OPEN, OPEN, OPEN, 1, 2.0), r"^tokens_kv must be an integer from 0 to 2147483647; got 2\.0$"),
        ((1, 6, 4, 1, 1), r"^heads_q must be a multiple of heads_kv; got heads_q 6, heads_kv 4$"),
        ((1, 6, 0, 1, 1), r"^heads_q must be a multiple of heads_kv; got heads_q 6, heads_kv 0$"),
    ],
)
def test_a_workload_refuses(sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Workload(*sizes)


def test_a_workload_may_be_empty() -> None:
    for sizes in ((0, 8, 8, 16, 16), (1, 0, 0, 16, 16), (1, 8, 8, 0, 16), (1, 8, 8, 16, 0)):
        assert Workload(*sizes).visible_pairs(Mask.FULL) == sizes[3] * sizes[4]


def test_workload_names() -> None:
    assert Workload(4, 32, 8, 4096, 4096).name == "B4 H32/8 S4096"
    assert Workload(1, 32, 32, 1, 4096).name == "B1 H32 S1x4096"
    packed = Workload(16, 32, 8, 8192, 8192, tokens_q=40000, tokens_kv=40000)
    assert packed.name == "B16 H32/8 S8192 T40000"
    assert dataclasses.replace(packed, tokens_q=16, chunk=64).name == "B16 H32/8 S8192 T16x40000 C64"


def test_packed_sequences_count_as_equally_long() -> None:
    packed = Workload(3, 8, 2, 900, 900, tokens_q=100, tokens_kv=900)
    assert equal_lengths(packed) == Workload(3, 8, 2, 34, 300)
    assert equal_lengths(Workload(0, 8, 2, 5, 5, tokens_q=5)) == Workload(0, 8, 2, 5, 0)
    assert equal_lengths(Workload(3, 8, 2, 900, 900)) == Workload(3, 8, 2, 900, 900)
    problem = Problem(Dtype.BF16, 64, sequences=Sequences.PACKED)
    assert FORWARD.flops(problem, packed) == 4 * 3 * 8 * 34 * 300 * 64
    assert FORWARD.io_bytes(problem, packed) == 2 * (2 * 100 * 8 * 64 + 2 * 900 * 2 * 64) + 4 * 2 * 4


def sees(mask: Mask, query: int, key: int, workload: Workload) -> bool:
    return mask is Mask.FULL or key <= query + workload.len_kv - workload.len_q


@pytest.mark.parametrize("mask", Mask)
def test_visible_pairs_against_counting(mask: Mask) -> None:
    for len_q, len_kv in itertools.product(range(9), range(9)):
        workload = Workload(1, 1, 1, len_q, len_kv)
        counted = sum(sees(mask, i, j, workload) for i in range(len_q) for j in range(len_kv))
        assert workload.visible_pairs(mask) == counted, workload.name


def test_flops_follow_the_convention() -> None:
    workload = Workload(2, 8, 2, 100, 300)
    assert FORWARD.flops(Problem(Dtype.BF16, 64), workload) == 4 * 2 * 8 * 100 * 300 * 64
    assert FORWARD.flops(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), workload) == 2 * 2 * 8 * 100 * 300 * 64
    mixed = Problem(Dtype.BF16, 192, 128)
    assert FORWARD.flops(mixed, workload) == 2 * 2 * 8 * 100 * 300 * (192 + 128)
    assert BACKWARD.flops(mixed, workload) == 2.5 * FORWARD.flops(mixed, workload), "not of each product's own width"


def test_what_the_memory_moves_at_least() -> None:
    workload = Workload(2, 8, 2, 100, 300)
    rows, keys = 2 * 8 * 100, 2 * 2 * 300
    assert FORWARD.io_bytes(Problem(Dtype.BF16, 192, 128), workload) == 2 * (rows * 192 + keys * 192 + keys * 128 + rows * 128)
