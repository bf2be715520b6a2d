"""`flashgen cache`: where artifacts and records are, how much they take, clearing them, and moving records between machines."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flashgen.codegen.errors import ArgumentError, FlashgenError

from .options import INTEGER, Json, print_json, print_table

app = typer.Typer(help="Where compiled kernels and tuning records are kept, and how much they take.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def cache_usage(context: typer.Context, json: Json = False) -> None:
    """Print where compiled kernels and tuning records are, and how much they take."""
    if context.invoked_subcommand is not None:
        return
    from flashgen.records import sources
    from flashgen.selection import compilation

    usage, records = compilation.store().usage(), sources.own_records()
    facts = {"folder": str(usage.root), "kernels": usage.entries, "kernel_bytes": usage.bytes, "records": len(records)}
    if json:
        print_json(facts)
    else:
        print_table((("fact", False), ("value", False)), [(key, str(value)) for key, value in facts.items()])


@app.command("clear")
def clear(records: Annotated[bool, typer.Option("--records", help="Also forget all tuning records.")] = False) -> None:
    """Remove compiled kernels; they are compiled again when needed. Tuning records stay unless --records is given."""
    from flashgen.records import sources
    from flashgen.selection import compilation

    try:
        print(f"{compilation.store().clear()} kernels removed")
    except OSError as error:
        raise FlashgenError(f"{compilation.store().root} cannot be cleared: {error.strerror or error}") from error
    if records:
        print(f"{sources.own_records().clear()} records removed")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="JSON file to write or replace; - for stdout.")],
    device_name: Annotated[str | None, typer.Option("--device-name", help="Only records of this GPU, for example 'NVIDIA H200'.")] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", **INTEGER, help="Only records of this width of q and k, in elements.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Only the fastest of each problem and workload.")] = False,
    json: Json = False,
) -> None:
    """Write tuning records to a JSON file, for `flashgen cache import` on another machine."""
    from flashgen.build.files import write_file
    from flashgen.records import exchange as record_exchange
    from flashgen.records import sources
    from flashgen.records.record import BENCHMARK_VERSION

    records = sources.own_records().all()
    if device_name is not None:
        records = record_exchange.of_device(records, device_name)
    if head_dim is not None:
        records = record_exchange.of_head_dim(records, head_dim)
    if best:
        records = record_exchange.winners(records, BENCHMARK_VERSION)
    text = record_exchange.to_text(records)
    if str(file) == "-":
        print(text, end="")
        print(f"{len(records)} records exported", file=sys.stderr)
        return
    write_file(file, text.encode())
    if json:
        print_json({"file": str(file), "records": len(records)})
    else:
        print(f"{len(records)} records exported to {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="JSON file that `flashgen cache export` wrote; - for stdin.")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Import the sound records of a file that holds bad ones, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be imported; write nothing.")] = False,
    json: Json = False,
) -> None:
    """Add another machine's tuning records to those here. What was measured here stays; doing it twice changes nothing."""
    from flashgen.records import exchange as record_exchange
    from flashgen.records import sources
    from flashgen.records.record import BENCHMARK_VERSION

    if str(file) == "-" and sys.stdin is None:
        raise ArgumentError("file must be one that can be read; got -, and stdin is closed")
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ArgumentError(f"file must be one that can be read; got {file}: {error.strerror}") from error
    done = record_exchange.import_into(
        sources.own_records(), record_exchange.parse_records(data), BENCHMARK_VERSION, skip_bad=skip_bad, dry_run=dry_run
    )
    if json:
        print_json(asdict(done))
        return
    print(f"{done.added} records {'would be ' if dry_run else ''}imported, {done.here_already} here already, which stay as they are")
    for reason, count in done.useless.items():
        print(f"{count} left out, which nothing here could use: {reason}")
    for reason in done.bad:
        print(f"left out as bad: {reason}")
