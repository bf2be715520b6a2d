"""A comparison as tables and sentences: for the terminal, and as Markdown."""

from __future__ import annotations

import re

from ..bench.report import FAILED, NONE, Table, markdown_list, markdown_table
from .result import CellComparison, ComparedRow, Comparison

OUT_OF_MEMORY, NOT_PREDICTED = "out of memory", "not predicted"
COLUMNS = [
    ("", False),
    ("us [10..90 %]", True),
    ("TFLOP/s", True),
    ("peak beyond inputs MB", True),
    ("with inputs MB", True),
    ("formula MB", True),
    ("counted MB", True),
    ("memory MB", True),
    ("FLOP/B", True),
    ("bound by", False),
]
SOME = 4  # cells that a sentence names one by one


def comparison_heading(result: Comparison) -> str:
    """Where the figures come from, and the roofline."""
    limits = f"{result.roofline.flops / 1e12:.0f} TFLOP/s, {result.roofline.bandwidth / 1e9:.0f} GB/s"
    e = result.environment
    if e is None:
        return f"{result.device}: PREDICTED by the families' models, nothing was measured; roofline {limits}"
    return (
        f"{result.device}, driver {e.driver}; flashgen {e.flashgen}, PyTorch {e.torch}, cuDNN {e.cudnn}, NVRTC {e.nvrtc}; roofline {limits}"
    )


def comparison_tables(result: Comparison) -> list[tuple[str, Table]]:
    """For each cell, what its sizes say in a sentence, and its rows."""
    return [(_sizes(cell), _table(cell, result)) for cell in result.cells]


def _table(cell: CellComparison, result: Comparison) -> Table:
    return Table(f"{cell.grid}: {cell.name}", COLUMNS, [_line(cell, row, result) for row in cell.rows])


def _sizes(cell: CellComparison) -> str:
    b = cell.bounds
    return (
        f"{cell.flops / 1e9:.1f} GFLOP; each operand of a call once {_mb(b.compulsory)} MB, Theta(Nd + N^2) {_mb(b.quadratic)} MB, "
        f"Theta(N^2 d^2 / M) {_mb(b.tiled)} MB"
    )


def _line(cell: CellComparison, row: ComparedRow, result: Comparison) -> list[str]:
    if row.ms is None:
        return [_label(row), _missing(row, result), *[NONE] * (len(COLUMNS) - 2)]
    ms, flops, intensity = row.ms, cell.flops_per_second(row), cell.intensity(row)
    spread = "" if result.predicted else f" [{ms.low * 1e3:.1f}..{ms.high * 1e3:.1f}]"
    counted = row.counted
    total = None if row.peak_bytes is None else row.peak_bytes + cell.input_bytes
    return [
        _label(row),
        f"{ms.median * 1e3:.1f}{spread}",
        NONE if flops is None else f"{flops / 1e12:.1f}",
        _mb(row.peak_bytes),
        _mb(total),
        _mb(row.moved_bytes),
        _mb(None if counted is None else counted.read + counted.written + counted.reduced),
        _mb(None if counted is None else counted.memory_read + counted.memory_written),
        NONE if intensity is None else f"{intensity:.0f}",
        NONE if intensity is None else result.roofline.bound(intensity),
    ]


def _label(row: ComparedRow) -> str:
    """Who it is, with which backward pass, or in whose place."""
    if row.stands_for:
        return f"{row.name}, for {', '.join(row.stands_for)}"
    return f"{row.name} + {row.backward}" if row.backward else row.name


def _missing(row: ComparedRow, result: Comparison) -> str:
    """What is in place of a time; the summary says more."""
    if not row.error:
        return NONE
    if result.predicted:
        return NOT_PREDICTED
    return OUT_OF_MEMORY if re.search(r"out.?of.?memory", row.error, re.IGNORECASE) else FAILED


def _mb(size: float | None) -> str:
    if size is None:
        return NONE
    return f"{size / 1e6:.0f}" if size >= 1e8 else f"{size / 1e6:.2f}"


def comparison_summary(result: Comparison) -> list[str]:
    """How memory grows, what the columns mean, and everything that is missing with its reason."""
    lines = []
    for grid, operation, exponents in result.memory_growth():
        where = f"{grid}, with backward" if operation == "backward" else grid
        grows = ", ".join(f"{name} {exponent:.2f}" for name, exponent in exponents.items())
        lines.append(f"peak memory beyond the inputs grows with the length ({where}) by the power of: {grows}")
    lines += _about_backward(result) + _about_bytes(result)
    failed: dict[tuple[str, str], list[str]] = {}
    for cell in result.cells:
        for row in cell.rows:
            if row.error:
                failed.setdefault((row.name, row.error), []).append(cell.name)
    for (name, why), cells in failed.items():
        there = sum(row.name == name for cell in result.cells for row in cell.rows)
        where = "" if len(cells) == there else f"; in {_some(list(dict.fromkeys(cells)))}"
        lines.append(f"{name}: {why}{where}")
    if not result.complete:
        lines.append("the run was stopped before its end")
    return lines


def _about_backward(result: Comparison) -> list[str]:
    """What a call is in the cells with a backward pass, and who stands for whom."""
    cells = [cell for cell in result.cells if cell.with_backward]
    if not cells:
        return []
    lines = [
        "with backward: a forward pass, which saves out and lse, and its backward pass; inputs are q, k, v and d_out, gradients are not"
    ]
    standing = {rung: row.name for cell in cells for row in cell.rows for rung in row.stands_for}
    return lines + [f"{rung} has no backward pass: with backward, {name} stands for it" for rung, name in standing.items()]


def _about_bytes(result: Comparison) -> list[str]:
    lines = ["formula: bytes that the algorithm's loops move between SMs and the L2; FLOP/B and bound by: as if all came from memory"]
    if result.predicted:
        return lines
    if result.no_counters:
        return [*lines, f"bytes were not counted: {result.no_counters}"]
    return [*lines, "counted: the same by hardware counters; memory: between the L2 and the device's memory, by counters"]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= SOME else f"{len(names)} cells, the first {names[0]}"


def comparison_page(result: Comparison) -> str:
    """The whole comparison as a page."""
    parts = ["# flashgen compare", comparison_heading(result)]
    if result.environment is not None:
        parts.append(f"```sh\n{result.environment.command}\n```")
    for sizes, table in comparison_tables(result):
        parts += [f"## {table.title}", sizes, markdown_table(table)]
    return "\n\n".join([*parts, "## Summary", markdown_list(comparison_summary(result))]) + "\n"
