"""What the benchmark measures: for each operation, the named grids of (problem, workload) cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flashgen.codegen.errors import choice_error
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.seen import Seen
from flashgen.codegen.workload import Workload

from ..cells import MODEL_DIM, TOKENS, Cell
from .bias import OF_KEYS, OF_SCORES
from .caches import equal_cell, with_cache
from .packed import packed_documents
from .relative import NAME, RELATIVE

OURS = "flashgen"  # among the peers
BY_HAND = "workload"  # the grid of cells that options gave
STANDARD = "standard"  # the grid where none is asked for


def _cell(dtype: Dtype, head_dim: int, head_dim_v: int, mask: Mask, workload: tuple[int, int, int, int, int]) -> Cell:
    return Cell(Problem(dtype, head_dim, head_dim_v, mask), Workload(*workload))


def _standard() -> list[Cell]:
    """16384 tokens and a model dimension of 2048, as is common in the literature."""
    sizes = [(d, s) for d in (128, 64, 256) for s in (16384, 4096, 1024, 512)] + [(96, 4096), (192, 4096)]
    heads = {d: MODEL_DIM // d for d, _ in sizes}
    return [_cell(Dtype.BF16, d, d, mask, (TOKENS // s, heads[d], heads[d], s, s)) for d, s in sizes for mask in Mask]


def _gqa() -> list[Cell]:
    """Eight query heads a key/value head."""
    return [_cell(Dtype.BF16, 128, 128, mask, (TOKENS // s, 32, 4, s, s)) for s in (16384, 4096, 1024) for mask in Mask]


def _mixed() -> list[Cell]:
    """The head dims of latent attention: 192 for q and k, 128 for v."""
    return [_cell(Dtype.BF16, 192, 128, mask, (TOKENS // s, 16, 16, s, s)) for s in (16384, 4096) for mask in Mask]


def _short() -> list[Cell]:
    """Too small to fill the GPU, or just about."""
    sizes = ((1, 128), (1, 512), (2, 1024), (8, 128), (8, 512), (8, 1024))
    return [_cell(Dtype.BF16, d, d, Mask.CAUSAL, (b, 16, 16, s, s)) for d in (64, 128) for b, s in sizes]


def _gradients() -> list[Cell]:
    """The standard grid of gradients: as many tokens, two lengths."""
    sizes = [(d, s) for d in (128, 64, 256) for s in (8192, 2048)]
    return [_cell(Dtype.BF16, d, d, mask, (TOKENS // s, MODEL_DIM // d, MODEL_DIM // d, s, s)) for d, s in sizes for mask in Mask]


def _further() -> list[Cell]:
    """What the standard grid of gradients leaves out: grouped queries, other lengths, fp16, head dims that differ."""
    lengths = [_cell(Dtype.BF16, 128, 128, Mask.CAUSAL, (TOKENS // s, 16, 16, s, s)) for s in (512, 1024, 4096, 16384)]
    halves = [_cell(Dtype.FP16, d, d, mask, (4, MODEL_DIM // d, MODEL_DIM // d, 4096, 4096)) for d in (64, 128) for mask in Mask]
    grouped = _cell(Dtype.BF16, 128, 128, Mask.CAUSAL, (4, 32, 4, 4096, 4096))
    return [grouped, *lengths, *halves, _cell(Dtype.BF16, 192, 128, Mask.CAUSAL, (4, 16, 16, 4096, 4096))]


def _decode() -> list[Cell]:
    """One query token: bound by reading k and v."""
    sizes = (
        (128, (1, 32, 8, 1, 65536)),
        (128, (16, 32, 8, 1, 8192)),
        (128, (64, 32, 32, 1, 2048)),
        (64, (128, 64, 8, 1, 4096)),
        (256, (8, 16, 2, 1, 32768)),
    )
    return [_cell(Dtype.BF16, d, d, Mask.FULL, workload) for d, workload in sizes]


def _window() -> list[Cell]:
    """A causal window of 1024 or 4096 keys before a query."""
    cells = []
    for d, s, left in itertools.product((64, 128), (4096, 16384), (1024, 4096)):
        seen = Seen.of(True, (left, None))
        workload = Workload(TOKENS // s, MODEL_DIM // d, MODEL_DIM // d, s, s, *seen.sizes)
        cells.append(Cell(Problem(Dtype.BF16, d, d, seen.mask, modifiers=seen.modifiers), workload))
    return cells


def _changed(modifier: str) -> list[Cell]:
    """A causal mask and a modifier at two lengths."""
    sizes = itertools.product((64, 128), (4096, 16384))
    cells = [_cell(Dtype.BF16, d, d, Mask.CAUSAL, (TOKENS // s, MODEL_DIM // d, MODEL_DIM // d, s, s)) for d, s in sizes]
    return [replace(cell, problem=replace(cell.problem, modifiers=(modifier,))) for cell in cells]


def _dropout() -> list[Cell]:
    """Full and causal at one length."""
    cells = [_cell(Dtype.BF16, d, d, mask, (4, MODEL_DIM // d, MODEL_DIM // d, 4096, 4096)) for d in (64, 128) for mask in Mask]
    return [replace(cell, problem=replace(cell.problem, modifiers=("dropout",))) for cell in cells]


def _bias() -> list[Cell]:
    """At one length, without a mask; bias.py has its shape."""
    cells = [_cell(Dtype.BF16, d, d, Mask.FULL, (4, 16, 16, 4096, 4096)) for d in (64, 128)]
    return [replace(cell, problem=replace(cell.problem, modifiers=("bias",))) for cell in cells]


def _varlen() -> list[Cell]:
    """16 packed documents of lengths that are log-uniform up to 8192."""
    problems = [Problem(Dtype.BF16, d, d, Mask.CAUSAL, sequences=Sequences.PACKED) for d in (64, 128)]
    return [Cell(problem, packed_documents(16, MODEL_DIM // problem.head_dim, 8192)) for problem in problems]


_PAGED = Problem(Dtype.BF16, 128, 128, sequences=Sequences.CACHED)


def _paged() -> list[Cell]:
    """The grid `decode`'s second cell with its keys in pages, at last in one for each sequence."""
    workload = Workload(16, 32, 8, 1, 8192)
    return [Cell(_PAGED, with_cache(workload, size)) for size in (1, 16, 64, 128, 256, 8192)]


