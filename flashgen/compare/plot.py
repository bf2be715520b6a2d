"""A comparison as figures: time and memory against the length, and the roofline with everybody on it. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .result import CellComparison, ComparedRow, Comparison
from .shapes import LENGTHS_GRID

_DPI = 150


def comparison_figures(result: Comparison) -> dict[str, bytes]:
    """PNG images by name: `lengths` where there are cells of that grid, and `roofline` where somebody has a formula and a time."""
    found = {}
    if lengths := [cell for cell in result.cells if cell.grid == LENGTHS_GRID]:
        found["lengths"] = _png(draw_lengths(result, lengths))
    if any(cell.intensity(row) and row.ms for cell in result.cells for row in cell.rows):
        found["roofline"] = _png(draw_roofline(result))
    return found


def draw_lengths(result: Comparison, cells: list[CellComparison]) -> Figure:
    """Time and peak memory against the length, both axes logarithmic."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    time, memory = figure.subplots(1, 2)
    _curves(time, result, cells, lambda row: row.ms.median if row.ms else None)
    _curves(memory, result, cells, lambda row: row.peak_bytes / 1e6 if row.peak_bytes else None)
    time.set(title="time of a call", ylabel="ms")
    memory.set(title="peak memory beyond the inputs", ylabel="MB")
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    problem, workload = cells[0].cell.problem, cells[0].cell.workload
    figure.suptitle(f"{_where(result)}\n{problem.name}, batch {workload.batch}, {workload.heads_q} heads")
    return figure


def _curves(ax: Axes, result: Comparison, cells: list[CellComparison], value: Callable[[ComparedRow], float | None]) -> None:
    for i, name in enumerate(result.names):
        points = [(c.cell.workload.len_q, y) for c in cells for row in c.rows if row.name == name and (y := value(row))]
        if points:
            ax.plot(*zip(*points, strict=True), marker=_marker(i), color=_colour(i), label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("length of q and of k and v")
    ax.grid(visible=True, which="major", alpha=0.3)


def draw_roofline(result: Comparison) -> Figure:
    """FLOP a second against FLOP a byte by the algorithm's formula: a point for each cell of whoever has a formula."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    ax = figure.subplots()
    most = 1.0
    for i, name in enumerate(result.names):
        rows = [(cell, row) for cell in result.cells for row in cell.rows if row.name == name]
        points = [(x, y / 1e12) for cell, row in rows if (x := cell.intensity(row)) and (y := cell.flops_per_second(row))]
        if points:
            ax.scatter(*zip(*points, strict=True), marker=_marker(i), color=_colour(i), label=name)
            most = max(most, *(x for x, _ in points))
    roof = result.roofline
    xs = [1.0, roof.flops / roof.bandwidth, max(2 * most, 2 * roof.flops / roof.bandwidth)]
    ax.plot(xs, [roof.attainable(x) / 1e12 for x in xs], color="grey", label="device memory and tensor cores")
    ax.set(xscale="log", yscale="log", xlabel="FLOP a byte, by the algorithm's loops", ylabel="TFLOP/s")
    ax.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(_where(result))
    return figure


def _where(result: Comparison) -> str:
    return f"{result.device}{', predicted' if result.predicted else ''}"


def _colour(i: int) -> object:
    return colormaps["tab20"](i % 20)


def _marker(i: int) -> str:
    return "os^vD<>pP*Xh"[i % 12]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
