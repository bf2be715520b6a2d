"""`flashgen bench`: options, the tables, and what is written to a folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.bench import cells as bench_cells
from flashgen.bench import files, report
from flashgen.bench.caches import io_bytes
from flashgen.bench.documents import flops
from flashgen.bench.relative import problem_name
from flashgen.bench.result import BenchResult
from flashgen.cells import SEQLENS, cells_of
from flashgen.codegen.errors import ArgumentError, FlashgenError, require_int
from flashgen.codegen.family import require_possible
from flashgen.codegen.plain import to_plain
from flashgen.codegen.spec import problem_to_json
from flashgen.timing.spread import ROUNDS

from .options import (
    INTEGER,
    Batch,
    CausalOrBoth,
    Chunk,
    DtypeName,
    HeadDimV,
    Heads,
    Json,
    KvHeads,
    Modifiers,
    OnePass,
    Seqlen,
    SeqlenKv,
    Softcap,
    Window,
    named_modifiers,
    parse_window,
    print_json,
    print_table,
)
from .progress import Bars

if TYPE_CHECKING:  # PyTorch is loaded only when something is measured
    from flashgen.bench.session import BenchRequest

GRIDS_OF_PASSES = "; ".join(f"of {operation} {', '.join(bench_cells.grid_names(operation))}" for operation in bench_cells.GRIDS)


def bench(
    grid: Annotated[
        str | None, typer.Option("--grid", help=f"Cells by name, separated by commas: {GRIDS_OF_PASSES}. Default: standard.")
    ] = None,
    operation: OnePass = "forward",
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", **INTEGER, help="One workload by hand instead of a grid: width of q and k.")
    ] = None,
    head_dim_v: HeadDimV = 0,
    dtype: DtypeName = "bf16",
    causal: CausalOrBoth = None,
    seqlen: Seqlen = None,
    seqlen_kv: SeqlenKv = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    window: Window = None,
    chunk: Chunk = None,
    softcap: Softcap = None,
    modifiers: Modifiers = None,
    peers: Annotated[
        str | None,
        typer.Option("--peers", help="Separated by commas; kernel families, too. Default: flashgen, flash, cudnn, flex, fa4, xformers."),
    ] = None,
    baseline: Annotated[str | None, typer.Option("--baseline", help="The peer that ratios are against. Default: flash.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", **INTEGER, help="How often each peer is timed in a cell.")] = ROUNDS,
    call_overhead: Annotated[
        bool,
        typer.Option(
            "--call-overhead", "--host", help="Measure the CPU cost of one eager call: beside the cells if some are asked for, else alone."
        ),
    ] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Tune flashgen for the cells first.")] = False,
    device: Annotated[int, typer.Option("--device", **INTEGER, help="Ordinal of the GPU.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for bench.json, bench.md and plots; those of an earlier run, unaltered, are replaced."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show, and with --out write and draw, a bench.json. Needs no GPU.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List cells and peers; measure nothing.")] = False,
    json: Json = False,
) -> None:
    """Time attention implementations side by side on this GPU. Exit code 1 if flashgen failed in a cell, or nothing was timed."""
    workload = _given(
        {"seqlen": seqlen, "seqlen-kv": seqlen_kv, "batch": batch, "heads": heads, "kv-heads": kv_heads, "head-dim-v": head_dim_v or None}
        | {"causal": causal is not None, "dtype": dtype != "bf16", "window": window, "chunk": chunk, "softcap": softcap}
        | {"modifiers": modifiers}
    )
    if source is not None:
        measuring = {
            "grid": grid,
            "pass": operation != "forward",
            "head-dim": head_dim,
            "peers": peers,
            "baseline": baseline,
            "call-overhead": call_overhead,
            "tune": tune,
        }
        if others := _given(measuring | {"dry-run": dry_run}) + workload:
            raise ArgumentError(f"from must stand without options of measuring; got {', '.join(others)} as well")
        result = files.read_result(source)
        if out is not None:
            files.make_folder(out, result)
        _finish(result, out, json)
        return
    bench_cells.grid_names(operation)  # raises for both passes, of which a cell times one
    if call_overhead and operation != "forward":
        raise ArgumentError(f"pass must be forward with call_overhead, which measures forward calls, gradients off and on; got {operation}")
    if head_dim is not None:
        if grid is not None:
            raise ArgumentError(f"grid must stand without head_dim; got grid {grid} and head_dim {head_dim}")
        sizes = (tuple(seqlen or SEQLENS), seqlen_kv, batch, heads, kv_heads)
        modified = parse_window(window), named_modifiers(softcap, modifiers), chunk
        cells = {bench_cells.BY_HAND: cells_of(head_dim, head_dim_v or None, dtype, causal, *sizes, operation, False, *modified)}
    elif workload:
        raise ArgumentError(f"head_dim must be given with options of one workload; got {', '.join(workload)} without it")
    else:
        cells = {} if call_overhead and grid is None else bench_cells.grids(bench_cells.STANDARD if grid is None else grid, operation)

    from flashgen.bench.peers import parse_peers
    from flashgen.bench.session import BenchRequest

    require_int("device", device, 0)
    names = parse_peers(peers)
    if bench_cells.OURS in names:
        for problem in {cell.problem: None for some in cells.values() for cell in some}:
            require_possible(problem)
    command = shlex.join(["flashgen", *sys.argv[1:]])
    wanted = BenchRequest(cells, names, baseline, rounds, device, call_overhead, tune, command)
    if dry_run:
        _print_dry_run(wanted, json)
    else:
        _measure(wanted, out, json)


def _given(options: Mapping[str, object]) -> list[str]:
    """The options that were given, as they are written."""
    return [f"--{name}" for name, value in options.items() if not (value is None or value is False or value == [])]


def _measure(request: BenchRequest, out: Path | None, json: bool) -> None:
    from flashgen.bench.session import Session

    with Bars(quiet=json) as bars:
        session = Session.here(request, bars)
        if out is not None:
            files.make_folder(out)
        try:
            session.run(lambda result: files.save(result, out) if out is not None else None)
            code = 0
        except KeyboardInterrupt:
            print("flashgen: stopped; what was measured so far follows", file=sys.stderr)
            code = 130
        except FlashgenError as error:  # the GPU is lost, what it gave before is not
            print(f"flashgen: {error}", file=sys.stderr)
            code = 1
    _finish(session.result, out, json)
    if code or _failed(session.result):
        raise typer.Exit(code or 1)


def _failed(result: BenchResult) -> bool:
    ours = any("flashgen" in cell.errors or not cell.times for cell in result.cells)
    return ours or "flashgen" in result.call_overhead_errors or not (result.cells or result.call_overhead)


def _finish(result: BenchResult, out: Path | None, json: bool) -> None:
    """The tables or the JSON on stdout, and everything in the folder: the one, too, where the other cannot be written."""
    try:
        _show(result, json)
        sys.stdout.flush()
    finally:
        if out is not None:
            _save(result, out)


def _save(result: BenchResult, out: Path) -> None:
    written = files.save(result, out)
    try:
        written += files.draw(result, out)
    except files.PlotError as error:
        print(f"flashgen: {error}", file=sys.stderr)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def _show(result: BenchResult, json: bool) -> None:
    if json:
        print_json(result.to_json())
        return
    print(report.heading(result))
    for table in report.tables(result):
        print(f"\n{table.title}")
        print_table(table.columns, table.rows)
    if lines := report.summary(result):
        print()
    for line in lines:
        print(line)


def _print_dry_run(request: BenchRequest, json: bool) -> None:
    from flashgen.bench.peers import make_peers

    made, absent = make_peers(request.peers)
    cells = [(grid, cell) for grid, cells in request.cells.items() for cell in cells]
    if json:
        facts = [{"grid": grid, "problem": problem_to_json(cell.problem), "workload": to_plain(cell.workload)} for grid, cell in cells]
        print_json(
            {"cells": facts, "peers": list(made), "absent": absent, "baseline": request.baseline, "call_overhead": request.call_overhead}
        )
        return
    print_table(
        (("grid", False), ("problem", False), ("workload", False), ("GFLOP", True), ("MB", True)),
        [[grid, problem_name(c.problem), c.workload.name, f"{flops(c) / 1e9:.1f}", f"{io_bytes(c) / 1e6:.1f}"] for grid, c in cells],
    )
    print()
    print_table((("peer", False), ("can be imported", False)), [[name, absent.get(name, "yes")] for name in request.peers])
