"""`flashgen compare`: options, the tables, and what is written to a folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashgen import tuning
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import FlashgenError, require_int
from flashgen.compare import files, report, shapes
from flashgen.compare.result import Comparison
from flashgen.timing.spread import ROUNDS

from .options import INTEGER, Json, print_json, print_table
from .progress import Bars


def compare(
    grid: Annotated[
        str | None, typer.Option("--grid", help=f"Shapes by name, separated by commas: {', '.join(shapes.GRIDS)}. Default: all.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", help="Who takes part, separated by commas: kernel families, and the peers of bench.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", **INTEGER, help="How often each is timed in a cell.")] = ROUNDS,
    device: Annotated[
        str | None,
        typer.Option("--device", help="A GPU's ordinal, or a known device to predict for, such as h200. Default: the GPU here, else h200."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for compare.json, compare.md and plots.")] = None,
    json: Json = False,
) -> None:
    """Compare time, memory and traffic of the ladder's algorithms, and of PyTorch's. Without a GPU: predicted.

    Exit code 1 if nobody has a time.
    """
    from flashgen.bench.peers import parse_peers  # it loads PyTorch

    cells = shapes.compared_cells(grid)
    require_int("rounds", rounds, 1, 1000)
    on = tuning.named_or_here(device)
    usual = shapes.RUNGS if isinstance(on, Device) else (*shapes.RUNGS, *shapes.OTHERS)  # what PyTorch does has no model
    names = list(usual) if peers is None else parse_peers(peers)
    if out is not None:
        files.prepare_folder(out)
    if isinstance(on, Device):
        from flashgen.compare.predicted import predict

        result = predict(cells, names, on)
    else:
        from flashgen.build.gpu.driver import gpu
        from flashgen.compare.measured import measure

        def save(result: Comparison) -> None:
            if out is not None:
                files.save_comparison(result, out)

        with Bars(quiet=json) as bars:
            result = measure(cells, names, gpu(on), rounds, shlex.join(["flashgen", *sys.argv[1:]]), bars, save)
    if out is not None:
        _save(result, out)
    _show(result, json)
    if not any(row.ms for cell in result.cells for row in cell.rows):
        raise typer.Exit(1)


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