def _ragged() -> list[Cell]:
    """32 sequences of log-uniform lengths up to 32768, and as many keys in sequences of one length."""
    longest = Workload(32, 32, 8, 1, 32768)
    cells = [Cell(_PAGED, with_cache(longest, size, ragged=True)) for size in (16, 64, 256)]
    equal = equal_cell(cells[-1]).workload
    return [*cells, Cell(_PAGED, with_cache(equal, 256))]


def _prefill() -> list[Cell]:
    """Chunks of a prompt on a cache of 8192 keys, a long one and four short ones, in pages of several sizes, at last in one each."""
    workloads = (Workload(1, 32, 8, 4096, 8192), Workload(4, 32, 8, 512, 8192))
    problems = [Problem(Dtype.BF16, d, d, Mask.CAUSAL, sequences=Sequences.CACHED) for d in (64, 128)]
    return [Cell(problem, with_cache(w, size)) for problem in problems for w in workloads for size in (16, 64, 256, 8192)]


def _tutorial() -> list[Cell]:
    """The sizes that hand-written kernels of tutorials are shown on."""
    sizes = ((32, Mask.FULL, (64, 32, 32, 256, 256)), (64, Mask.FULL, (32, 16, 16, 512, 512)), (64, Mask.CAUSAL, (32, 16, 16, 512, 512)))
    return [_cell(Dtype.FP16, d, d, mask, workload) for d, mask, workload in sizes]


# Grids by operation and name, as cells of the forward pass: `grids` makes them cells of the operation.
GRIDS: dict[str, dict[str, Callable[[], list[Cell]]]] = {
    "forward": {
        STANDARD: _standard,
        "gqa": _gqa,
        "mixed": _mixed,
        "short": _short,
        "decode": _decode,
        "tutorial": _tutorial,
        "window": _window,
        "softcap": partial(_changed, "softcap"),
        "alibi": partial(_changed, "alibi"),
        "sinks": partial(_changed, "sinks"),
        "documents": partial(_changed, "document_ids"),
        NAME: partial(_changed, RELATIVE),
        "dropout": _dropout,
        OF_SCORES: _bias,
        OF_KEYS: _bias,
        "varlen": _varlen,
        "paged": _paged,
        "ragged": _ragged,
        "prefill": _prefill,
    },
    "backward": {
        STANDARD: _gradients,
        "further": _further,
        "gqa": _gqa,
        "mixed": _mixed,
        "short": _short,
        "tutorial": _tutorial,
        "window": _window,
        "softcap": partial(_changed, "softcap"),
        "alibi": partial(_changed, "alibi"),
        "sinks": partial(_changed, "sinks"),
        "documents": partial(_changed, "document_ids"),
        NAME: partial(_changed, RELATIVE),
        "dropout": _dropout,
        OF_SCORES: _bias,
        OF_KEYS: _bias,
        "varlen": _varlen,
    },
}


def grid_names(operation: str) -> tuple[str, ...]:
    """What `grids` takes: the grids of an operation, and the name that stands for all. Raises ArgumentError for one without grids."""
    if operation not in GRIDS:
        raise choice_error("pass", operation, GRIDS)
    return (*GRIDS[operation], f"all-{operation}")


def grids(names: str = STANDARD, operation: str = "forward") -> dict[str, list[Cell]]:
    """The cells of an operation's grids named, which commas separate. Raises ArgumentError for an unknown one."""
    *_, everything = known = grid_names(operation)
    found: dict[str, list[Cell]] = {}
    for name in (text.strip() for text in names.split(",")):
        if name not in known:
            raise choice_error("grid", name, known)
        for grid in GRIDS[operation] if name == everything else (name,):
            found[grid] = [replace(cell, problem=replace(cell.problem, operation=operation)) for cell in GRIDS[operation][grid]()]
    return found


def is_decode(workload: Workload) -> bool:
    """Whether a workload has one query token, so that its speed is told in GB/s."""
    return workload.len_q == 1
