"""Commands about single kernels: `compile`, `show`, `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec

from .options import (
    Arch,
    Causal,
    CausalOrBoth,
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
    Passes,
    Settings,
    Softcap,
    Window,
    named_modifiers,
    parse_settings,
    print_json,
    print_table,
    problem,
    problems,
    spec_for,
    target_or_here,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.build.emulator.kernel import EmulatedKernel
    from flashgen.build.gpu.kernel import Kernel
    from flashgen.codegen.target import Target
    from flashgen.verification.screen import CaseResult


def compile_(
    head_dim: HeadDim = None,
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
    json: Json = False,
) -> None:
    """Compile one kernel and print the compiler's report. Exit code 1 if it spills or a directive was ignored. Needs no GPU."""
    from flashgen.selection import compilation

    asked = problem(
        head_dim, head_dim_v, dtype, causal, operation, deterministic, window, named_modifiers(softcap, modifiers), chunk, packed, page_size
    )
    spec = spec_for(asked, target_or_here(arch), parse_settings(settings), family)
    artifact = compilation.compile_spec(spec)
    report, block = artifact.report, spec.largest_block
    threads, shared = block.threads, block.shared_bytes
    facts = {
        "kernel": spec.name,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "stack_bytes": report.stack_bytes,
        "shared_bytes": shared,
        "threads": threads,
        "blocks_per_sm": spec.target.blocks_resident(threads, report.registers, shared),
        "cubin_bytes": len(artifact.cubin),
        "nvrtc": artifact.compiler_version,
        "defects": report.defects,
    }
    if json:
        print_json(facts)
    else:
        print_table(
            (("fact", False), ("value", False)),
            [(key, ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)) for key, value in facts.items()],
        )
    if report.defects:
        raise typer.Exit(1)


def show(
    head_dim: HeadDim = None,
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
) -> None:
    """Print the CUDA source of one kernel: self-contained, as it is compiled."""
    asked = problem(
        head_dim, head_dim_v, dtype, causal, operation, deterministic, window, named_modifiers(softcap, modifiers), chunk, packed, page_size
    )
    spec = spec_for(asked, target_or_here(arch), parse_settings(settings), family)
    print(render(spec).text, end="")


def verify(
    head_dim: HeadDim = None, head_dim_v: HeadDimV = 0, dtype: DtypeName = "bf16", causal: CausalOrBoth = None,
    passes: Passes = "forward", deterministic: Deterministic = False, window: Window = None, chunk: Chunk = None,
    softcap: Softcap = None, modifiers: Modifiers = None, packed: Packed = False, page_size: PageSize = None,
    family: FamilyName = None, settings: Settings = None,
    device: Annotated[str, typer.Option("--device", help="Ordinal of the GPU, or cpu: the same kernel on emulated atoms.")] = "0",
    arch: Arch = None, json: Json = False,
) -> None:  # fmt: skip
    """Run the numerics rule over awkward shapes, on a GPU or thread for thread on the CPU. Exit code 1 if a case fails."""
    from flashgen.verification.screen import verify_kernel

    load, target = _loader(device, arch)
    modified = window, named_modifiers(softcap, modifiers), chunk, packed, page_size
    every = problems(head_dim, head_dim_v, dtype, causal, passes, deterministic, *modified)
    specs = [spec_for(asked, target, parse_settings(settings), family) for asked in every]
    results = [(spec, case) for spec in specs for case in verify_kernel(load(spec))]
    wrong = [case for _, case in results if not case.verdict.ok]
    if json:
        names = {"kernels": [spec.name for spec in specs], "passed": len(results) - len(wrong), "failed": len(wrong)}
        print_json({**names, "cases": [_case_facts(spec, case) for spec, case in results]})
    else:
        columns = (("problem", False), ("workload", False), ("q times", True), ("max error", True), ("allowed", True), ("verdict", False))
        print_table(columns, [_case_cells(spec, case) for spec, case in results])
        print(f"\n{len(results) - len(wrong)} passed, {len(wrong)} failed")
        for name in dict.fromkeys(spec.family.name for spec in specs if not spec.family.correct):
            print(f"{name} is wrong on purpose: it must fail")
    if wrong:
        raise typer.Exit(1)


def _loader(device: str, arch: str | None) -> tuple[Callable[[KernelSpec], Kernel | EmulatedKernel], Target]:
    """What loads a kernel on the device that was asked for, and the architecture it is for."""
    if device == "cpu":
        from flashgen.launch import cpu

        return cpu.load_emulated, target_or_here(arch)
    if not (device.isascii() and device.isdecimal()):
        raise ArgumentError(f"device must be a GPU's ordinal or 'cpu'; got {device!r}")
    if arch is not None:
        raise ArgumentError(f"arch must be left out with a GPU, which has one of its own; got {arch!r}")
    from flashgen.build.gpu.driver import DriverError, gpu
    from flashgen.selection import loaded

    try:
        on = gpu(int(device))
    except DriverError as error:
        raise DriverError(f"{error}; --device cpu runs the same kernel without a GPU") from error
    return lambda spec: loaded.kernels.load(spec, on), on.device.target


def _case_facts(spec: KernelSpec, case: CaseResult) -> dict[str, object]:
    verdict = case.verdict
    return {
        "problem": spec.problem.name,
        "workload": case.workload.name,
        "magnitude": case.magnitude,
        "ok": verdict.ok,
        "max_error": verdict.max_error,
        "max_allowed": verdict.max_allowed,
        "bounds": {name: {kind: bound._asdict() for kind, bound in both._asdict().items()} for name, both in verdict.bounds.items()},
        "message": verdict.message,
    }


def _case_cells(spec: KernelSpec, case: CaseResult) -> list[str]:
    verdict = case.verdict
    errors = [f"{verdict.max_error:.2e}", f"{verdict.max_allowed:.2e}"]
    return [spec.problem.name, case.workload.name, f"{case.magnitude:g}", *errors, "ok" if verdict.ok else verdict.message]
