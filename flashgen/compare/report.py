"""A comparison as tables and sentences: for the terminal, and as Markdown."""

from __future__ import annotations

from ..bench.report import FAILED, NONE, Table, markdown_list, markdown_table
from .result import CellComparison, ComparedRow, Comparison

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
        f"{cell.cell.flops / 1e9:.1f} GFLOP; each operand once {_mb(b.compulsory)} MB, Theta(Nd + N^2) {_mb(b.quadratic)} MB, "
        f"Theta(N^2 d^2 / M) {_mb(b.tiled)} MB"
    )


def _line(cell: CellComparison, row: ComparedRow, result: Comparison) -> list[str]:
    if row.ms is None:
        return [row.name, FAILED if row.error else NONE, *[NONE] * (len(COLUMNS) - 2)]
    ms, flops, intensity = row.ms, cell.flops_per_second(row), cell.intensity(row)
    spread = "" if result.predicted else f" [{ms.low * 1e3:.1f}..{ms.high * 1e3:.1f}]"
    counted = row.counted
    total = None if row.peak_bytes is None else row.peak_bytes + cell.input_bytes
    return [
        row.name,
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


def _mb(size: float | None) -> str:
    if size is None:
        return NONE
    return f"{size / 1e6:.0f}" if size >= 1e8 else f"{size / 1e6:.2f}"


def comparison_summary(result: Comparison) -> list[str]:
    """How memory grows, what the columns mean, and everything that is missing with its reason."""
    exponents = ", ".join(f"{name} {exponent:.2f}" for name, exponent in result.memory_exponents().items())
    lines = [f"peak memory beyond the inputs grows with the length by the power of: {exponents}"] if exponents else []
    lines.append("formula: bytes that the algorithm's loops move between SMs and the L2; FLOP/B and bound by: as if all came from memory")
    if result.no_counters and not result.predicted:
        lines.append(f"bytes were not counted: {result.no_counters}")
    elif not result.predicted:
        lines.append("counted: the same by hardware counters; memory: between the L2 and the device's memory, by counters")
    failed: dict[tuple[str, str], list[str]] = {}
    for cell in result.cells:
        for row in cell.rows:
            if row.error:
                failed.setdefault((row.name, row.error), []).append(cell.name)
    for (name, why), cells in failed.items():
        where = "" if len(cells) == len(result.cells) else f"; in {', '.join(dict.fromkeys(cells))}"
        lines.append(f"{name}: {why}{where}")
    if not result.complete:
        lines.append("the run was stopped before its end")
    return lines


def comparison_page(result: Comparison) -> str:
    """The whole comparison as a page."""
    parts = ["# flashgen compare", comparison_heading(result)]
    if result.environment is not None:
        parts.append(f"```sh\n{result.environment.command}\n```")
    for sizes, table in comparison_tables(result):
        parts += [f"## {table.title}", sizes, markdown_table(table)]
    return "\n\n".join([*parts, "## Summary", markdown_list(comparison_summary(result))]) + "\n"
