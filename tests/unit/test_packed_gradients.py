"""Gradients of packed sequences in codegen and in the oracle: what is refused, that launches follow from sizes alone, and each sequence by
itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_backward_persistent_sm90.config import AttentionBackwardPersistentSm90Config
from flashgen.codegen.family import find_family
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import MODIFIERS
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.oracle import oracle_of
from flashgen.numerics.sequences import sequences_of
from flashgen.selection.picks import picked_spec
from flashgen.verification.expected import Expected

PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, operation="backward", sequences=Sequences.PACKED)
WORKLOAD = Workload(16, 32, 8, 4096, 4096, tokens_q=20000, tokens_kv=30000)
H200 = find_device("h200")
GENERIC, HOPPER, PERSISTENT = (find_family(f"attention_backward{name}") for name in ("", "_sm90", "_persistent_sm90"))
FAMILIES = pytest.mark.parametrize("family", [GENERIC, HOPPER, PERSISTENT], ids=lambda family: family.name)
OF_TENSOR_COPIES = pytest.mark.parametrize("family", [HOPPER, PERSISTENT], ids=lambda family: family.name)


def call(workload: Workload = WORKLOAD, **strides: tuple[int, ...]) -> Call:
    return attention_call(PROBLEM, workload, strides)


@FAMILIES
def test_modifiers_that_know_more_than_their_sequence_are_refused(family: Any) -> None:
    taken = {name for name in MODIFIERS if name in family.modifiers}
    if family is PERSISTENT:
        taken -= {"traced"}  # without registers for it: see test_backward_sm90.py
    for name in TAKEN_BY_MOST:
        assert bool(family.refusals(replace(PROBLEM, modifiers=(name,)), H200.target)) == (name not in taken), name


@pytest.mark.parametrize("name", ["attention_backward_wide_sm90", "attention_backward_pair_sm90", "flash2_backward"])
def test_other_families_refuse(name: str) -> None:
    wide = replace(PROBLEM, head_dim=256, head_dim_v=256)
    assert "sequences must be dense in these kernels; got packed" in find_family(name).refusals(wide, H200.target)


@OF_TENSOR_COPIES
@pytest.mark.parametrize(
    ("sizes", "strides", "reason"),
    [
        ({"tokens_kv": 0}, {}, "tokens_kv must be at least 1 for tensor copies; got 0"),
        ({"tokens_q": 0}, {}, "tokens_q must be at least 1 for tensor copies; got 0"),
        ({"tokens_q": 2**30 + 1}, {}, f"tokens_q must be at most {2**30} with packed sequences; got {2**30 + 1}"),
        ({}, {"d_v": (2**33, 64, 1)}, f"strides of rows of d_v must be below {2**33} elements with packed sequences; got {2**33}"),
        ({}, {"d_out": (2048, 2**39, 1)}, f"strides of heads of d_out must be below {2**39} elements with packed sequences; got {2**39}"),
        ({"batch": 2**23 + 1}, {}, f"batch must be at most {2**23} for gradients of packed sequences; got {2**23 + 1}"),
        ({"tokens_q": 2**30, "heads_q": 2**8}, {}, "query tiles of all heads must be at most 2147483647; got"),
        ({"tokens_kv": 2**30, "heads_q": 2**7, "heads_kv": 2**7}, {}, "key tiles of all heads must be at most 2147483647; got"),
    ],
)
def test_calls_are_refused(family: Any, sizes: dict[str, int], strides: dict[str, tuple[int, ...]], reason: str) -> None:
    found = family.call_refusals(call(replace(WORKLOAD, **sizes), **strides))
    assert any(one.startswith(reason) for one in found), found
    assert not family.call_refusals(call())


@FAMILIES
def test_launches_follow_from_how_many_sequences_and_tokens_there_are(family: Any) -> None:
    config = family.default(PROBLEM, H200.target)
    program = family.program(config, call(), H200)
    block_kv = getattr(config, "block_kv", 128)
    query_tiles, key_tiles = 20000 // config.block_q + 16, 30000 // block_kv + 16
    sizes = {buffer.name: buffer.bytes for buffer in program.buffers}
    assert sizes["work_list"], sizes["query_list"] == ((key_tiles + 1) * 32, (query_tiles + 1) * 32)
    assert sizes["d_q_sum"] == 32 * query_tiles * config.block_q * 64 * 4
    launches = {launch.suffix: launch for launch in program.launches}
    assert next(iter(launches)) == "_sequences"
    assert launches["_sequences"].grid == 1 + min(131, 30000 // 256)
    assert launches["_preprocess"].grid == 32 * query_tiles
    assert launches[""].grid == (132 if family is PERSISTENT else key_tiles * 8)
    assert [launch.overlaps for launch in program.launches] == [False, *[family is not GENERIC] * (len(launches) - 1)]
    for launch in program.launches:
        assert {"len_q", "len_kv", "key_tiles"}.isdisjoint(launch.values)


@FAMILIES
def test_no_sequences_at_all(family: Any) -> None:
    config = family.default(PROBLEM, H200.target)
    program = family.program(config, call(replace(WORKLOAD, batch=0, tokens_q=1, tokens_kv=1)), H200)
    assert all(launch.grid > 0 for launch in program.launches)


@pytest.mark.parametrize("mask", Mask)
def test_neighbouring_heads_share_the_l2_with_and_without_a_mask(mask: Mask) -> None:
    """Else one head of all sequences would come before the next head."""
    problem = replace(PROBLEM, mask=mask)
    found = set()
    for length in (64, 4000, 10**6):
        program = HOPPER.program(
            HOPPER.default(problem, H200.target), call(replace(WORKLOAD, len_q=length))._replace(problem=problem), H200
        )
        heads = {launch.values["l2_group_heads"] for launch in program.launches if "l2_group_heads" in launch.values}
        assert len(heads) == 1
        found |= heads
    assert all(8 % heads == 0 for heads in found)
    assert len(found) > 1


def test_the_widest_tiles_leave_no_registers_for_rows_of_sequences() -> None:
    wide = replace(PROBLEM, head_dim=128, head_dim_v=128)
    config = AttentionBackwardPersistentSm90Config(80, 2, 4)
    (reason,) = PERSISTENT.check(wide, config, H200.target)
    assert reason.startswith("block_q must be lower with packed sequences")
    assert not PERSISTENT.check(wide, PERSISTENT.adapted(wide, config), H200.target)
    (reason,) = PERSISTENT.refusals(replace(wide, modifiers=("softcap",)), H200.target)
    assert reason.startswith("accumulators of 64 queries need")
    dense = replace(wide, sequences=Sequences.DENSE)
    assert not PERSISTENT.check(dense, config, H200.target)
    assert PERSISTENT.adapted(dense, config) is config


@pytest.mark.parametrize("length", [512, 2048, 8192])
@pytest.mark.parametrize("width", [64, 128])
def test_records_of_dense_sequences_speak_for_packed_ones(width: int, length: int) -> None:
    problem, heads, batch = replace(PROBLEM, head_dim=width, head_dim_v=width), 2048 // width, 16384 // length
    dense = replace(problem, sequences=Sequences.DENSE)
    packed = Workload(batch, heads, heads, 16384, 16384, tokens_q=16384, tokens_kv=16384)
    expected = picked_spec(dense, Workload(batch, heads, heads, length, length), H200, ("", ""), None)
    found = picked_spec(problem, packed, H200, ("", ""), None)
    assert found.family is expected.family is PERSISTENT
    assert found.config == PERSISTENT.adapted(problem, expected.config)


SMALL = Workload(6, 4, 2, 100, 150, tokens_q=300, tokens_kv=401)
SCALARS = {"scale": 0.3, "softcap": 2.0, "dropout_p": 0.3}


def drawn(problem: Problem) -> Tensors:
    return Tensors.random(problem, SMALL, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("method", "modifiers"), [("exact", ()), ("exact", ("alibi", "dropout", "prefix_len")), ("plain", ("dropout",))])
def test_the_oracle_takes_each_sequence_by_itself(method: str, modifiers: tuple[str, ...]) -> None:
    problem = replace(PROBLEM, head_dim=16, head_dim_v=24, modifiers=modifiers)
    dense, tensors, oracle = replace(problem, sequences=Sequences.DENSE), drawn(problem), oracle_of(problem)
    oracle.derive(problem, tensors, SCALARS)
    found = getattr(oracle, method)(problem, tensors, SCALARS)
    inside = {name: torch.zeros(len(found[name]), dtype=torch.bool) for name in found}
    for one in sequences_of(tensors):
        rows = {"q": one.queries, "out": one.queries, "d_out": one.queries, "k": one.keys, "v": one.keys}
        # A batch of as many, of which the last one is the sequence: dropout counts the entries before.
        alone = {name: torch.stack([tensors[name][own]] * (one.number + 1)) for name, own in rows.items()}
        alone |= {name: torch.stack([tensors[name][:, one.queries]] * (one.number + 1)) for name in ("lse", "d_lse")}
        alone |= {name: tensors[name] for name in ("alibi_slopes", "dropout_seed", "prefix_len") if name in tensors}
        of_batch = getattr(oracle, method)(dense, alone, SCALARS)
        for name, own in (("d_q", one.queries), ("d_k", one.keys), ("d_v", one.keys)):
            torch.testing.assert_close(found[name][own], of_batch[name][-1], rtol=0, atol=0)
            inside[name][own] = True
    for name, gradient in found.items():
        assert not inside[name].all()
        assert not gradient[~inside[name]].any()


@pytest.mark.parametrize("method", ["exact", "plain"])
def test_a_sample_is_a_part_of_the_whole(method: str) -> None:
    problem = replace(PROBLEM, head_dim=16, head_dim_v=16, modifiers=("alibi",))
    tensors, oracle = drawn(problem), oracle_of(problem)
    sample = oracle.sample(problem, SMALL, 40, seed=1)
    assert sample[:, 2].max() == 400
    whole, part = (getattr(oracle, method)(problem, tensors, SCALARS, of) for of in (None, sample))
    for name, tensor in oracle.sampled(whole, sample).items():
        torch.testing.assert_close(part[name], tensor, rtol=0, atol=0)


def test_rows_are_those_that_a_gradient_was_written_in() -> None:
    touched = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in drawn(PROBLEM).outputs.items()}
    touched["d_q"][7, 3, 1], touched["d_v"][9, 1, 0] = True, True
    assert oracle_of(PROBLEM).rows_of(touched).tolist() == [[0, 2, 9], [0, 3, 7]]


def test_gradients_of_keys_outside_must_be_exactly_0() -> None:
    tensors = drawn(PROBLEM)
    expected = Expected.of(tensors)
    for name, tensor in tensors.outputs.items():
        tensor.copy_(expected.plain[name])
    assert expected.judge(tensors).ok
    outside = sequences_of(tensors)[0].keys.stop
    tensors["d_k"][outside, 0, 0] = 1e-30
    assert "not 0 in 1 rows" in expected.judge(tensors).message
