"""`flashgen tune`: options, the table of winners, the page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flashgen import tuning
from flashgen.build.gpu.driver import gpu
from flashgen.cells import SEQLENS, cells_of
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.spec import KernelSpec
from flashgen.tuning import Request, Row, TuneResult
from flashgen.tuning_page.page import require_page_place, tune_page, write_tune_page

from .options import (
    INTEGER,
    NUMBER,
    Arch,
    Batch,
    CausalOrBoth,
    Chunk,
    Deterministic,
    DtypeName,
    FamilyName,
    HeadDim,
    HeadDimV,
    Heads,
    Json,
    KvHeads,
    Modifiers,
    Packed,
    PageSize,
    Passes,
    Seqlen,
    SeqlenKv,
    Settings,
    Softcap,
    Window,
    microseconds,
    named_modifiers,
    parse_settings,
    parse_window,
    print_json,
    print_table,
)
from .progress import Bars

COLUMNS = (
    ("problem", False), ("workload", False), ("time us", True), ("TFLOP/s", True), ("gain x", True), ("registers", True),
    ("spills B", True), ("shared B", True), ("bound by", False), ("tried", True), ("failed", True), ("config", False),
)  # fmt: skip

UNMEASURED = "predicted: no measurement on this device stands behind the model"


def tune(
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = 0,
    dtype: DtypeName = "bf16",
    causal: CausalOrBoth = None,
    passes: Passes = "forward",
    deterministic: Deterministic = False,
    window: Window = None,
    chunk: Chunk = None,
    softcap: Softcap = None,
    modifiers: Modifiers = None,
    packed: Packed = False,
    page_size: PageSize = None,
    seqlen: Seqlen = None,
    seqlen_kv: SeqlenKv = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    device: Annotated[
        str | None, typer.Option("--device", help="A GPU's ordinal, or a known device to predict for, such as h200 or 'RTX 4090'.")
    ] = None,
    arch: Arch = None,
    jobs: Annotated[int, typer.Option("--jobs", **INTEGER, help="Compile threads; 0: all cores, 16 at most.")] = 0,
    budget_seconds: Annotated[
        float | None, typer.Option("--budget-seconds", **NUMBER, help="Begin nothing new after this many seconds.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try all legal configs, not the model's best.")] = False,
    family: FamilyName = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List candidates and refusals; compile and run nothing.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page of the search space and the roofline: a new file that ends in .html or one that it wrote."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find the fastest kernels for your GPU and shapes, and remember them."""
    modified = parse_window(window), named_modifiers(softcap, modifiers), chunk, packed
    lengths, sizes = tuple(seqlen or SEQLENS), (seqlen_kv, batch, heads, kv_heads)
    request = Request(
        cells_of(head_dim, head_dim_v or None, dtype, causal, lengths, *sizes, passes, deterministic, *modified, page_size),
        device=device,
        arch=arch,
        jobs=jobs,
        budget_seconds=budget_seconds,
        exhaustive=exhaustive,
        family=family,
        settings=parse_settings(settings),
    )
    if html is not None:
        if dry_run:
            raise ArgumentError(f"html must be left out of a dry run, which has no times; got {html}")
        require_page_place(html)
    if dry_run:
        _print_dry_run(request, json)
        return
    try:
        with Bars(quiet=json) as bars:
            result = tuning.run(request, bars)
    except KeyboardInterrupt:
        print("flashgen: stopped; what was measured so far is kept, and the next run goes on from there", file=sys.stderr)
        raise typer.Exit(130) from None
    if json:
        print_json(result.to_json())
    else:
        _print_result(result)
    if html is not None:
        write_tune_page(html, tune_page(request, result, _device(request)))
        print(f"wrote {html}", file=sys.stderr)
    if any(row.spec is None for row in result.rows):
        raise typer.Exit(1)


def _print_result(result: TuneResult) -> None:
    columns, rows = list(COLUMNS), [_cells(row) for row in result.rows]
    if not result.timed:
        columns.insert(3, ("time is", False))
        rows = [[*cells[:3], "measured" if row.measured else "predicted", *cells[3:]] for row, cells in zip(result.rows, rows, strict=True)]
    print_table(columns, rows)
    print()
    if result.timed:
        print(f"{result.device}: {result.measured} candidates measured now, the rest from the records, in {result.seconds:.1f} s.")
        print("Gain is the untuned default's time over the winner's.")
    else:
        print(f"{result.device}: nothing was timed; ranked and compiled in {result.seconds:.1f} s.")
        if measured := sum(row.measured for row in result.rows):
            print(f"{measured} of {len(result.rows)} times were measured on such a GPU and come from the tuning records.")
        print("Predicted times are the model's; registers, spills and shared memory are the compiler's.")
        print(f"{result.verified_on_cpu} winners ran on the CPU, thread for thread, and agree with the reference.")
        if result.not_verified:
            print(f"Others were not verified: {result.not_verified}")
    if not result.device_measured:
        print(UNMEASURED)
    if not result.complete:
        print("the budget ended before all candidates were tried: run again to go on")
    if result.failures:
        print(f"{len(result.failures)} candidates failed; --json gives the reasons")


def _cells(row: Row) -> list[str]:
    def number(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    config = _config(row.spec) if row.spec else "none sound"
    resources = [number(row.registers), number(row.spill_bytes), number(row.shared_bytes)]
    names = [row.cell.problem.name, row.cell.workload.name]
    speed = [microseconds(row.seconds), number(row.tflops), number(row.gain, 2)]
    return [*names, *speed, *resources, row.bound_by, str(row.tried), str(row.failed), config]


def _config(spec: KernelSpec) -> str:
    """The family, and what is not as in its default: in the words of --set."""
    return f"{spec.family.name}: {spec.config.settings(spec.family.default(spec.problem, spec.target)) or 'default'}"


def _device(request: Request) -> Device:
    """What is tuned for."""
    on = tuning.where(request)
    return on if isinstance(on, Device) else gpu(on).device


def _print_dry_run(request: Request, json: bool) -> None:
    listing = tuning.dry_run(request, _device(request))
    if json:
        print_json(listing)
        return
    for cell in listing["cells"]:
        workload = " ".join(f"{key} {value}" for key, value in cell["workload"].items())
        print(f"{cell['problem']}, {workload}: {len(cell['candidates'])} candidates, {len(cell['refused'])} refused")
        for candidate in cell["candidates"]:
            print(f"  try     {candidate['kernel']}  (predicted {microseconds(candidate['predicted_seconds'])} us)")
        for name, reasons in cell["refused"].items():
            print(f"  refuse  {name}: {'; '.join(reasons)}")
    if not listing["device_measured"]:
        print(UNMEASURED)
