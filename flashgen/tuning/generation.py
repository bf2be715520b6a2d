"""Which kernels `flashgen generate` writes: the default for all lengths, or what records and model choose for the bucket of one. No GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.gpu.driver import gpu, gpu_count
from flashgen.build.nvrtc import compile_many, nvrtc_version
from flashgen.codegen.devices import Device, device_of_target
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.family import find_family
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.seen import Ends
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from ..cells import cells_of
from ..records import choice
from ..selection import compilation
from ..selection.bundle import Generated
from ..selection.families import default_spec, excluded_families, families_not_asked
from ..selection.picks import model_picks, picks, recorded_workloads

Cell = tuple[Problem, Target]
Key = TypeVar("Key", bound=Hashable)


def asked_workload(
    head_dim: int | None,
    seqlens: Sequence[int],
    seqlen_kv: int | None,
    batch: int | None,
    heads: int | None,
    kv_heads: int | None,
    passes: str = "forward",
    causal: bool | None = None,
    window: Ends | None = None,
    chunk: int | None = None,
    packed: bool = False,
    page_size: int | None = None,
) -> Workload | None:
    """The workload that was asked for, with the sizes left out as `flashgen tune` takes them; None if no length was given.

    Raises ArgumentError for several lengths, and for other sizes without one.
    """
    others = {"seqlen_kv": seqlen_kv, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    given = [name for name, size in others.items() if size is not None]
    if not seqlens and given:
        raise ArgumentError(f"{given[0]} must come with a seqlen, for which the kernels are chosen; got {others[given[0]]} alone")
    if len(seqlens) > 1:
        raise ArgumentError(f"seqlen must be given once, as a folder holds the kernels of one bucket; got {', '.join(map(str, seqlens))}")
    if not seqlens:
        return None
    sizes = (seqlens, seqlen_kv, batch, heads, kv_heads)
    cells = cells_of(head_dim, None, "bf16", causal, *sizes, passes, window=window, chunk=chunk, packed=packed, page_size=page_size)
    workloads = {cell.workload for cell in cells}
    if len(workloads) > 1:
        names = " and ".join(sorted(workload.name for workload in workloads))
        raise ArgumentError(f"causal must be given with this window and a seqlen, as a folder holds the kernels of one bucket; got {names}")
    return workloads.pop()


def generate(
    problems: Sequence[Problem],
    targets: Sequence[Target],
    workload: Workload | None,
    device: Device | None,
    settings: Mapping[str, str],
    family: str | None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Generated]:
    """The kernels of all problems for all targets, compiled without defects.

    workload: the one whose bucket they are for, None for all lengths; device: the one whose records count, None for one of each target;
    settings: config fields by hand; say: hears which records decide. Raises FlashgenError, with the reason, where no kernel is sound.
    """
    if family is not None:
        find_family(family).require_correct()
    if device is not None and device.target not in targets:
        raise ArgumentError(f"device must be of {', '.join(target.name for target in targets)}; got {device.name}, of {device.target.name}")
    cells = [(problem, target) for problem in problems for target in targets]
    found = sound({cell: _candidates(cell, workload, device, settings, family, say) for cell in cells})
    bucket = choice.bucket(workload) if workload else None
    return [Generated(*found[cell], bucket) for cell in cells]


def sound(candidates: Mapping[Key, Iterator[KernelSpec]]) -> dict[Key, tuple[KernelSpec, Artifact]]:
    """Of each iterator the first spec that compiles without defects. Raises FlashgenError with the last one's fault where none does."""
    compiled: dict[KernelSpec, Artifact | CompileError] = {}
    found: dict[Key, tuple[KernelSpec, Artifact]] = {}
    todo = {key: next(specs) for key, specs in candidates.items()}
    while todo:
        new = [spec for spec in dict.fromkeys(todo.values()) if spec not in compiled]
        compiled |= compile_many([(spec, partial(compilation.compile_spec, spec)) for spec in new])
        again = {}
        for key, spec in todo.items():
            artifact = compiled[spec]
            if fault := _fault(spec, artifact):
                if (other := next(candidates[key], None)) is None:
                    raise fault
                again[key] = other
            elif isinstance(artifact, Artifact):
                found[key] = spec, artifact
        todo = again
    return found


def _fault(spec: KernelSpec, artifact: Artifact | CompileError) -> FlashgenError | None:
    if isinstance(artifact, CompileError):
        return artifact
    defects = artifact.report.defects
    return FlashgenError(f"{spec.name} is broken: {'; '.join(defects)}") if defects else None


def _candidates(
    cell: Cell,
    workload: Workload | None,
    device: Device | None,
    settings: Mapping[str, str],
    family: str | None,
    say: Callable[[str], object],
) -> Iterator[KernelSpec]:
    """The specs to write, the best first: a later one is for where the compiler breaks those before it."""
    problem, target = cell
    default = default_spec(problem, target, family=family)
    if settings:
        by_hand = KernelSpec(default.family, problem, default.config.replace_from_text(settings), target)
        if workload:
            by_hand.family.require_workload(by_hand.config, workload)
        yield by_hand
    elif workload is None:
        here, _ = device_of_records(target, device)
        if family is None and (recorded := recorded_workloads(problem, here, families_not_asked())):
            say(f"{problem.name} on {here.name}: the default config for all lengths, though records of {len(recorded)} workloads may know "
                "faster ones, which loaded kernels come before: --from-records or --seqlen writes those")  # fmt: skip
        yield default
    else:
        yield from chosen(problem, workload, *device_of_records(target, device), family, say)


def chosen(
    problem: Problem, workload: Workload, device: Device, toolchain: tuple[str, str], family: str | None, say: Callable[[str], object]
) -> Iterator[KernelSpec]:
    """As a call chooses on that device."""
    excluded = excluded_families(operation_of(problem).call(problem, workload), device.target) | families_not_asked(family)
    about = f"{problem.name} {workload.name} on {device.name}"
    for pick in picks(problem, workload, device, toolchain, excluded):
        say(f"{about}: the config of the {pick.name}{', measured by an older version' * pick.choice.is_of_older_version}")
        yield pick.choice.spec(device.target)
    say(f"{about}: no tuning record, the model's pick")
    yield from model_picks(problem, workload, device, excluded, family)


def device_of_records(target: Target, device: Device | None) -> tuple[Device, tuple[str, str]]:
    """The device whose records count for a target: the one named, else the GPU that is here, else the one that stands for the target."""
    if device is not None and device.target == target:
        return device, ("", nvrtc_version())
    here = gpu(0) if gpu_count() else None
    if here is not None and here.device.target == target:
        return here.device, (here.driver_version, nvrtc_version())
    return device_of_target(target), ("", nvrtc_version())
