"""The command line: `flashgen tune | generate | compile | show | verify | debug | bench | compare | explain | cache | doctor`.

Results go to stdout, progress and messages to stderr. Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import suppress
from typing import Annotated

import typer

from flashgen.codegen.errors import ArgumentError, FlashgenError

from ..version import __version__
from . import bench, cache, compare, debug, doctor, explain, generate, kernels, tune
from .terminal import guard_streams, printable

app = typer.Typer(
    name="flashgen",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flashgen {__version__}")
        raise typer.Exit


app.command("tune")(tune.tune)
app.command("generate")(generate.generate)
app.command("compile")(kernels.compile_)
app.command("show")(kernels.show)
app.command("verify")(kernels.verify)
app.command("debug")(debug.debug)
app.command("bench")(bench.bench)
app.command("compare")(compare.compare)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")


@app.callback()
def _flashgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Generates FlashAttention kernels, tunes them on your GPU, and hands them to PyTorch."""


def main() -> None:
    """Entry point of the `flashgen` script."""
    if sys.stderr is None:  # closed: print() would take stdout in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        print("flashgen: stdout is closed, and results go there: send it to /dev/null if none are wanted", file=sys.stderr)
        sys.exit(1)
    guard_streams()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    warnings.showwarning = lambda message, *_args, **_options: print(f"flashgen: warning: {printable(str(message))}", file=sys.stderr)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except FlashgenError as error:
        print(f"flashgen: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)
    except OSError as error:  # a full disk, a pipe that nobody reads, a file system that went read-only: no fault of ours
        if not isinstance(error, BrokenPipeError):
            print(f"flashgen: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        # What stdout still holds goes nowhere: Python would try once more at its end, and change the exit code.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
