"""`flashgen cache`: where artifacts and records are, how much they take, and clearing them."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json, print_json, print_table

app = typer.Typer(help="Where compiled kernels and tuning records are kept, and how much they take.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def show(context: typer.Context, json: Json = False) -> None:
    """Print where compiled kernels and tuning records are, and how much they take."""
    if context.invoked_subcommand is not None:
        return
    from flashgen import selection

    usage, records = selection.store().usage(), selection.records()
    facts = {"folder": str(usage.root), "kernels": usage.entries, "kernel_bytes": usage.bytes, "records": len(records)}
    if json:
        print_json(facts)
    else:
        print_table((("fact", False), ("value", False)), [(key, str(value)) for key, value in facts.items()])


@app.command("clear")
def clear(records: Annotated[bool, typer.Option("--records", help="Also forget all tuning records.")] = False) -> None:
    """Remove compiled kernels; they are compiled again when needed. Tuning records stay unless --records is given."""
    from flashgen import selection

    print(f"{selection.store().clear()} kernels removed")
    if records:
        print(f"{selection.records().clear()} records removed")
