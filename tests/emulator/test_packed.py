"""Packed sequences: the kernels of every family that computes them, in the emulator, by the numerics rule. What is in no sequence is NaN,
and what the device says of them may be wrong; faults that show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from flashgen.build.emulator.kernel import ORDERS, EmulationOrder
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.modifier import reads_scores, with_sizes_to_verify
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Mask, Sequences
from flashgen.codegen.program import Program
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu, view_of
from flashgen.launch.tensors import Tensors
from flashgen.numerics.rule import Verdict
from flashgen.numerics.sequences import SequenceTokens, sequences_of
from flashgen.traced.modifier import modifier_in_call
from flashgen.verification.expected import Expected
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_cases, planned_faults, why_caught
from tests.support.plan import every_case
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

SM90 = partial(AttentionForwardSm90Config, scheduler=Scheduler.DYNAMIC)
Packed = partial(NamedKernel, sequences=Sequences.PACKED)
GENERIC = AttentionForwardConfig(64, 32, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK)
OTHERS = ("alibi", "chunk", "dropout", "prefix_len")
# A score_mod that differs by sequence and head, and one of the distance from query to key.
TABLE = torch.zeros(2, 2, dtype=torch.bfloat16)
BY_SEQUENCE = name_of_functions(
    modifier_in_call(lambda score, batch, head, query, key: score + (key % 3 * head - query % 4 + batch % 5) * 0.25).modifier
)
BY_DISTANCE = name_of_functions(
    modifier_in_call(lambda score, batch, head, query, key: score + TABLE[query - key + 25, head] * 3.0).modifier
)
# Masks that leave some tiles: of documents, or all beside them, by sequence, and one that differs by head.
BY_DOCUMENTS = name_of_functions(
    modifier_in_call(None, lambda batch, head, query, key: (query // 70 == key // 70) ^ (batch % 2 == 1)).modifier
)
BY_HEAD = name_of_functions(
    modifier_in_call(None, lambda batch, head, query, key: (query + head * 40 >= key) & (key % 5 != batch % 5)).modifier
)
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default.
KERNELS = {
    "generic": Packed("attention_forward", 64, Mask.CAUSAL, False, (), GENERIC),
    "generic-wide": Packed("attention_forward", 72, Mask.FULL, False, ()),
    "generic-window": Packed("attention_forward", 64, Mask.CAUSAL, False, ("sinks", "softcap", "window"), GENERIC),
    "generic-others": Packed("attention_forward", 64, Mask.FULL, False, OTHERS, GENERIC),
    "sm90": Packed("attention_forward_sm90", 64, Mask.CAUSAL, False, (), SM90(2, 64, 2, 2, 1)),
    "sm90-full": Packed("attention_forward_sm90", 128, Mask.FULL, False, (), SM90(2, 80, 2, 1, 2, ping_pong=False)),
    "sm90-exact": Packed("attention_forward_sm90", 72, Mask.CAUSAL, False, (), SM90(1, 48, 2, 1, 1, RowMax.EXACT, ping_pong=False)),
    "sm90-three": Packed("attention_forward_sm90", 64, Mask.CAUSAL, False, (), SM90(3, 64, 2, 2, 1, ping_pong=False)),
    "sm90-window": Packed("attention_forward_sm90", 64, Mask.CAUSAL, False, ("sinks", "softcap", "window"), SM90(2, 64, 2, 2, 1)),
    "sm90-others": Packed("attention_forward_sm90", 64, Mask.FULL, False, OTHERS, SM90(2, 64, 2, 2, 1)),
    "generic-traced": Packed("attention_forward", 64, Mask.CAUSAL, False, (BY_SEQUENCE,), GENERIC),
    "generic-distances": Packed("attention_forward", 64, Mask.FULL, False, (BY_DISTANCE, "window"), GENERIC),
    "sm90-traced": Packed("attention_forward_sm90", 64, Mask.FULL, False, (BY_SEQUENCE,), SM90(2, 64, 2, 2, 1)),
    "sm90-distances": Packed("attention_forward_sm90", 64, Mask.CAUSAL, False, ("sinks", BY_DISTANCE), SM90(2, 32, 2, 2, 1)),
    "generic-documents": Packed("attention_forward", 64, Mask.FULL, False, (BY_DOCUMENTS,), GENERIC),
    "generic-masked": Packed("attention_forward", 64, Mask.CAUSAL, False, (BY_HEAD, "softcap"), GENERIC),
    "sm90-documents": Packed("attention_forward_sm90", 64, Mask.FULL, False, (BY_DOCUMENTS,), SM90(2, 64, 2, 2, 1)),
    "sm90-masked": Packed(
        "attention_forward_sm90", 72, Mask.CAUSAL, False, (BY_HEAD, "prefix_len", "sinks"), SM90(1, 32, 2, 1, 1, ping_pong=False)
    ),
    "generic-mask": Packed("attention_forward", 64, Mask.CAUSAL, False, ("boolean_mask",), GENERIC),
    "generic-bias": Packed("attention_forward", 64, Mask.FULL, False, ("bias", "softcap"), GENERIC),
    "generic-bias-and-mask": Packed("attention_forward", 72, Mask.FULL, False, ("bias_fp32", "boolean_mask", "window"), GENERIC),
    "sm90-mask": Packed("attention_forward_sm90", 64, Mask.FULL, False, ("boolean_mask", "sinks"), SM90(2, 64, 2, 2, 1)),
    "sm90-bias": Packed("attention_forward_sm90", 64, Mask.CAUSAL, False, ("bias",), SM90(2, 64, 2, 2, 1)),
    "sm90-bias-and-mask": Packed(
        "attention_forward_sm90", 72, Mask.FULL, False, ("bias_fp32", "boolean_mask"), SM90(1, 32, 2, 1, 1, ping_pong=False)
    ),
}
Lengths = tuple[Sequence[int], Sequence[int]]
FEW: Lengths = ([0, 1, 65, 200, 0, 129, 33], [5, 1, 64, 333, 70, 0, 333])
ALONE: Lengths = ([260], [300])
NONE: Lengths = ([0, 0], [3, 0])
MANY: Lengths = ([n % 4 for n in range(700)], [n % 7 % 4 for n in range(700)])  # more than a block has threads
BLOCK = 512  # threads that find sequences
LENGTHS = {"few": FEW, "alone": ALONE, "none": NONE, "many": MANY}


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


def drawn(spec: KernelSpec, lengths: Lengths, unused: bool = True) -> Tensors:
    """Sequences of these lengths, of which a part is used alone, between other tokens. The lengths that are expected are too short."""
    ends = [boundaries(side) for side in lengths]
    # Tensors of which each score has an element end before the longest sequences do.
    len_q, len_kv = (max(2, max(side) * 3 // 4 // 8 * 8) if reads_scores(spec.problem) else 7 for side in lengths)
    workload = Workload(len(lengths[0]), 2, 1, len_q, len_kv, tokens_q=int(ends[0][-1]) + 4, tokens_kv=int(ends[1][-1]) + 5)
    tensors = Tensors.random(spec.problem, with_sizes_to_verify(spec.problem, workload, 1), torch.Generator().manual_seed(5))
    for side, own, ending in zip(("q", "kv"), lengths, ends, strict=True):
        tensors[f"cu_seqlens_{side}"].copy_(ending)
        used = [max(0, n - 5 * (unused and i % 3 == 2)) for i, n in enumerate(own)]
        tensors[f"seqused_{side}"].copy_(torch.tensor(used, dtype=torch.int32))
    return poisoned(tensors)


def poisoned(tensors: Tensors) -> Tensors:
    """NaN where no sequence is."""
    sequences = sequences_of(tensors)
    for names, of in ((("q",), "queries"), (("k", "v"), "keys")):
        outside = torch.ones(len(tensors[names[0]]), dtype=torch.bool)
        for one in sequences:
            outside[getattr(one, of)] = False
        for name in names:
            tensors[name][outside] = torch.nan
    for one in sequences if "bias" in tensors else ():
        queries, keys = one.queries.stop - one.queries.start, one.keys.stop - one.keys.start
        tensors["bias"][one.number, :, queries:] = tensors["bias"][one.number, ..., keys:] = torch.nan
    return tensors


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(("kernel", "lengths"), planned_cases(itertools.product(KERNELS, LENGTHS), KERNELS, 2.0))
def test_each_sequence_is_attention_of_its_own(kernel: str, lengths: str) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, LENGTHS[lengths]))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("kernel", planned_cases([("generic",), ("sm90",)], KERNELS, 4.0))
def test_all_orders_and_what_a_call_may_leave_out(kernel: str, pytestconfig: pytest.Config) -> None:
    spec = KERNELS[kernel].spec()
    tensors, loaded = drawn(spec, FEW, unused=False).without_optional_inputs(), emulated_kernel(spec)
    assert "seqused_q" not in tensors
    expected = Expected.of(tensors)
    for order in ORDERS if every_case(pytestconfig) else ORDERS[2:5]:
        run_on_cpu(loaded, tensors, interleaving=order, limits=LIMITS)
        assert expected.judge(tensors).ok, order


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
            case "below":
                ends[::2] = -(2**31)
                used[::2] = -(2**31)
            case "dip":
                ends[BLOCK if len(ends) > BLOCK else len(ends) // 2 :] -= 100


WRONG = ("random", "falling", "far", "below", "dip")


@pytest.mark.parametrize(
    ("kernel", "kind", "lengths"),
    planned_cases(itertools.product(("generic", "sm90", "generic-documents", "sm90-documents"), WRONG, ("few", "many")), KERNELS, 2.0),
)
def test_what_the_device_says_wrongly_touches_nothing_outside(kernel: str, kind: str, lengths: str) -> None:
    """The emulator has pages that nobody may touch around every tensor, and looks for writes beside outputs."""
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, LENGTHS[lengths])
    for name in ("q", "k", "v"):
        tensors[name].nan_to_num_(0.25)
    wrong(kind, tensors)
    verdict = judged(spec, emulated_text(spec), poisoned(tensors))
    assert verdict.ok, verdict.message


def listed(kernel: str, lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor, list[SequenceTokens]]:
    """The head of the list that the first launch writes, and its tiles, with the sequences."""
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, lengths)
    program = spec.family.program(spec.config, tensors.call(), device_of_target(spec.target))
    buffers = {one.name: torch.full((one.bytes // 4,), -1, dtype=torch.int32) for one in program.buffers}
    given = {operand.name: view_of(operand.name, tensors[operand.name], writable=True) for operand in tensors.operands}
    given |= {name: view_of(name, memory, writable=True) for name, memory in buffers.items()}
    emulated_kernel(spec).launch(Program(program.launches[:1]), given, EmulationOrder(), limits=LIMITS)
    head, *tiles = buffers["work_list"].reshape(-1, 8)
    return head, torch.stack(tiles)[: int(head[0])], sequences_of(tensors)


@pytest.mark.parametrize("lengths", [FEW, NONE, MANY, ([300] * BLOCK, [1] * BLOCK)], ids=["few", "none", "many", "equal"])
def test_the_list_has_every_tile_once_and_the_longest_sequence_last(lengths: Lengths) -> None:
    head, tiles, sequences = listed("generic", lengths)
    expected = {(one.number, first) for one in sequences for first in range(0, one.queries.stop - one.queries.start, GENERIC.block_q)}
    found = [(int(batch), int(first)) for batch, first in tiles[:, :2]]
    assert len(found) == len(set(found)) == int(head[0])
    assert int(head[4]) == 0, "claims so far"
    assert set(found) == expected
    for number, first_query, _, _, *rows in tiles.tolist():
        queries, keys = sequences[number].queries, sequences[number].keys
        assert rows == [queries.start, queries.stop - queries.start, keys.start, keys.stop - keys.start]
        assert first_query % GENERIC.block_q == 0
    lengths_kv = [rows[7] for rows in tiles.tolist()]
    by_class = [n if n < 128 else n.bit_length() * 8 + (n >> n.bit_length() - 4) for n in (n // 16 * 16 for n in lengths_kv)]
    assert by_class == sorted(by_class)
    reciprocal = int(head[2]) % 2**32 + (int(head[3]) % 2**32 << 32)
    group = int(head[0]) * 2  # of two heads
    assert reciprocal == (0 if group <= 1 else -(-(2**64) // group)) or not found


_LIST = "u32 tile = lane_index(); tile < of_thread.z; tile += 32"
FAULTS = [
    fault_of("lengths-of-the-other-side", "of_kv{p.cu_seqlens_kv", "of_kv{p.cu_seqlens_q", "generic"),
    fault_of("lengths-of-the-other-side", "of_q{p.cu_seqlens_q", "of_q{p.cu_seqlens_kv", "sm90"),
    fault_of("all-keys-used", "of_kv{p.cu_seqlens_kv, p.seqused_kv,", "of_kv{p.cu_seqlens_kv, nullptr,", "sm90"),
    fault_of("all-queries-used", "of_q{p.cu_seqlens_q, p.seqused_q,", "of_q{p.cu_seqlens_q, nullptr,", "generic"),
    fault_of("neighbours-keys-loaded", "kMapRows - len_kv + key;", "kMapRows - len_kv + key - 64;", "sm90"),
    fault_of("keys-of-the-row-before", "first_kv + len_kv; }", "first_kv + len_kv - 1; }", "sm90"),
    fault_of("neighbours-rows-stored", "kMapRows - len_q + query;", "kMapRows - len_q + query - 64;", "sm90"),
    fault_of("rows-of-the-one-before", "first_q + len_q; }", "first_q + len_q - 1; }", "sm90-full"),
    fault_of("lse-of-the-first-sequence", "* tokens_q + rows.first_q;", "* tokens_q;", "generic"),
    fault_of("lse-of-the-first-sequence", "* tokens_q + rows.first_q;", "* tokens_q;", "sm90"),
    fault_of("keys-of-the-queries-rows", "(rows.first_kv + row) *", "(rows.first_q + row) *", "generic"),
    fault_of("last-tile-not-listed", _LIST, _LIST.replace("tile < of", "tile + 1 < of"), "generic"),
    fault_of("part-of-a-tile-not-listed", "(rows.len_q + kRows - 1) / kRows", "rows.len_q / kRows", "sm90"),
    fault_of("one-tile-too-few", "static_cast<int>(listed), of_group", "static_cast<int>(listed) - 1, of_group", "generic"),
    fault_of("one-tile-too-few", "static_cast<int>(listed), of_group", "static_cast<int>(listed) - 1, of_group", "sm90"),
    fault_of("rows-of-none-not-cleared", "if (all == 0) continue;", "continue;", "generic"),
    fault_of("rows-behind-the-last-not-cleared", "index > boundaries.batch ? 0", "index >= boundaries.batch ? 0", "generic-wide"),
    fault_of("rows-before-the-first-not-cleared", "int first = -1; first <= boundaries", "int first = 0; first <= boundaries", "sm90"),
    fault_of("lse-of-none-not-cleared", "if (p.lse == nullptr) return;\n        for", "return;\n        for", "sm90"),
    fault_of("ties-share-a-place", "longer_by == 0 && other < sequence", "longer_by == 0 && other < 0", "generic"),
    fault_of(
        "another-batch-entry",
        "list.store_tile(of_thread.y + tile, {static_cast<int>(of_thread.x)",
        "list.store_tile(of_thread.y + tile, {static_cast<int>(0)",
        "sm90-others",
    ),
    fault_of("claims-begin-at-1", "at[1] = {0, 0, 0, 0};", "at[1] = {1, 0, 0, 0};", "sm90"),
    fault_of("no-wait-for-the-list", "griddepcontrol_wait();  // for the list", "// for the list", "sm90"),
    fault_of(
        "tile-not-waited-for",
        "cp_async_wait_group<0>();\n        const Work work = Work::fetched",
        "const Work work = Work::fetched",
        "sm90",
    ),
    fault_of("all-of-the-first-sequence", "batch = entry, heads[0] = first", "batch = 0, heads[0] = first", "generic-traced"),
    fault_of("all-of-the-first-sequence", "batch = entry, heads[0] = first", "batch = 0, heads[0] = first", "sm90-traced"),
    fault_of("all-of-the-first-sequence", "batch = entry, heads[0] = first", "batch = 0, heads[0] = first", "generic-masked"),
    fault_of("tiles-of-the-first-sequence", ", row.batch, row.head)", ", 0, row.head)", "generic-documents"),
    fault_of("tiles-of-the-first-sequence", ", row.batch, row.head)", ", 0, row.head)", "sm90-documents"),
    fault_of("tiles-of-the-first-row", "* p.seen_head + row;", "* p.seen_head;", "sm90-documents"),
    fault_of("tiles-of-the-first-row", "* p.seen_head + row;", "* p.seen_head;", "generic-documents"),
    fault_of("tiles-of-the-first-head", "static_cast<i64>(head) * p.seen_head", "static_cast<i64>(0) * p.seen_head", "generic-masked"),
    fault_of("tiles-of-the-first-queries", "kQueries, kKeys>(own.first_row)", "kQueries, kKeys>(0)", "generic-masked"),
    fault_of("keys-of-another-sequence", "kKeys, own.len_kv)", "kKeys, own.len_q)", "generic-documents"),
    fault_of("values-of-the-block-behind", "keep_v(k_row,", "keep_v(k_row + Traits::kBlockKv,", "sm90-documents"),
    fault_of("values-of-the-last-block-left-out", "keep_v(k_row,", "if (following >= 0) keep_v(k_row,", "sm90-documents"),
    fault_of("elements-of-the-first-sequence", "first + batch * batch_step", "first + 0 * batch_step", "generic-bias"),
    fault_of("elements-of-the-first-sequence", "first + batch * batch_step", "first + 0 * batch_step", "sm90-bias"),
    fault_of("elements-of-the-first-sequence", "first + batch * batch_step", "first + 0 * batch_step", "sm90-mask"),
    fault_of("elements-of-the-first-head", "of_batch + first_head * head_step", "of_batch + 0 * head_step", "generic-mask"),
    fault_of("queries-beyond-the-mask", "min(len_q, p.mask_len_q)", "len_q", "sm90-mask"),
    fault_of("keys-beyond-the-mask", "\n                     p.mask_len_kv, {}}", "\n                     2147483647, {}}", "generic-mask"),
    fault_of("shown-beyond-the-mask", "j * 8 < columns ? own[0] : T{}", "j * 8 < columns ? own[0] : T{1}", "generic-mask"),
    fault_of("queries-beyond-the-bias", "len_q = min(len_q, p.bias_len_q)", "len_q = len_q", "generic-bias"),
    fault_of("queries-beyond-the-bias", "row_keys && position.row(0, h) <= last", "row_keys", "sm90-bias"),
    fault_of("keys-beyond-the-bias", "first_key + i < row_keys", "true", "sm90-bias"),
    fault_of("head-of-the-next-tile", "head = next_head;", "", "sm90"),
]
OF_MANY = [
    fault_of("others-of-the-class-not-counted", "found(sequence, count + popc(before));", "found(sequence, count);", "generic"),
    fault_of("class-not-counted", "store_shared(count_of(warp, own), count + popc(same));", "", "sm90"),
    fault_of("warps-before-not-added", "if (i == warp) value = Operation::of(value, all);", "", "generic"),
    fault_of("sequences-of-earlier-threads-lost", "u32 begin = listed + ", "u32 begin = ", "generic"),
    fault_of("neighbours-not-added", "if (lane_index() & step) value = Operation::of(value, neighbours);", "", "sm90"),
]
DIPS = [
    fault_of("highest-boundary-forgotten", "first = max(up_to_here, highest)", "first = up_to_here", "generic"),
    fault_of("highest-boundary-of-the-block-forgotten", "highest = max(highest, static_cast<int>(all));", "", "sm90"),
    fault_of("beyond-the-tokens", "min(max(cu_seqlens[index], 0), tokens)", "max(cu_seqlens[index], 0)", "generic"),
    fault_of("beyond-the-sequence", "min(max(used, 0), behind - first)", "max(used, 0)", "sm90"),
]


def shows(kernel: str, planted: Fault, tensors: Tensors) -> str:
    return why_caught(KERNELS[kernel], planted, lambda text: judged(KERNELS[kernel].spec(), text, tensors))


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS))
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    assert shows(kernel, planted, drawn(KERNELS[kernel].spec(), FEW))


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(OF_MANY, KERNELS))
def test_a_fault_in_listing_many_sequences_shows(kernel: str, planted: Fault) -> None:
    assert shows(kernel, planted, drawn(KERNELS[kernel].spec(), MANY))


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(DIPS, KERNELS))
def test_a_fault_of_wrong_boundaries_shows(kernel: str, planted: Fault) -> None:
    tensors = drawn(KERNELS[kernel].spec(), MANY)
    for name in ("q", "k", "v"):
        tensors[name].nan_to_num_(0.25)
    if "beyond" in planted.name:
        wrong("far", tensors)
    else:
        wrong("dip", tensors)
    assert shows(kernel, planted, poisoned(tensors))


@pytest.mark.parametrize("kernel", planned_cases([("generic",), ("sm90",)], KERNELS, 1.0))
def test_a_batch_without_sequences(kernel: str) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, NONE)
    empty = {name: tensors[name][:0] for name in ("seqused_q", "seqused_kv")}
    ends = {name: tensors[name][:1] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    tensors = replace(tensors, workload=replace(tensors.workload, batch=0)).replacing(**empty, **ends)
    assert judged(spec, emulated_text(spec), tensors).ok


@pytest.mark.parametrize("kernel", planned_cases([("generic",), ("generic-window",)], KERNELS, 1.0))
def test_no_keys_at_all(kernel: str) -> None:
    """Which tensor copies could not describe: another family takes such a call."""
    spec, workload = KERNELS[kernel].spec(), Workload(2, 2, 1, 7, 7, tokens_q=80)
    tensors = Tensors.random(spec.problem, with_sizes_to_verify(spec.problem, workload, 1), torch.Generator().manual_seed(5))
    for name, values in (("cu_seqlens_q", [0, 70, 80]), ("seqused_q", [70, 9]), ("cu_seqlens_kv", [0, 0, 0]), ("seqused_kv", [0, 0])):
        tensors[name].copy_(torch.tensor(values))
    assert judged(spec, emulated_text(spec), tensors).ok
    assert (tensors["lse"][:, :70] == -torch.inf).all() == ("sinks" not in spec.problem.modifiers)
    refused = KERNELS["sm90"].spec().family.call_refusals(tensors.call())
    assert "tokens_kv must be at least 1 for tensor copies; got 0" in refused
