"""Gradients of packed sequences: the kernels of every family that computes them, in the emulator, by the numerics rule. What is in no
sequence is NaN, and what the device says of them may be wrong; faults that show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from flashgen.build.emulator.kernel import ORDERS, EmulationOrder
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig
from flashgen.codegen.families.attention_backward_persistent_sm90.config import AttentionBackwardPersistentSm90Config
from flashgen.codegen.families.attention_backward_sm90.config import AttentionBackwardSm90Config
from flashgen.codegen.modifier import reads_scores, with_sizes_to_verify
from flashgen.codegen.modifiers.traced import learnable_tensors, name_of_functions
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Mask, Sequences
from flashgen.codegen.program import BufferKind, Program
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu, view_of
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.numerics.sequences import sequences_of
from flashgen.traced.modifier import modifier_in_call
from flashgen.verification.expected import Expected
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_cases, planned_faults, why_caught
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

Packed = partial(NamedKernel, sequences=Sequences.PACKED)
GENERIC = AttentionBackwardConfig(64, 64, 32, 4, 1, 16, 2)
HOPPER, PERSISTENT = AttentionBackwardSm90Config(64), AttentionBackwardPersistentSm90Config(64, 2, 2)
OTHERS = ("alibi", "dropout", "prefix_len")
# A score_mod that differs by sequence and head, one of the distance from query to key, and one by which a score has a derivative.
TABLE = torch.zeros(2, 2, dtype=torch.bfloat16)
BY_SEQUENCE = name_of_functions(
    modifier_in_call(lambda score, batch, head, query, key: score + (key % 3 * head - query % 4 + batch % 5) * 0.25).modifier
)
BY_DISTANCE = name_of_functions(
    modifier_in_call(lambda score, batch, head, query, key: score + TABLE[query - key + 25, head] * 3.0).modifier
)
BENT = name_of_functions(modifier_in_call(lambda score, batch, head, query, key: torch.sin(score) * (1 + query % 3)).modifier)
# Whose captured tensors have gradients: beside a score that is bent, and where they are added.
_LEARNS_BENT, _LEARNS_ADDED = (
    modifier_in_call(score_mod).modifier
    for score_mod in (
        lambda score, batch, head, query, key: torch.sin(score * TABLE[head, (query - key) % 2]) + TABLE[batch % 2, 0],
        lambda score, batch, head, query, key: score + TABLE[(query + batch) % 2, key % 2],
    )
)
LEARNS_BENT, LEARNS_ADDED = (name_of_functions(one, learnable_tensors(one)) for one in (_LEARNS_BENT, _LEARNS_ADDED))
# Masks that leave some tiles: of documents, or all beside them, by sequence, and one that differs by head.
BY_DOCUMENTS = name_of_functions(
    modifier_in_call(None, lambda batch, head, query, key: (query // 70 == key // 70) ^ (batch % 2 == 1)).modifier
)
BY_HEAD = name_of_functions(
    modifier_in_call(None, lambda batch, head, query, key: (query + head * 40 >= key) & (key % 5 != batch % 5)).modifier
)
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default.
KERNELS = {
    "generic": Packed("attention_backward", 64, Mask.CAUSAL, False, (), GENERIC),
    "generic-wide": Packed("attention_backward", 72, Mask.FULL, False, (), AttentionBackwardConfig(32, 32, 16, 4, 2, 16, 1)),
    "generic-ordered": Packed("attention_backward", 64, Mask.CAUSAL, True, ("softcap", "window"), GENERIC),
    "generic-others": Packed("attention_backward", 64, Mask.FULL, False, OTHERS, GENERIC),
    "sm90": Packed("attention_backward_sm90", 64, Mask.CAUSAL, False, (), HOPPER),
    "sm90-wide": Packed("attention_backward_sm90", 128, Mask.FULL, False, ("chunk",), AttentionBackwardSm90Config(80)),
    "sm90-ordered": Packed("attention_backward_sm90", 72, Mask.CAUSAL, True, ()),
    "sm90-others": Packed("attention_backward_sm90", 64, Mask.FULL, False, OTHERS, HOPPER),
    "persistent": Packed("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, (), PERSISTENT),
    "persistent-wide": Packed("attention_backward_persistent_sm90", 128, Mask.FULL, False, ("alibi",), PERSISTENT),
    "generic-sinks": Packed("attention_backward", 64, Mask.CAUSAL, True, ("sinks", "window"), GENERIC),
    "sm90-sinks": Packed("attention_backward_sm90", 64, Mask.FULL, False, ("sinks",), HOPPER),
    "persistent-sinks": Packed("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("sinks",), PERSISTENT),
    "generic-traced": Packed("attention_backward", 64, Mask.FULL, False, (BENT,), GENERIC),
    "generic-by-sequence": Packed("attention_backward", 64, Mask.CAUSAL, True, (BY_SEQUENCE,), GENERIC),
    "sm90-by-sequence": Packed("attention_backward_sm90", 64, Mask.FULL, False, (BY_SEQUENCE,), HOPPER),
    "sm90-distances": Packed("attention_backward_sm90", 64, Mask.CAUSAL, True, (BY_DISTANCE,), AttentionBackwardSm90Config(32)),
    "generic-learned": Packed("attention_backward", 64, Mask.CAUSAL, False, (LEARNS_BENT,), GENERIC),
    "sm90-learned": Packed("attention_backward_sm90", 64, Mask.FULL, False, (LEARNS_ADDED, "sinks"), AttentionBackwardSm90Config(32)),
    "generic-masked": Packed("attention_backward", 64, Mask.CAUSAL, False, (BY_HEAD,), GENERIC),
    "generic-documents": Packed("attention_backward", 64, Mask.FULL, True, (BY_DOCUMENTS,), GENERIC),
    "sm90-masked": Packed("attention_backward_sm90", 64, Mask.CAUSAL, False, (BY_HEAD,), HOPPER),
    "sm90-documents": Packed("attention_backward_sm90", 64, Mask.FULL, True, (BY_DOCUMENTS,), HOPPER),
    "generic-mask": Packed("attention_backward", 64, Mask.CAUSAL, True, ("boolean_mask",), GENERIC),
    "generic-bias": Packed("attention_backward", 64, Mask.FULL, True, ("bias",), GENERIC),
    "generic-bias-and-mask": Packed("attention_backward", 64, Mask.FULL, False, ("bias_fp32", "boolean_mask", "softcap"), GENERIC),
    "sm90-mask": Packed("attention_backward_sm90", 64, Mask.FULL, False, ("boolean_mask",), HOPPER),
    "sm90-bias": Packed("attention_backward_sm90", 64, Mask.CAUSAL, False, ("bias",), HOPPER),
    "sm90-bias-and-mask": Packed(
        "attention_backward_sm90", 64, Mask.FULL, True, ("bias_fp32", "boolean_mask"), AttentionBackwardSm90Config(32)
    ),
    "persistent-bias": Packed("attention_backward_persistent_sm90", 64, Mask.FULL, False, ("bias",), PERSISTENT),
    "persistent-mask": Packed("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, ("bias_fp32", "boolean_mask"), PERSISTENT),
    "persistent-window": Packed("attention_backward_persistent_sm90", 72, Mask.CAUSAL, False, ("prefix_len", "window")),
}
FIRST = ("generic", "sm90", "persistent")
Lengths = tuple[Sequence[int], Sequence[int]]
FEW: Lengths = ([0, 1, 65, 200, 0, 129, 33], [5, 1, 64, 333, 70, 0, 333])
ALONE: Lengths = ([260], [300])
NONE: Lengths = ([0, 0], [3, 0])
MANY: Lengths = ([n % 4 for n in range(530)], [n % 7 % 4 for n in range(530)])  # more than a block has threads
LENGTHS = {"few": FEW, "alone": ALONE, "none": NONE, "many": MANY}
EACH = [*((kernel, "few") for kernel in KERNELS), *itertools.product(FIRST, ("alone", "none")), ("generic", "many")]
SM_COUNT = 3  # so that blocks of persistent kernels have several tiles


def judged(spec: KernelSpec, text: Source, tensors: Tensors) -> Verdict:
    """What the rule says of the kernel with that text on a GPU of few SMs."""
    tensors.poison()
    device = replace(device_of_target(spec.target), sm_count=SM_COUNT)
    given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}
    program = spec.family.program(spec.config, tensors.call(), device)
    emulated_kernel(spec, text).launch(program, given, EmulationOrder(), limits=LIMITS)
    return Expected.of(tensors).judge(tensors)


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    """Of sequences behind three tokens that are in none."""
    return torch.tensor([3, *lengths], dtype=torch.int32).cumsum(0).int()


def drawn(spec: KernelSpec, lengths: Lengths, unused: bool = True, heads: int = 4) -> Tensors:
    """Sequences of these lengths, of which a part is used alone, between other tokens. The lengths that are expected are too short."""
    ends = [boundaries(side) for side in lengths]
    # Tensors of which each score has an element end before the longest sequences do.
    len_q, len_kv = (max(2, max(side) * 3 // 4 // 8 * 8) if reads_scores(spec.problem) else 7 for side in lengths)
    workload = Workload(len(lengths[0]), heads, 2, len_q, len_kv, tokens_q=int(ends[0][-1]) + 4, tokens_kv=int(ends[1][-1]) + 5)
    tensors = Tensors.random(spec.problem, with_sizes_to_verify(spec.problem, workload, 1), torch.Generator().manual_seed(5)).apart()
    for side, own, ending in zip(("q", "kv"), lengths, ends, strict=True):
        tensors[f"cu_seqlens_{side}"].copy_(ending)
        used = [max(0, n - 5 * (unused and i % 3 == 2)) for i, n in enumerate(own)]
        tensors[f"seqused_{side}"].copy_(torch.tensor(used, dtype=torch.int32))
    return poisoned(tensors)


def poisoned(tensors: Tensors) -> Tensors:
    """What follows from the inputs, and then NaN where no sequence is."""
    tensors.derive()
    sequences = sequences_of(tensors)
    for names, of in ((("q", "out", "d_out"), "queries"), (("k", "v"), "keys")):
        outside = torch.ones(len(tensors[names[0]]), dtype=torch.bool)
        for one in sequences:
            outside[getattr(one, of)] = False
        for name in names:
            tensors[name][outside] = torch.nan
        for one in sequences if of == "keys" and "bias" in tensors else ():
            queries, keys = one.queries.stop - one.queries.start, one.keys.stop - one.keys.start
            tensors["bias"][one.number, :, queries:] = tensors["bias"][one.number, ..., keys:] = torch.nan
        if of == "queries":
            for name in ("lse", "d_lse"):
                if name in tensors:
                    tensors[name][:, outside] = torch.nan
    return tensors


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    planned_cases(EACH, KERNELS, 2.0),
)
def test_gradients_of_each_sequence_are_those_of_its_own(kernel: str, lengths: str) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, LENGTHS[lengths]))
    assert verdict.ok, verdict.message


@pytest.mark.slow
@pytest.mark.parametrize("kernel", planned_cases([(name,) for name in (*FIRST, "generic-ordered", "sm90-ordered")], KERNELS, 4.0))
def test_all_orders_and_what_a_call_may_leave_out(kernel: str) -> None:
    spec = KERNELS[kernel].spec()
    tensors, loaded = drawn(spec, FEW, unused=False, heads=2).without_optional_inputs(), emulated_kernel(spec)
    assert "seqused_q" not in tensors
    expected, found = Expected.of(tensors), []
    for order in ORDERS:
        run_on_cpu(loaded, tensors, interleaving=order, limits=LIMITS)
        assert expected.judge(tensors).ok, order
        found.append(tensors["d_q"].clone())
    if spec.problem.deterministic:
        assert all(torch.equal(one, found[0]) for one in found[1:])


def wrong(kind: str, tensors: Tensors) -> None:
    """What is said of the sequences becomes wrong."""
    generator = torch.Generator().manual_seed(2)
    for side in ("q", "kv"):
        ends, used = tensors[f"cu_seqlens_{side}"], tensors[f"seqused_{side}"]
        match kind:
            case "random":
                ends.copy_(torch.randint(-100, 1000, ends.shape, generator=generator))
                used.copy_(torch.randint(-100, 1000, used.shape, generator=generator))
            case "falling":
                ends.copy_(ends.flip(0))
            case "far":
                ends[1::2] = 2**31 - 1
                used[:] = 2**31 - 1


@pytest.mark.parametrize(
    ("kernel", "kind", "lengths"), planned_cases(itertools.product(FIRST, ("random", "falling", "far"), ("few", "many")), KERNELS, 2.0)
)
def test_what_the_device_says_wrongly_touches_nothing_outside(kernel: str, kind: str, lengths: str) -> None:
    """The emulator has pages that nobody may touch around every tensor, and looks for writes beside outputs."""
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, LENGTHS[lengths])
    for name in ("q", "k", "v", "d_out", "d_lse"):
        tensors[name].nan_to_num_(0.25)
    wrong(kind, tensors)
    verdict = judged(spec, emulated_text(spec), poisoned(tensors))
    assert verdict.ok, verdict.message


def lists(kernel: str, lengths: Lengths) -> tuple[Tensors, dict[str, list[list[int]]]]:
    """What the first launch lists: of each list its tiles."""
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, lengths)
    program = spec.family.program(spec.config, tensors.call(), device_of_target(spec.target))
    own = [one for one in program.buffers if one.kind is not BufferKind.STREAM_COUNTER]
    buffers = {one.name: torch.full((one.bytes // 4,), -1, dtype=torch.int32) for one in own}
    given = {operand.name: view_of(operand.name, tensors[operand.name], writable=True) for operand in tensors.operands}
    given |= {name: view_of(name, memory, writable=True) for name, memory in buffers.items()}
    emulated_kernel(spec).launch(Program(program.launches[:1]), given, EmulationOrder(), limits=LIMITS)
    found = {}
    for name in ("work_list", "query_list"):
        head, *tiles = buffers[name].reshape(-1, 8).tolist()
        found[name] = tiles[: head[0]]
    return tensors, found


@pytest.mark.parametrize(
    ("kernel", "lengths"), planned_cases(itertools.product(("generic", "generic-ordered", "persistent"), LENGTHS), KERNELS, 1.0)
)
def test_lists_have_every_tile_once_and_the_longest_sequence_last(kernel: str, lengths: str) -> None:
    tensors, found = lists(kernel, LENGTHS[lengths])
    spec = KERNELS[kernel].spec()
    sizes = {"work_list": ("keys", getattr(spec.config, "block_kv", 128)), "query_list": ("queries", getattr(spec.config, "block_q", 0))}
    sequences = sequences_of(tensors)
    for name, (side, rows) in sizes.items():
        expected = {
            (one.number, first) for one in sequences for first in range(0, getattr(one, side).stop - getattr(one, side).start, rows)
        }
        listed = [(batch, first) for batch, first, *_ in found[name]]
        assert len(listed) == len(set(listed))
        assert set(listed) == expected
        for number, _, _, _, *own in found[name]:
            queries, keys = sequences[number].queries, sequences[number].keys
            assert own == [queries.start, queries.stop - queries.start, keys.start, keys.stop - keys.start]
        lengths_q = [tile[5] // 128 for tile in found[name]]  # of one class at least: they may differ by an eighth
        assert lengths_q == sorted(lengths_q)
    firsts = [first for number, first, *_ in found["work_list"] if number == 3]
    assert firsts == sorted(firsts, reverse=not spec.problem.deterministic), "the first keys of a sequence are handed out first"


_PLACE = "rows.first_q / kBlockQ + batch;"
_ROWS = "tile.rows.first_q / kBlockQ + tile.batch"
FAULTS = [
    fault_of("sums-of-the-next-sequence", _PLACE, "rows.first_q / kBlockQ + batch + 1;", "generic"),
    fault_of("sums-shared-with-the-sequence-before", _PLACE, "rows.first_q / kBlockQ;", "generic"),
    fault_of("sums-of-the-next-sequence", _ROWS, f"{_ROWS} + 1", "sm90"),
    fault_of("sums-of-another-head", "static_cast<i64>(current_head) * p.query_tiles", "static_cast<i64>(0) * p.query_tiles", "sm90"),
    fault_of("sums-of-another-head", "static_cast<i64>(head(work, p)) * p.query_tiles", "0 * p.query_tiles", "persistent"),
    fault_of("delta-of-the-first-sequence", "* tokens_q + rows.first_q;", "* tokens_q;", "generic"),
    fault_of("delta-of-the-first-sequence", "* tokens_q + rows.first_q;", "* tokens_q;", "persistent"),
    fault_of("tail-of-the-neighbours-queries", "kMapRows - len_q + query;", "kMapRows - len_q + query - 64;", "sm90"),
    fault_of("tail-of-the-neighbours-keys", "kMapRows - len_kv + key;", "kMapRows - len_kv + key - 64;", "persistent"),
    fault_of("keys-of-the-row-before", "first_kv + len_kv; }", "first_kv + len_kv - 1; }", "sm90"),
    fault_of("keys-of-the-queries-rows", "(rows.first_kv + row) *", "(rows.first_q + row) *", "generic"),
    fault_of("last-keys-not-listed", "(rows.len_kv + kRows - 1) / kRows", "rows.len_kv / kRows", "generic"),
    fault_of("last-queries-not-listed", "(rows.len_q + kRows - 1) / kRows", "rows.len_q / kRows", "persistent"),
    fault_of("first-keys-not-listed", "kFirstLast ? tiles - 1 - index : index", "kFirstLast ? tiles - index : index", "sm90"),
    fault_of(
        "rows-of-queries-not-cleared",
        "[&](int row) { clear_row<kHeadDim>(p.d_q, p.d_q_row, p.d_q_head, p.heads_q, row); });",
        "[&](int row) {});",
        "generic",
    ),
    fault_of("rows-of-keys-not-cleared", "clear_row<kHeadDim>(p.d_k, p.d_k_row, p.d_k_head, p.heads_kv, row);", "", "sm90"),
    fault_of("rows-of-values-not-cleared", "clear_row<kHeadDimV>(p.d_v, p.d_v_row, p.d_v_head, p.heads_kv, row);", "", "generic"),
    fault_of("some-heads-not-cleared", "p.d_k_head, p.heads_kv, row", "p.d_k_head, 1, row", "persistent"),
    fault_of("no-wait-for-the-list", "griddepcontrol_wait();  // for the list\n    const WorkList list", "const WorkList list", "sm90"),
    fault_of(
        "no-wait-for-the-list",
        "griddepcontrol_wait();  // for the list\n        const int work_tiles",
        "const int work_tiles",
        "persistent",
    ),
    fault_of("sums-not-zeroed", "write_zeros<kThreads, kSums>(p.d_q_sum", "write_zeros<kThreads, kSums / 2>(p.d_q_sum", "sm90"),
    fault_of("one-claim-too-few", "claimed < work_tiles ? find", "claimed < work_tiles - 1 ? find", "persistent"),
    fault_of("counter-not-left-0", "claimed == work_tiles + p.launched", "claimed == work_tiles - 1 + p.launched", "persistent"),
    fault_of("rounded-before-all-have-added", "while (ld_acquire_gpu(added) != key_tiles) {}", "", "persistent"),
    fault_of("one-sum-not-rounded", "exists = tile < list.tiles * p.heads_q;", "exists = tile + 1 < list.tiles * p.heads_q;", "persistent"),
    fault_of("rows-lost-on-the-way", "store_shared_v4(memory + 48, work.rows.vector());", "", "persistent"),
    fault_of("last-tile-without-a-sink", "i < tiles; i += kThreads / 32", "i + 1 < tiles; i += kThreads / 32", "generic-sinks"),
    fault_of("delta-of-the-first-sequence", "sequences.first_tile(listed.batch, head) * kBlockQ", "head * p.rows", "sm90-sinks"),
    fault_of(
        "lse-of-the-first-tile",
        "sequences.lse_offset(listed.batch, head) + listed.first_row",
        "sequences.lse_offset(0, head)",
        "sm90-sinks",
    ),
    fault_of("neighbours-rows-with-a-sink", "min(kBlockQ, listed.rows.len_q - listed.first_row)", "kBlockQ", "persistent-sinks"),
    fault_of("all-of-the-first-sequence", "batch = entry, heads[0] = first", "batch = 0, heads[0] = first", "generic-by-sequence"),
    fault_of(
        "gradients-of-the-first-sequence",
        "p, work.rows.len_q, work.rows.len_kv), work.batch, next.head(work, p));\n            collect",
        "p, work.rows.len_q, work.rows.len_kv), 0, next.head(work, p));\n            collect",
        "sm90-learned",
    ),
    fault_of("tiles-of-the-first-sequence", ", row.batch, row.head)", ", 0, row.head)", "generic-documents"),
    fault_of("tiles-of-the-first-row", "* p.seen_head + row;", "* p.seen_head;", "sm90-documents"),
    fault_of("tiles-of-another-head", "static_cast<i64>(head) * p.seen_head", "static_cast<i64>(0) * p.seen_head", "sm90-masked"),
    fault_of("sums-of-the-first-sequence", "work.first_tile + tile;", "tile;", "sm90-masked"),
    fault_of("elements-of-the-first-sequence", "first + batch * batch_step", "first + 0 * batch_step", "generic-mask"),
    fault_of("gradients-of-the-first-sequence", "sums.first + batch * sums", "sums.first + 0 * sums", "generic-bias"),
    fault_of("gradients-of-the-first-sequence", "sums.first + batch * sums", "sums.first + 0 * sums", "sm90-bias"),
    fault_of("gradients-of-the-first-sequence", "sums.first + batch * sums", "sums.first + 0 * sums", "persistent-bias"),
    fault_of("queries-beyond-the-bias", "len_q = min(len_q, p.bias_len_q)", "len_q = len_q", "persistent-bias"),
    fault_of("keys-beyond-the-bias", "len_kv = min(len_kv, p.bias_len_kv)", "len_kv = len_kv", "generic-bias"),
    fault_of("what-lies-beyond-a-sequence", "row_keys && query + i <= last", "row_keys", "sm90-bias"),
    fault_of("semaphores-not-cleared", "clear_semaphores<1>(p.d_q_semaphores + block_index());", "", "sm90-ordered"),
    fault_of("turn-by-another-length", "work.first_key / kBlockKv, work.rows.len_q)", "work.first_key / kBlockKv, 1)", "sm90-ordered"),
]


def judged_in_orders(spec: KernelSpec, text: Source, tensors: Tensors) -> Verdict:
    """What the rule says in the first order in which it rejects, or the last one."""
    verdict = judged(spec, text, tensors)
    for order in ORDERS[:4]:
        if not verdict.ok:
            break
        run_on_cpu(emulated_kernel(spec, text), tensors, interleaving=order, limits=LIMITS)
        verdict = Expected.of(tensors).judge(tensors)
    return verdict


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS, 4.0))
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, FEW)
    assert why_caught(KERNELS[kernel], planted, lambda text: judged_in_orders(spec, text, tensors))


@pytest.mark.parametrize("kernel", planned_cases([("generic",)], KERNELS, 1.0))
def test_no_keys_or_no_queries_at_all(kernel: str) -> None:
    """Which tensor copies could not describe: another family takes such a call."""
    spec = KERNELS[kernel].spec()
    for tokens in ({"tokens_q": 80}, {"tokens_kv": 80}):
        tensors = Tensors.random(spec.problem, Workload(2, 2, 1, 7, 7, **tokens), torch.Generator().manual_seed(5))
        for side in ("q", "kv"):
            ends = [0, 70, 80] if f"tokens_{side}" in tokens else [0, 0, 0]
            tensors[f"cu_seqlens_{side}"].copy_(torch.tensor(ends))
            tensors[f"seqused_{side}"].copy_(torch.tensor(ends[1:]))
        assert judged(spec, emulated_text(spec), poisoned(tensors)).ok
