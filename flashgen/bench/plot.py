"""A result as figures: one for each grid and unit, one panel a problem, bars of speed by workload. Needs matplotlib."""

from __future__ import annotations

import io
from dataclasses import replace

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import OPEN, Workload

from .result import BenchResult, CellResult

# A peer keeps its colour from figure to figure, whoever else takes part.
_COLOURS = ("flashgen", "flash", "cudnn", "flex", "fa4", "xformers", "efficient", "math")
_PANEL = (6.0, 3.2)  # inches
_DPI = 150


def figures(result: BenchResult) -> dict[str, bytes]:
    """PNG images by name: the grid's, with the unit where a grid has two. Cells without a time are left out."""
    cells = [cell for cell in result.cells if cell.times]
    found = {}
    for grid in dict.fromkeys(cell.grid for cell in cells):
        units = list(dict.fromkeys(cell.unit for cell in cells if cell.grid == grid))
        for unit in units:
            name = grid if len(units) == 1 else f"{grid}-{unit.replace('/', '-per-')}"
            found[name] = _png(draw_grid(result, grid, unit, [cell for cell in cells if (cell.grid, cell.unit) == (grid, unit)]))
    return found


def draw_grid(result: BenchResult, grid: str, unit: str, cells: list[CellResult]) -> Figure:
    """The figure of cells of one grid and unit: rows are dtypes and head dims, columns masks."""
    widths = list(dict.fromkeys(_width(cell.cell.problem) for cell in cells))
    masks = list(dict.fromkeys(_mask(cell) for cell in sorted(cells, key=lambda cell: list(Mask).index(cell.cell.problem.mask))))
    figure = Figure(figsize=(_PANEL[0] * len(masks), _PANEL[1] * len(widths) + 1), layout="constrained")
    panels = figure.subplots(len(widths), len(masks), squeeze=False)
    peers = [peer for peer in result.peers if any(peer in cell.times for cell in cells)]
    for row, width in enumerate(widths):
        for column, mask in enumerate(masks):
            mine = [cell for cell in cells if (_width(cell.cell.problem), _mask(cell)) == (width, mask)]
            mine.sort(key=_length)
            _panel(panels[row][column], f"{width}, {mask}", unit, mine, peers)
    most = max(len(ax.get_xticks()) for ax in figure.axes if ax.get_visible())
    for ax in figure.axes:
        ax.set_xlim(-0.5, most - 0.5)  # bars are as wide in every panel
    handles = {label: bar for ax in figure.axes for bar, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([handles[peer] for peer in peers], peers, loc="outside lower center", ncols=len(peers))
    figure.suptitle(f"{result.environment.device}, {result.operation}, {grid}\nmedian and 10 to 90 % of {result.rounds} rounds")
    return figure


def _width(problem: Problem) -> str:
    mixed = f" / {problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else ""
    return f"{problem.dtype.value}, head dim {problem.head_dim}{mixed}"


def _mask(cell: CellResult) -> str:
    """The mask, or a window with its ends, and chunks with their keys."""
    problem, workload = cell.cell.problem, cell.cell.workload
    whole = _whole(workload)
    mask = replace(workload, chunk=OPEN).name.removeprefix(f"{whole.name} W") if workload.has_window else ""
    chunks = f" chunk {workload.chunk}" if workload.chunk != OPEN else ""
    return (f"window {mask}" if mask else problem.mask.value) + chunks


def _whole(workload: Workload) -> Workload:
    """Without what makes attention local."""
    return replace(workload, window_left=OPEN, window_right=OPEN, chunk=OPEN)


def _length(cell: CellResult) -> tuple[int, int]:
    return cell.cell.workload.len_q, cell.cell.workload.len_kv


def _panel(ax: Axes, title: str, unit: str, cells: list[CellResult], peers: list[str]) -> None:
    if not cells:
        ax.set_visible(False)
        return
    bar = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        speeds = [(x, speed) for x, cell in enumerate(cells) if (speed := cell.speed(peer))]
        if speeds:
            positions = [x + (i - (len(peers) - 1) / 2) * bar for x, _ in speeds]
            whiskers = [[s.median - s.low for _, s in speeds], [s.high - s.median for _, s in speeds]]
            ax.bar(positions, [s.median for _, s in speeds], bar, yerr=whiskers, color=_colour(peer), label=peer, error_kw={"lw": 0.8})
    ax.set_title(title)
    ax.set_ylabel(unit)
    ax.set_xticks(range(len(cells)), [_label(cell) for cell in cells], fontsize="small")


def _label(cell: CellResult) -> str:
    sizes, length = _whole(cell.cell.workload).name.rsplit(" ", 1)
    return f"{length}\n{sizes}"


def _colour(peer: str) -> object:
    return colormaps["tab10"](_COLOURS.index(peer)) if peer in _COLOURS else "grey"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
