"""The command `debug`: some blocks of a kernel on the CPU, in a program that sanitizers and debuggers can look into."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cells import sized
from flashgen.codegen.errors import choice_error, require_int
from flashgen.codegen.seen import Seen

from .options import (
    INTEGER,
    Arch,
    Causal,
    Chunk,
    Deterministic,
    DtypeName,
    FamilyName,
    HeadDim,
    HeadDimV,
    Json,
    Modifiers,
    OnePass,
    Packed,
    PageSize,
    Settings,
    Softcap,
    Window,
    named_modifiers,
    parse_settings,
    parse_window,
    print_json,
    print_table,
    problem,
    spec_for,
    target_or_here,
)  # fmt: skip

if TYPE_CHECKING:
    from flashgen.build.emulator.kernel import Schedule
    from flashgen.verification.debug import Debugged

HINT = "printf works in the kernel, which is plain C++ here: edit a copy of the text, and run it with --text FILE."


def debug(
    head_dim: HeadDim = None,
    block: Annotated[int, typer.Option("--block", **INTEGER, help="The first block that runs.")] = 0,
    kernel: Annotated[
        str, typer.Option("--kernel", help="Which kernel of a family with several: the suffix of its entry; default: the first.")
    ] = "",
    blocks: Annotated[int, typer.Option("--blocks", **INTEGER, help="How many blocks run, from the first one on.")] = 1,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Look for bad accesses and undefined behaviour with the compiler's sanitizers.")
    ] = False,
    head_dim_v: HeadDimV = 0,
    dtype: DtypeName = "bf16",
    causal: Causal = False,
    operation: OnePass = "forward",
    deterministic: Deterministic = False,
    window: Window = None,
    chunk: Chunk = None,
    softcap: Softcap = None,
    modifiers: Modifiers = None,
    packed: Packed = False,
    page_size: PageSize = None,
    arch: Arch = None,
    family: FamilyName = None,
    settings: Settings = None,
    batch: Annotated[int, typer.Option("--batch", **INTEGER, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option("--heads", **INTEGER, help="Query heads.")] = 2,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", **INTEGER, help="Key/value heads; default: as many as query heads.")] = None,
    seqlen: Annotated[int, typer.Option("--seqlen", **INTEGER, help="Length of q.")] = 500,
    seqlen_kv: Annotated[int | None, typer.Option("--seqlen-kv", **INTEGER, help="Length of k/v; default: that of q.")] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", help="Which thread goes on: round-robin, ahead, reversed or random.")
    ] = "round-robin",
    late_copies: Annotated[
        bool,
        typer.Option("--late-copies/--early-copies", help="Asynchronous copies happen when they are waited for, or where they are issued."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", **INTEGER, help="Of the inputs, and of the random schedule.")] = 0,
    text: Annotated[Path | None, typer.Option("--text", help="Run this edited text in place of the rendered one.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for text, program and launch; default: a new temporary one.")] = None,
    json: Json = False,
) -> None:
    """Run blocks of a kernel on the CPU, in a program of its own. Exit code 1 with a report if something is found."""
    import torch

    from flashgen.build.emulator.kernel import EmulationOrder
    from flashgen.launch.tensors import Tensors
    from flashgen.verification import debug as runner

    for name, size in (("batch", batch), ("heads", heads), ("seqlen", seqlen)):
        require_int(name, size, 1)
    require_int("seed", seed, 0, 2**63 - 1)
    asked = problem(
        head_dim, head_dim_v, dtype, causal, operation, deterministic, window, named_modifiers(softcap, modifiers), chunk, packed, page_size
    )
    spec = spec_for(asked, target_or_here(arch), parse_settings(settings), family)
    sizes = (batch, heads, kv_heads if kv_heads is not None else heads, seqlen, seqlen_kv if seqlen_kv is not None else seqlen)
    workload = sized(asked, *sizes, *Seen.of(causal, parse_window(window), chunk).sizes, page_size=page_size)
    suffix = f"_{kernel.removeprefix('_')}" if kernel else ""
    interleaving = EmulationOrder(_schedule(schedule), late_copies, seed)
    found = runner.run_blocks(
        spec,
        Tensors.random(spec.problem, workload, torch.Generator().manual_seed(seed)),
        out,
        kernel=suffix,
        block=block,
        blocks=blocks,
        sanitize=sanitize,
        interleaving=interleaving,
        source=runner.read_text(text, spec) if text is not None else None,
        output=sys.stderr if json else sys.stdout,
    )
    if found.fault is not None and found.fault.report:
        print(found.fault.report, end="", file=sys.stderr, flush=True)
    how = {"sanitized": sanitize, "schedule": schedule, "copies": "late" if late_copies else "early", "seed": seed}
    facts = {"kernel": spec.name + suffix, "workload": workload.name, **how, **_facts(found)}
    if json:
        print_json(facts)
    else:
        print_table((("fact", False), ("value", False)), [(key, _cell(value)) for key, value in facts.items() if value not in ("", None)])
        print(f"\n{HINT}")
    if not found.ok:
        raise typer.Exit(1)


def _schedule(name: str) -> Schedule:
    from flashgen.build.emulator.kernel import Schedule

    known = {schedule.name.lower().replace("_", "-"): schedule for schedule in Schedule}
    if name not in known:
        raise choice_error("schedule", name, known)
    return known[name]


def _cell(value: object) -> str:
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def _facts(found: Debugged) -> dict[str, object]:
    """What ran and what came of it."""
    fault, verdict = found.fault, found.verdict
    later = "" if fault is not None or found.missing else "later kernels write the outputs: they are judged where all blocks run"
    return {
        "blocks": f"{found.blocks.start} to {found.blocks.stop - 1} of {found.grid}",
        "text": str(found.program.text),
        "command": shlex.join(found.program.command),
        "ok": found.ok,
        "check": fault.check if fault is not None else "",
        "fault": fault.message if fault is not None else "",
        "rows": len(found.rows),
        "max_error": verdict.max_error if verdict is not None else None,
        "max_allowed": verdict.max_allowed if verdict is not None else None,
        "message": "; ".join(filter(None, (found.missing, verdict.message if verdict is not None else later))),
    }
