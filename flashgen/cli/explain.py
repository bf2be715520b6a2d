"""`flashgen explain`: options, how far it is, and the page that it writes."""

from __future__ import annotations

import glob
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from flashgen.build.own_files import make_own_folder, write_own
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, choice_error
from flashgen.codegen.problem import Mask

from .options import INTEGER, CausalOrBoth, print_table
from .progress import Bars

PAGE = "flashgen-explain.html"
TILES = 4


def explain(
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            help="A step of the ladder, such as flash2_forward, or tiled_product. Default: all that run on the device, with "
            "version 1 and 2 side by side.",
        ),
    ] = None,
    causal: CausalOrBoth = None,
    tiles: Annotated[int, typer.Option("--tiles", **INTEGER, help="Tiles of queries, and of keys: 1 to 8.")] = TILES,
    device: Annotated[
        str, typer.Option("--device", help="The GPU whose kernels run, and whose memory the page shows, such as h200 or a100.")
    ] = "h200",
    out: Annotated[Path, typer.Option("--out", help="The page, a new file that ends in .html or one that it wrote.")] = Path(PAGE),
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a page that shows, step by step, how attention's kernels move tiles through memory: as recorded in the emulator.

    Exit code 1 if a kernel moves other bytes than its algorithm's loops say.
    """
    from flashgen.explain.page import page_html
    from flashgen.explain.product import ITS_FAMILY, TILED_PRODUCT, tiled_product
    from flashgen.explain.run import EXPLAINED, SmallProblem, compile_ahead_of, explained_on, explained_spec, record
    from flashgen.explain.steps import totals

    if out.suffix != ".html" or out.is_dir():
        raise ArgumentError(f"out must be a file that ends in .html; got {out}")
    masks = [mask for mask in Mask if causal in (None, mask is Mask.CAUSAL)]
    if family not in (None, TILED_PRODUCT, *EXPLAINED):
        raise choice_error("family", family, (*EXPLAINED, TILED_PRODUCT))
    found = find_device(device)
    shown = (TILED_PRODUCT, *explained_on(found)) if family is None else (family,)
    names = list(dict.fromkeys(ITS_FAMILY if name == TILED_PRODUCT else name for name in shown))
    wanted = [(explained_spec(name, small, found), small) for small in (SmallProblem(mask, tiles) for mask in masks) for name in names]
    make_own_folder(out.parent, (glob.escape(out.name),))
    runs = []
    with Bars(quiet=False) as bars:
        bars.begin("kernels compiled for the emulator", len(wanted))
        compile_ahead_of([spec for spec, _ in wanted], bars.advance)
        bars.begin("kernels run and recorded", len(wanted))
        for spec, small in wanted:
            run = record(spec, small, found)
            parts = [tiled_product(run), run] if run.name == ITS_FAMILY else [run]
            runs += [part for part in parts if part.name in shown]
            bars.advance()
    (written,) = write_own(out.parent, {out.name: page_html(runs, found).encode()})
    print(f"wrote {written}", file=sys.stderr)
    rows, same = [], True
    for run in runs:
        moved = totals(run.steps).all
        same = same and moved == run.formula
        counts = (count for of in (moved, run.formula) for count in (of.read, of.written, of.reduced))
        rows.append([run.name, run.small.mask.value, str(len(run.steps)), *map(str, counts)])
    columns = ("bytes read", "written", "added", "read by its loops", "written by its loops", "added by its loops")
    print_table([("family", False), ("mask", False), ("steps", True), *((name, True) for name in columns)], rows)
    if open_ and not webbrowser.open(written.absolute().as_uri()):
        print(f"flashgen: no browser is known here that could open {written}", file=sys.stderr)
    if not same:
        print("flashgen: a kernel moves other bytes than its algorithm's loops say", file=sys.stderr)
        raise typer.Exit(1)
