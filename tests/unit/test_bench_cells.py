"""The benchmark's grids: the cells that published figures are of, written out once more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.bench.cells import GRIDS, grid_names, grids
from flashgen.cells import Cell, cells_of
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.seen import Seen
from flashgen.codegen.workload import Workload

# grid -> (dtype, head_dim, head_dim_v, masks, (batch, heads_q, heads_kv, len_q, len_kv)), both masks for "fc"
FORWARD = {
    "standard": [
        ("bf16", 128, 128, "fc", (1, 16, 16, 16384, 16384)),
        ("bf16", 128, 128, "fc", (4, 16, 16, 4096, 4096)),
        ("bf16", 128, 128, "fc", (16, 16, 16, 1024, 1024)),
        ("bf16", 128, 128, "fc", (32, 16, 16, 512, 512)),
        ("bf16", 64, 64, "fc", (1, 32, 32, 16384, 16384)),
        ("bf16", 64, 64, "fc", (4, 32, 32, 4096, 4096)),
        ("bf16", 64, 64, "fc", (16, 32, 32, 1024, 1024)),
        ("bf16", 64, 64, "fc", (32, 32, 32, 512, 512)),
        ("bf16", 256, 256, "fc", (1, 8, 8, 16384, 16384)),
        ("bf16", 256, 256, "fc", (4, 8, 8, 4096, 4096)),
        ("bf16", 256, 256, "fc", (16, 8, 8, 1024, 1024)),
        ("bf16", 256, 256, "fc", (32, 8, 8, 512, 512)),
        ("bf16", 96, 96, "fc", (4, 21, 21, 4096, 4096)),
        ("bf16", 192, 192, "fc", (4, 10, 10, 4096, 4096)),
    ],
    "gqa": [
        ("bf16", 128, 128, "fc", (1, 32, 4, 16384, 16384)),
        ("bf16", 128, 128, "fc", (4, 32, 4, 4096, 4096)),
        ("bf16", 128, 128, "fc", (16, 32, 4, 1024, 1024)),
    ],
    "mixed": [
        ("bf16", 192, 128, "fc", (1, 16, 16, 16384, 16384)),
        ("bf16", 192, 128, "fc", (4, 16, 16, 4096, 4096)),
    ],
    "short": [
        ("bf16", d, d, "c", (b, 16, 16, s, s)) for d in (64, 128) for b, s in ((1, 128), (1, 512), (2, 1024), (8, 128), (8, 512), (8, 1024))
    ],
    "decode": [
        ("bf16", 128, 128, "f", (1, 32, 8, 1, 65536)),
        ("bf16", 128, 128, "f", (16, 32, 8, 1, 8192)),
        ("bf16", 128, 128, "f", (64, 32, 32, 1, 2048)),
        ("bf16", 64, 64, "f", (128, 64, 8, 1, 4096)),
        ("bf16", 256, 256, "f", (8, 16, 2, 1, 32768)),
    ],
    "tutorial": [
        ("fp16", 32, 32, "f", (64, 32, 32, 256, 256)),
        ("fp16", 64, 64, "fc", (32, 16, 16, 512, 512)),
    ],
    "window": [("bf16", d, d, "wW", (16384 // s, 2048 // d, 2048 // d, s, s)) for d in (64, 128) for s in (4096, 16384)],
    "softcap": [("bf16", d, d, "s", (16384 // s, 2048 // d, 2048 // d, s, s)) for d in (64, 128) for s in (4096, 16384)],
    "alibi": [("bf16", d, d, "a", (16384 // s, 2048 // d, 2048 // d, s, s)) for d in (64, 128) for s in (4096, 16384)],
    "sinks": [("bf16", d, d, "k", (16384 // s, 2048 // d, 2048 // d, s, s)) for d in (64, 128) for s in (4096, 16384)],
    "documents": [("bf16", d, d, "d", (16384 // s, 2048 // d, 2048 // d, s, s)) for d in (64, 128) for s in (4096, 16384)],
    "relative": [("bf16", d, d, "r", (16384 // s, 2048 // d, 2048 // d, s, s)) for d in (64, 128) for s in (4096, 16384)],
    "dropout": [("bf16", d, d, "pP", (4, 2048 // d, 2048 // d, 4096, 4096)) for d in (64, 128)],
    **{name: [("bf16", d, d, "b", (4, 16, 16, 4096, 4096)) for d in (64, 128)] for name in ("bias", "key-bias")},
    "varlen": [("bf16", d, d, "v", (16, 2048 // d, 2048 // d, 8192, 8192)) for d in (64, 128)],
}  # fmt: skip
BACKWARD = {
    "standard": [
        ("bf16", 128, 128, "fc", (2, 16, 16, 8192, 8192)),
        ("bf16", 128, 128, "fc", (8, 16, 16, 2048, 2048)),
        ("bf16", 64, 64, "fc", (2, 32, 32, 8192, 8192)),
        ("bf16", 64, 64, "fc", (8, 32, 32, 2048, 2048)),
        ("bf16", 256, 256, "fc", (2, 8, 8, 8192, 8192)),
        ("bf16", 256, 256, "fc", (8, 8, 8, 2048, 2048)),
    ],
    "further": [
        ("bf16", 128, 128, "c", (4, 32, 4, 4096, 4096)),
        ("bf16", 128, 128, "c", (32, 16, 16, 512, 512)),
        ("bf16", 128, 128, "c", (16, 16, 16, 1024, 1024)),
        ("bf16", 128, 128, "c", (4, 16, 16, 4096, 4096)),
        ("bf16", 128, 128, "c", (1, 16, 16, 16384, 16384)),
        ("fp16", 64, 64, "fc", (4, 32, 32, 4096, 4096)),
        ("fp16", 128, 128, "fc", (4, 16, 16, 4096, 4096)),
        ("bf16", 192, 128, "c", (4, 16, 16, 4096, 4096)),
    ],
    **{name: FORWARD[name] for name in ("gqa", "mixed", "short", "tutorial", "window")},
    **{name: FORWARD[name] for name in ("softcap", "alibi", "sinks", "documents", "relative", "dropout", "bias", "key-bias", "varlen")},
}  # fmt: skip
OF_CACHES = {"forward": ["paged", "ragged", "prefill"], "backward": []}  # written out in test_bench_caches.py
WRITTEN_OUT = {"forward": FORWARD, "backward": BACKWARD}


@pytest.mark.parametrize(("operation", "name"), [(operation, name) for operation, some in WRITTEN_OUT.items() for name in some])
def test_the_cells_of_a_grid(operation: str, name: str) -> None:
    masks: dict[str, Seen] = {"f": Seen.of(False), "c": Seen.of(True), "w": Seen.of(True, (1024, None)), "W": Seen.of(True, (4096, None))}
    masks |= {
        "s": Seen(Mask.CAUSAL, ("softcap",)),
        "a": Seen(Mask.CAUSAL, ("alibi",)),
        "k": Seen(Mask.CAUSAL, ("sinks",)),
        "d": Seen(Mask.CAUSAL, ("document_ids",)),
        "b": Seen(Mask.FULL, ("bias",)),
        "p": Seen(Mask.FULL, ("dropout",)),
        "P": Seen(Mask.CAUSAL, ("dropout",)),
        "v": Seen.of(True),
        "r": Seen(Mask.CAUSAL, ("traced(score: add(score, t0:fp32[head, add(add(query, neg(key)), n0:int32)]))",)),
    }
    wanted = [
        Cell(
            Problem(Dtype(dtype), d, dv, masks[letter].mask, operation, modifiers=masks[letter].modifiers, sequences=layout),
            Workload(*sizes, *masks[letter].sizes, tokens_q=tokens, tokens_kv=tokens),
        )
        for dtype, d, dv, letters, sizes in WRITTEN_OUT[operation][name]
        for letter in letters
        for layout, tokens in ((Sequences.PACKED, 40062) if letter == "v" else (Sequences.DENSE, 0),)
    ]
    assert grids(name, operation) == {name: wanted}


@pytest.mark.parametrize("operation", WRITTEN_OUT)
def test_grids_by_name(operation: str) -> None:
    *names, everything = grid_names(operation)
    assert everything == f"all-{operation}"
    assert list(grids("mixed, gqa", operation)) == ["mixed", "gqa"]
    assert list(grids(everything, operation)) == names == list(GRIDS[operation]) == [*WRITTEN_OUT[operation], *OF_CACHES[operation]]
    assert grids(f"{everything},gqa", operation) == grids(everything, operation)
    for wrong in ("", "fwd", "gqa,,mixed"):
        with pytest.raises(ArgumentError, match=f"grid must be one of {', '.join(names)}, {everything}; got"):
            grids(wrong, operation)


def test_an_operation_without_grids_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pass must be one of forward, backward; got 'both'"):
        grid_names("both")


def test_a_workload_by_hand_may_have_other_keys_than_queries() -> None:
    cells = cells_of(64, causal=False, seqlens=(1, 128), seqlen_kv=4096, heads=32, kv_heads=8)
    assert [cell.workload for cell in cells] == [Workload(4, 32, 8, 1, 4096), Workload(4, 32, 8, 128, 4096)]
    with pytest.raises(ArgumentError, match="seqlen_kv must be an integer from 1"):
        cells_of(64, seqlen_kv=0)


def test_packed_cells_have_the_tokens_of_dense_ones() -> None:
    packed, dense = (cells_of(64, causal=True, seqlens=(512,), seqlen_kv=1024, heads=4, packed=packed) for packed in (True, False))
    (cell,), (other,) = packed, dense
    assert cell.problem == replace(other.problem, sequences=Sequences.PACKED)
    assert cell.workload == replace(other.workload, tokens_q=16 * 512, tokens_kv=16 * 1024)
    assert cell.flops == other.flops, "packed sequences count as equally long"
    with pytest.raises(ArgumentError, match=r"^packed must be left out for softmax, which has none; got True"):
        cells_of(passes="softmax", packed=True)


def test_cells_of_caches_have_the_pages_that_keys_need() -> None:
    (cell,) = cells_of(64, causal=True, seqlens=(2,), seqlen_kv=100, heads=4, kv_heads=2, batch=3, page_size=16)
    assert cell.problem == Problem(Dtype.BF16, 64, 64, Mask.CAUSAL, sequences=Sequences.CACHED)
    assert cell.workload == Workload(3, 4, 2, 2, 112, pages=21, page_size=16, table_pages=7)
    (cell,) = cells_of(64, 72, seqlens=(2,), seqlen_kv=100, heads=4, batch=3, passes="append", page_size=100)
    assert cell.problem == Problem(Dtype.BF16, 64, 72, operation="append", sequences=Sequences.CACHED)
    assert cell.workload == Workload(3, 4, 4, 2, 100, pages=3, page_size=100, table_pages=1, new_keys=2)
    for options, message in (
        ({"page_size": 0}, r"^page_size must be an integer from 1"),
        ({"page_size": 16, "packed": True}, r"^page_size must be left out for packed sequences, which are in no cache; got 16"),
        ({"page_size": 16, "passes": "softmax", "head_dim": None}, r"^page_size must be left out for softmax, which has none; got 16"),
        ({"passes": "append"}, r"^page_size must be given for append; got none"),
        ({"passes": "append", "page_size": 16, "head_dim": None}, r"^head_dim must be given for append; got none"),
        ({"passes": "append", "page_size": 16, "causal": True}, r"^causal must be left out for append, which has none; got True"),
        ({"passes": "backward", "page_size": 16}, r"^sequences must be dense or packed for backward: caches have no gradients; got cached"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cells_of(**{"head_dim": 64, **options})  # type: ignore[arg-type]


def test_bytes_are_those_of_q_k_v_and_out() -> None:
    problem, workload = Problem(Dtype.BF16, 192, 128), Workload(2, 8, 2, 5, 7)
    q, k, v, out = 2 * 8 * 5 * 192, 2 * 2 * 7 * 192, 2 * 2 * 7 * 128, 2 * 8 * 5 * 128
    assert Cell(problem, workload).io_bytes == 2 * (q + k + v + out)
