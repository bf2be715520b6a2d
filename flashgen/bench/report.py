"""A result as tables and sentences: for the terminal, and as Markdown for a page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ..timing.spread import Spread
from .relative import problem_name
from .result import BenchResult, CellResult

FAILED, NONE = "failed", "-"


@dataclass(frozen=True)
class Table:
    """Columns are (heading with its unit, whether it holds numbers)."""

    title: str
    columns: list[tuple[str, bool]]
    rows: list[list[str]]


def tables(result: BenchResult) -> list[Table]:
    """One a grid and unit, and one of the CPU's cost if that was measured."""
    ordered = sorted(range(len(result.cells)), key=lambda i: _group(result)[i])
    groups = groupby((result.cells[i] for i in ordered), key=lambda cell: (cell.grid, cell.unit))
    found = [_grid_table(result, grid, unit, list(cells)) for (grid, unit), cells in groups]
    if result.call_overhead or result.call_overhead_errors:
        found.append(_call_overhead_table(result))
    return found


def _group(result: BenchResult) -> list[int]:
    """For each cell, which of the (grid, unit) pairs it has, counted in the order of their first cells."""
    pairs = [(cell.grid, cell.unit) for cell in result.cells]
    numbers = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    return [numbers[pair] for pair in pairs]


def _grid_table(result: BenchResult, grid: str, unit: str, cells: list[CellResult]) -> Table:
    subject, baseline = result.subject, result.baseline
    columns = [("problem", False), ("workload", False), *((f"{peer} {unit}", True) for peer in result.peers)]
    if baseline is not None and baseline != subject:
        columns.append((f"{subject} / {baseline} x [10..90 %]", True))
    columns += [(f"{subject} / best other x [10..90 %]", True), ("best other", False)]
    rows = []
    for cell in cells:
        best = cell.best(subject)
        row = [problem_name(cell.cell.problem), cell.cell.workload.name, *(_speed(cell, peer) for peer in result.peers)]
        if baseline is not None and baseline != subject:
            row.append(_ratio(cell.ratio(subject, baseline)))
        rows.append([*row, _ratio(cell.ratio(subject, best)), best or NONE])
    return Table(grid, columns, rows)


def _speed(cell: CellResult, peer: str) -> str:
    speed = cell.speed(peer)
    if speed is None:
        return FAILED if peer in cell.errors else NONE
    return f"{speed.median:.0f}" if speed.median >= 100 else f"{speed.median:.1f}"


def _ratio(ratio: Spread | None) -> str:
    return NONE if ratio is None else f"{ratio.median:.3f} [{ratio.low:.3f}..{ratio.high:.3f}]"


def _call_overhead_table(result: BenchResult) -> Table:
    columns = [("peer", False), ("us a call, gradients off", True), ("us a call, gradients on", True), ("us with backward", True)]
    rows = []
    for peer in result.peers:
        cost = result.call_overhead.get(peer)
        missing = FAILED if peer in result.call_overhead_errors else NONE
        measured = (cost.us, cost.us_grad, cost.us_backward) if cost else (None,) * 3
        rows.append([peer, *(f"{us:.1f}" if us is not None else NONE if cost else missing for us in measured)])
    return Table("CPU cost of one eager call", columns, rows)


def summary(result: BenchResult) -> list[str]:
    """Means, the worst cells, and everything that is missing with its reason."""
    lines = [
        f"{s.subject} / {s.against}: geometric mean {s.geometric_mean:.3f} x over {s.cells} cells, worst {s.worst:.3f} x in {s.worst_cell}"
        for s in result.summaries()
    ]
    lines += [f"{peer} is absent: {why}" for peer, why in result.absent.items()]
    failed: dict[tuple[str, str], list[str]] = {}
    for cell in result.cells:
        for peer, why in cell.errors.items():
            failed.setdefault((peer, why), []).append(f"{cell.name} ({cell.grid})")
    lines += [f"{peer} failed: {why}; in {_some(names)}" for (peer, why), names in failed.items()]
    lines += [f"{peer} failed: {why}; in the CPU cost of a call" for peer, why in result.call_overhead_errors.items()]
    if not result.complete:
        lines.append("the run was stopped before its end")
    return lines


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} cells, the first {names[0]}"


def heading(result: BenchResult) -> str:
    """What was measured with, in one sentence."""
    e = result.environment
    packages = "".join(f", {name} {version}" for name, version in e.packages.items())
    return (
        f"{e.device}, driver {e.driver}; flashgen {e.flashgen}, PyTorch {e.torch}, cuDNN {e.cudnn}, NVRTC {e.nvrtc}{packages}; "
        f"{result.operation}, {result.rounds} rounds, {e.date}"
    )


def markdown(result: BenchResult) -> str:
    """The whole result as a page."""
    parts = ["# flashgen bench", heading(result), f"```sh\n{result.environment.command}\n```"]
    for table in tables(result):
        parts += [f"## {table.title}", markdown_table(table)]
    if lines := summary(result):
        parts += ["## Summary", markdown_list(lines)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A table for a page."""
    rules = ["---:" if numeric else "---" for _, numeric in table.columns]
    rows = [[heading for heading, _ in table.columns], rules, *table.rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows)


def markdown_list(lines: list[str]) -> str:
    """Sentences for a page."""
    return "\n".join(f"- {_escape(line)}" for line in lines)


def _escape(text: str) -> str:
    """Errors may hold anything, and must not break a row."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
