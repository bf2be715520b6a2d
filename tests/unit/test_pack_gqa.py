"""Configs whose tiles hold several query heads of a group: tried where they save tiles, and kept from workloads that they cannot take."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.gpu.driver import Gpu
from flashgen.cells import cells_of
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.records.choice import choose
from flashgen.selection import loaded, ranking
from flashgen.selection.ranking import shortlist
from flashgen.tuning.request import Request, dry_run
from flashgen.verification import debug
from flashgen.verification.cases import SHAPES
from flashgen.verification.screen import Screen
from tests.support.made_records import make

H200, SM90 = find_device("h200"), find_family("attention_forward_sm90")
PROBLEM = Problem(Dtype.BF16, 128)
PACKED = AttentionForwardSm90Config(2, 128, ping_pong=False, pack_gqa=8)
PACKED_SPEC = KernelSpec(SM90, PROBLEM, PACKED, H200.target)
TOOLCHAIN = ("13.0", "13.0")


def grouped(group: int, len_q: int, batch: int = 4) -> Workload:
    return Workload(batch, 4 * group, 4, len_q, 8192)


@pytest.mark.parametrize(
    ("workload", "packed"),
    [
        (grouped(8, 8192), {1}),
        (grouped(8, 1), {1, 2, 4, 8}),
        (grouped(6, 1), {1, 2}),
        (grouped(1, 1), {1}),
        (grouped(16, 64), {1, 2, 8}),  # 2 heads fill 128 rows, and 2 of 3 parts of 192 rows; 8 heads nearly fill three tiles of 192
    ],
)
def test_heads_are_packed_where_that_saves_tiles(workload: Workload, packed: set[int]) -> None:
    ranked = ranking.ranked(PROBLEM, workload, H200, [SM90])
    assert {SM90.group_unit(c.config) for c in ranked} == packed
    assert {dataclasses.replace(c.config, pack_gqa=1) for c in ranked} == {c.config for c in ranked if SM90.group_unit(c.config) == 1}  # type: ignore[call-arg]


def test_the_model_packs_short_queries() -> None:
    short, long = (shortlist(PROBLEM, grouped(16, n, batch=16), H200, 1, [SM90])[0] for n in (1, 4096))
    assert SM90.group_unit(short.config) == 16
    assert SM90.group_unit(long.config) == 1


def test_a_record_speaks_for_workloads_that_its_kernel_takes() -> None:
    best = make(1e-3, grouped(16, 64), problem=PROBLEM, spec=PACKED_SPEC.to_json())
    plain_spec = KernelSpec(SM90, PROBLEM, dataclasses.replace(PACKED, pack_gqa=1), H200.target)
    plain = make(2e-3, grouped(16, 32), problem=PROBLEM, spec=plain_spec.to_json())
    fastest: Any = {record.key.workload: {TOOLCHAIN: record} for record in (best, plain)}
    for group, expected in ((16, best), (24, best), (12, plain), (20, plain)):
        choice = choose(fastest, grouped(group, 60), TOOLCHAIN)
        assert choice is not None
        assert choice.record is expected, group
    del fastest[plain.key.workload]
    assert choose(fastest, grouped(12, 60), TOOLCHAIN) is None


def test_an_imported_kernel_is_left_out_where_it_does_not_fit() -> None:
    gpu = Gpu(0, H200, "uuid", "13.0")
    kernel: Any = SimpleNamespace(spec=PACKED_SPEC, gpu=gpu)
    try:
        loaded.imports.add(kernel)
        assert loaded.imports.find(PROBLEM, grouped(16, 60), gpu) is kernel
        assert loaded.imports.find(PROBLEM, grouped(12, 60), gpu) is None
    finally:
        loaded.imports.clear()


def test_heads_that_do_not_fit_are_refused() -> None:
    message = "config w2_bk128.* cannot take .*: pack_gqa must divide the 12 query heads of a key/value head; got 8"
    with pytest.raises(ArgumentError, match=message):
        SM90.require_workload(PACKED, grouped(12, 60))
    tensors = Tensors.random(PROBLEM, Workload(1, 12, 1, 5, 5), torch.Generator())
    with pytest.raises(ArgumentError, match=message):
        debug.run_blocks(PACKED_SPEC, tensors)
    by_hand = Request(cells_of(128, causal=False, seqlens=[64], batch=1, heads=12, kv_heads=1), settings={"pack_gqa": "8"})
    with pytest.raises(ArgumentError, match="pack_gqa must divide the 12 query heads"):
        dry_run(by_hand, H200)
    refused = dry_run(dataclasses.replace(by_hand, settings={}), H200)["cells"][0]["refused"]
    assert refused[PACKED.name] == ["pack_gqa must divide the 12 query heads of a key/value head; got 8"]


def test_verification_has_groups_for_every_config() -> None:
    screen = Screen(Problem(Dtype.BF16, 8), "cpu", [shape for shape in SHAPES if shape[3] < 200])
    for packed in (1, 8):
        workloads = [case.workload for case in screen.cases(packed)]
        assert all(w.heads_q // w.heads_kv % packed == 0 for w in workloads)
        assert [(w.batch, w.heads_kv, w.len_q, w.len_kv) for w in workloads] == [(b, h, q, kv) for b, _, h, q, kv in screen.shapes]
    assert {case.workload.heads_q // case.workload.heads_kv for case in screen.cases(1)} == {1, 2, 8}
