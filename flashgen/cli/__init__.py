"""The command line: `flashgen tune | generate | compile | show | verify | debug | bench | cache | doctor`.

Results go to stdout, progress and messages to stderr. Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
import warnings

import typer

from flashgen.codegen.errors import ArgumentError, FlashgenError

from . import bench, cache, debug, doctor, kernels, tune

app = typer.Typer(
    name="flashgen",
    help="Generates FlashAttention kernels, tunes them on your GPU, and hands them to PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("tune")(tune.tune)
app.command("generate")(kernels.generate)
app.command("compile")(kernels.compile_)
app.command("show")(kernels.show)
app.command("verify")(kernels.verify)
app.command("debug")(debug.debug)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Entry point of the `flashgen` script."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    warnings.showwarning = lambda message, *_args, **_options: print(f"flashgen: warning: {message}", file=sys.stderr)
    try:
        app()
    except FlashgenError as error:
        print(f"flashgen: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)
    except BrokenPipeError:
        sys.exit(1)
