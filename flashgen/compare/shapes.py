"""What is compared: the named grids of cells, the passes, and who takes part.

A cell of the operation backward stands for a forward pass followed by its backward pass: a layer in training needs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from flashgen.codegen.errors import choice_error
from flashgen.codegen.family import families
from flashgen.codegen.operations import BOTH
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

from ..bench import cells as bench_cells
from ..cells import Cell

# From standard attention to FlashAttention-3: families of flashgen, in the order of docs/ladder.md.
RUNGS = (
    "standard_attention",
    "memory_efficient_attention",
    "flash1_forward",
    "flash2_forward",
    "attention_forward",
    "attention_forward_sm90",
)
OTHERS = ("eager_fp16", "math", "efficient", "flash", "cudnn", "xformers")  # peers of the benchmark
# The family of a rung's gradients; None: an automatic one, which on Hopper is of Hopper. Rungs that are missing here have no gradients.
BACKWARD_FAMILIES: dict[str, str | None] = {
    "flash1_forward": "flash1_backward",
    "flash2_forward": "flash2_backward",
    "attention_forward": "attention_backward",
    "attention_forward_sm90": None,
}
STAND_IN = "eager_fp16"  # for rungs without gradients
PASSES = {"forward": ("forward",), "backward": ("backward",), BOTH: ("forward", "backward")}  # operations of the cells
LENGTHS = tuple(2**n for n in range(7, 15))  # 128 to 16384
LENGTHS_GRID, CAUSAL_LENGTHS_GRID = "lengths", "lengths_causal"


def _articles() -> list[Cell]:
    """The shapes of two widely read articles on FlashAttention."""
    return bench_cells.grids("tutorial")["tutorial"]


def _lengths(mask: Mask) -> list[Cell]:
    """One sequence of 16 heads, ever longer."""
    return [Cell(Problem(Dtype.FP16, 64, 64, mask), Workload(1, 16, 16, s, s)) for s in LENGTHS]


def _beyond_l2() -> list[Cell]:
    """Each tensor larger than four times the L2 of any known device."""
    return [Cell(Problem(Dtype.FP16, 64, 64), Workload(16, 32, 32, 4096, 4096))]


# As cells of the forward pass.
GRIDS: dict[str, Callable[[], list[Cell]]] = {
    "articles": _articles,
    LENGTHS_GRID: partial(_lengths, Mask.FULL),
    CAUSAL_LENGTHS_GRID: partial(_lengths, Mask.CAUSAL),
    "beyond_l2": _beyond_l2,
}


def compared_cells(names: str | None = None, passes: str = BOTH) -> dict[str, list[Cell]]:
    """The cells of the grids named, which commas separate; of all for None. Raises ArgumentError for an unknown grid or pass."""
    wanted = list(GRIDS) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in GRIDS:
            raise choice_error("grid", name, GRIDS)
    if passes not in PASSES:
        raise choice_error("pass", passes, PASSES)
    return {name: [_of(cell, operation) for operation in PASSES[passes] for cell in GRIDS[name]()] for name in wanted}


def calls_of(cell: Cell) -> tuple[Cell, ...]:
    """The operations that are called in a cell, one after the other."""
    return tuple(_of(cell, operation) for operation in dict.fromkeys(("forward", cell.problem.operation)))


def _of(cell: Cell, operation: str) -> Cell:
    return replace(cell, problem=replace(cell.problem, operation=operation))


def participants(names: Iterable[str], operation: str) -> dict[str, tuple[str, ...]]:
    """Who takes part in the cells of an operation where these are asked for, each with the rungs that it stands for."""
    if operation == "forward":
        return dict.fromkeys(names, ())
    names = list(names)
    rungs = [name for name in names if name in families() and families()[name].operation == "forward" and name not in BACKWARD_FAMILIES]
    found: dict[str, tuple[str, ...]] = dict.fromkeys((name for name in names if name not in rungs), ())
    return found | {STAND_IN: tuple(rungs)} if rungs else found


def all_participants(names: Iterable[str], cells: Iterable[Cell]) -> list[str]:
    """Who takes part in any of the cells, in the order of tables and figures."""
    names = list(names)
    operations = dict.fromkeys(cell.problem.operation for cell in cells)
    return list(dict.fromkeys([*names, *(name for operation in operations for name in participants(names, operation))]))
