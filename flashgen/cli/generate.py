"""`flashgen generate`: kernels for other machines, as a folder or as a package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.plain import to_plain
from flashgen.codegen.target import find_target

from .options import (
    INTEGER,
    Batch,
    CausalOrBoth,
    Chunk,
    FamilyName,
    HeadDim,
    HeadDimV,
    Heads,
    Json,
    KvHeads,
    Modifiers,
    Packed,
    PageSize,
    SeqlenKv,
    Settings,
    Softcap,
    Window,
    named_modifiers,
    parse_settings,
    parse_window,
    print_json,
    problems,
    target_or_here,
)  # fmt: skip

if TYPE_CHECKING:
    from flashgen.codegen.devices import Device
    from flashgen.codegen.target import Target
    from flashgen.selection.bundle import Generated


def generate(
    out: Annotated[
        Path, typer.Option("--out", help="Folder to write; a generated one is replaced. With --wheel the folder that the package goes to.")
    ],
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="Architectures, by commas: sm_80,sm_90a. Default: --device's, else this GPU's, or sm_90a without one."),
    ] = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = 0,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp16; default: bf16, and with --from-records both.")] = None,
    causal: CausalOrBoth = None,
    passes: Annotated[
        str | None,
        typer.Option("--pass", help="forward, backward, both, or another operation; default: forward, and with --from-records all."),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Gradients that are the same in every run, for --pass backward; default: no, and with --from-records both.",
        ),
    ] = None,
    window: Window = None,
    chunk: Chunk = None,
    softcap: Softcap = None,
    modifiers: Modifiers = None,
    packed: Packed = False,
    page_size: PageSize = None,
    seqlen: Annotated[
        list[int] | None,
        typer.Option(
            "--seqlen", **INTEGER, help="Length of q, and of k/v unless given: kernels for its bucket alone; default: for all lengths."
        ),
    ] = None,
    seqlen_kv: SeqlenKv = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    from_records: Annotated[
        bool, typer.Option("--from-records", help="The tuned kernels of all problems and workloads that there are tuning records of.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="Whose records count with --seqlen and --from-records: a known device, such as h200; default: by --arch."
        ),
    ] = None,
    wheel: Annotated[
        str | None,
        typer.Option("--wheel", metavar="NAME", help="Write a package of that name, to be installed by pip; or NAME==VERSION."),
    ] = None,
    family: FamilyName = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Write .cu, .cubin and a manifest for other GPUs; `flashgen.load(DIR)` imports them. Needs no GPU.

    Kernels have a default config and are for all lengths. With --seqlen they are those that tuning records, or else the model, choose for
    that length and its bucket, and flashgen.load uses them there alone. With --from-records they are the tuned ones of every workload
    that there is a record of, and --head-dim, --head-dim-v, --dtype, --causal, --pass and --deterministic say of which problems;
    flashgen.load chooses among them as among records.

    With --wheel they become a package, which has flashgen use them once it is imported.
    """
    from flashgen.codegen.devices import find_device
    from flashgen.selection import bundle, wheels
    from flashgen.tuning import generation, recorded

    package = wheels.PackageName.parse(wheel) if wheel is not None else None
    if package is None:
        bundle.require_replaceable(out)  # before minutes of compiling
    else:
        wheels.require_folder(out)
    on = find_device(device) if device is not None else None
    targets = _targets(arch, on)
    if from_records:
        others = {
            "window": window, "chunk": chunk, "softcap": softcap, "modifiers": modifiers, "packed": packed or None, "page_size": page_size,
            "seqlen": seqlen or None, "seqlen_kv": seqlen_kv, "batch": batch, "heads": heads, "kv_heads": kv_heads,
            "family": family, "set": settings or None,
        }  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise ArgumentError(f"{name} must be left out with from_records, which takes what was recorded; got {shown(value)}")
        narrowing = recorded.Narrowing(head_dim, head_dim_v or None, dtype, causal, passes, deterministic)
        kernels = recorded.generate_recorded(narrowing, targets, on, _say)
    else:
        named, passes = named_modifiers(softcap, modifiers), passes or "forward"
        of_problem = (dtype or "bf16", causal, passes, bool(deterministic), window, named, chunk, packed, page_size)
        sizes = seqlen or [], seqlen_kv, batch, heads, kv_heads
        workload = generation.asked_workload(head_dim, *sizes, passes, causal, parse_window(window), chunk, packed, page_size)
        asked = problems(head_dim, head_dim_v, *of_problem)
        kernels = generation.generate(asked, targets, workload, on, parse_settings(settings), family, _say)
    paths = bundle.write(out, kernels) if package is None else [wheels.write_wheel(out, package, kernels)]
    if json:
        print_json(_facts(out, paths, kernels, from_records))
    else:
        for path in paths:
            print(path)


def _targets(arch: str | None, device: Device | None) -> list[Target]:
    if arch is None:
        return [device.target if device else target_or_here(None)]
    return list(dict.fromkeys(find_target(name.strip()) for name in arch.split(",")))


def _facts(out: Path, paths: list[Path], kernels: list[Generated], from_records: bool) -> dict[str, object]:
    names = {"folder": str(out), "files": [path.name for path in paths], "kernels": [kernel.spec.name for kernel in kernels]}
    if from_records:
        return {**names, "workloads": {kernel.spec.name: [to_plain(one) for one in kernel.workloads] for kernel in kernels}}
    return {**names, "bucket": to_plain(kernels[0].bucket)}


def _say(text: str) -> None:
    print(text, file=sys.stderr)
