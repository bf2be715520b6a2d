"""`flashgen compare`: options, the tables, and what is written to a folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashgen import tuning
from flashgen.cells import Cell
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import FlashgenError, require_int
from flashgen.codegen.operations import BOTH
from flashgen.compare import files, report, shapes
from flashgen.compare.result import Comparison
from flashgen.timing.spread import ROUNDS

from .options import INTEGER, Json, print_json, print_table
from .progress import Bars


def compare(
    grid: Annotated[
        str | None, typer.Option("--grid", help=f"Shapes by name, separated by commas: {', '.join(shapes.GRIDS)}. Default: all.")
    ] = None,
    passes: Annotated[
        str, typer.Option("--pass", help="forward; backward, which is a forward pass followed by its backward pass; or both.")
    ] = BOTH,
    peers: Annotated[
        str | None, typer.Option("--peers", help="Who takes part, separated by commas: kernel families, and the peers of bench.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", **INTEGER, help="How often each is timed in a cell.")] = ROUNDS,
    counters: Annotated[
        bool, typer.Option("--counters/--no-counters", help="Whether Nsight Compute counts bytes, where ncu is on PATH.")
    ] = True,
    device: Annotated[
        str | None,
        typer.Option("--device", help="A GPU's ordinal, or a known device to predict for, such as h200. Default: the GPU here, else h200."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for compare.json, compare.md and plots.")] = None,
    json: Json = False,
) -> None:
    """Compare time, memory and traffic of the ladder's algorithms, and of PyTorch's, forward and with gradients. Without a GPU: predicted.

    Exit code 1 if nobody has a time.
    """
    from flashgen.bench.peers import parse_peers  # it loads PyTorch

    cells = shapes.compared_cells(grid, passes)
    require_int("rounds", rounds, 1, 1000)
    on = tuning.named_or_here(device)
    usual = shapes.RUNGS if isinstance(on, Device) else (*shapes.RUNGS, *shapes.OTHERS)  # what PyTorch does has no model
    names = list(usual) if peers is None else parse_peers(peers)
    if out is not None:
        files.prepare_folder(out)
    code = 0
    if isinstance(on, Device):
        from flashgen.compare.predicted import predict

        result = predict(cells, names, on)
    else:
        result, code = _measured(cells, names, on, rounds, counters, out, json)
    if out is not None:
        _save(result, out)
    _show(result, json)
    if code or not any(row.ms for cell in result.cells for row in cell.rows):
        raise typer.Exit(code or 1)


def _measured(
    cells: dict[str, list[Cell]], names: list[str], ordinal: int, rounds: int, counters: bool, out: Path | None, json: bool
) -> tuple[Comparison, int]:
    """What was measured, all of it or until it was stopped, and the exit code that says which."""
    from flashgen.build.gpu.driver import gpu
    from flashgen.compare.counters import find_profiler
    from flashgen.compare.measured import Measurement

    with Bars(quiet=json) as bars:
        profiler = find_profiler() if counters else None
        measurement = Measurement(names, gpu(ordinal), rounds, shlex.join(["flashgen", *sys.argv[1:]]), profiler)
        try:
            measurement.run(cells, bars, lambda result: files.save_comparison(result, out) if out is not None else None)
            return measurement.result, 0
        except KeyboardInterrupt:
            print("flashgen: stopped; what was measured so far follows", file=sys.stderr)
            return measurement.result, 130
        except FlashgenError as error:  # the GPU is lost, what it gave before is not
            print(f"flashgen: {error}", file=sys.stderr)
            return measurement.result, 1


def _save(result: Comparison, out: Path) -> None:
    written = files.save_comparison(result, out)
    try:
        written += files.draw_comparison(result, out)
    except FlashgenError as error:
        print(f"flashgen: {error}", file=sys.stderr)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def _show(result: Comparison, json: bool) -> None:
    if json:
        print_json(result.to_json())
        return
    print(report.comparison_heading(result))
    for sizes, table in report.comparison_tables(result):
        print(f"\n{table.title}: {sizes}")
        print_table(table.columns, table.rows)
    print()
    for line in report.comparison_summary(result):
        print(line)
