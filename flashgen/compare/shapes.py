"""What is compared: the named grids of cells, and who takes part."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.codegen.errors import choice_error
from flashgen.codegen.problem import Dtype, Problem
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
LENGTHS = tuple(2**n for n in range(7, 15))  # 128 to 16384
LENGTHS_GRID = "lengths"


def _articles() -> list[Cell]:
    """The shapes of two widely read articles on FlashAttention."""
    return bench_cells.grids("tutorial")["tutorial"]


def _lengths() -> list[Cell]:
    """One sequence of 16 heads, ever longer."""
    return [Cell(Problem(Dtype.FP16, 64, 64), Workload(1, 16, 16, s, s)) for s in LENGTHS]


def _beyond_l2() -> list[Cell]:
    """Each tensor larger than four times the L2 of any known device."""
    return [Cell(Problem(Dtype.FP16, 64, 64), Workload(16, 32, 32, 4096, 4096))]


GRIDS: dict[str, Callable[[], list[Cell]]] = {"articles": _articles, LENGTHS_GRID: _lengths, "beyond_l2": _beyond_l2}


def compared_cells(names: str | None = None) -> dict[str, list[Cell]]:
    """The cells of the grids named, which commas separate; of all for None. Raises ArgumentError for an unknown one."""
    wanted = list(GRIDS) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in GRIDS:
            raise choice_error("grid", name, GRIDS)
    return {name: GRIDS[name]() for name in wanted}
