"""Which kernel a call gets: buckets, ranking, the default."""

from __future__ import annotations

import pytest

from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from flashgen.selection import ranking
from flashgen.selection.families import default_spec, families_for

H200 = find_device("h200")


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (Workload(1, 16, 16, 1000, 1025), Workload(1, 16, 16, 1024, 2048)),
        (Workload(3, 32, 8, 1, 1), Workload(1, 128, 32, 1, 1)),
        (Workload(2, 4, 4, 512, 0), Workload(1, 8, 8, 512, 1)),
        (Workload(1, 3, 3, 4096, 4097), Workload(1, 4, 4, 4096, 8192)),
        (Workload(2**21, 7 * 2**9, 2**9, 2**31 - 1, 1), Workload(1, (2**31 - 1) // 7 * 7, (2**31 - 1) // 7, 2**31 - 1, 1)),
    ],
)
def test_bucket(workload: Workload, expected: Workload) -> None:
    assert bucket(workload) == expected


def test_neighbouring_lengths_share_a_bucket() -> None:
    buckets = {bucket(Workload(1, 8, 8, length, length)) for length in range(1, 4097)}
    assert len(buckets) == 13


def test_ranking_is_complete_sorted_and_repeatable() -> None:
    problem, workload = Problem(Dtype.BF16, 64), Workload(4, 32, 32, 4096, 4096)
    ranked = ranking.ranked(problem, workload, H200)
    able = families_for(problem, H200.target)
    legal = {(f, config) for f in able for config in f.legal_configs(problem, H200.target)}
    assert {(c.family, c.config) for c in ranked} == {(f, config) for f, config in legal if f.group_unit(config) == 1}
    assert ranking.ranked(problem, workload, H200, able[:1]) == [c for c in ranked if c.family is able[0]]
    assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked)
    assert ranked == ranking.ranked(problem, workload, H200)
    assert all(c.seconds > 0 and c.bound_by for c in ranked)


@pytest.mark.parametrize("mask", list(Mask))
def test_the_model_is_in_the_right_range(mask: Mask) -> None:
    """What an H200 reaches with either family, in TFLOP/s; a model that is off by half would rank by accident."""
    problem, workload = Problem(Dtype.BF16, 128, mask=mask), Workload(4, 16, 16, 4096, 4096)
    for family, low, high in (("attention_forward", 150, 600), ("attention_forward_sm90", 500, 900)):
        best = ranking.ranked(problem, workload, H200, [find_family(family)])[0]
        assert low < operation_of(problem).flops(problem, workload) / best.seconds / 1e12 < high


def test_a_longer_workload_takes_longer() -> None:
    problem = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL)
    times = [ranking.ranked(problem, Workload(1, 32, 32, length, length), H200)[0].seconds for length in (256, 1024, 4096, 16384)]
    assert times == sorted(times)


def test_an_impossible_problem_is_refused_with_the_nearest_possible_one() -> None:
    with pytest.raises(ArgumentError, match=r"^head_dim must be a multiple of 8 from 8 to 256; got 100 \(nearest: 104\)"):
        default_spec(Problem(Dtype.BF16, 100, 64), find_target("sm_80"))
