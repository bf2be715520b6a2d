"""A comparison as figures: time and memory against the length, and the roofline with everybody on it. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .result import CellComparison, ComparedRow, Comparison
from .shapes import CAUSAL_LENGTHS_GRID, LENGTHS_GRID

_DPI = 150


def comparison_figures(result: Comparison) -> dict[str, bytes]:
    """PNG images by name: one for each grid of lengths that has cells, and `roofline` where somebody has a formula and a time."""
    found = {}
    for grid in (LENGTHS_GRID, CAUSAL_LENGTHS_GRID):
        if lengths := [cell for cell in result.cells if cell.grid == grid]:
            found[grid] = _png(draw_lengths(result, lengths))
    if any(cell.intensity(row) and row.ms for cell in result.cells for row in cell.rows):
        found["roofline"] = _png(draw_roofline(result))
    return found


def draw_lengths(result: Comparison, cells: list[CellComparison]) -> Figure:
    """Time and peak memory against the length, all axes logarithmic: of the forward pass, and in a row below with the backward pass."""
    rows = [some for backward in (False, True) if (some := [cell for cell in cells if cell.with_backward is backward])]
    figure = Figure(figsize=(12, 1 + 4.5 * len(rows)), layout="constrained")
    handles: dict[str, Artist] = {}
    for (time, memory), some in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        passes = "forward with backward" if some[0].with_backward else "forward"
        _curves(time, result, some, lambda row: row.ms.median if row.ms else None)
        _curves(memory, result, some, lambda row: row.peak_bytes / 1e6 if row.peak_bytes else None)
        time.set(title=f"{passes}: time of a call", ylabel="ms")
        memory.set(title=f"{passes}: peak memory beyond the inputs", ylabel="MB")
        handles |= {label: handle for handle, label in zip(*time.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4)
    problem, workload = cells[0].cell.problem, cells[0].cell.workload
    figure.suptitle(f"{_where(result)}\n{problem.variant}, batch {workload.batch}, {workload.heads_q} heads")
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
