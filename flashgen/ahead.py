"""The Python face of what is done ahead of calls: `compile`, `load`, `register_kernels`, `unload`, `warm`, `tune`, `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashgen.build.gpu.driver import DriverError, Gpu, driver, gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.config import Config
from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.operation import operation_of
from flashgen.codegen.operations import operations_of
from flashgen.codegen.problem import Dtype, Problem, Sequences
from flashgen.codegen.seen import Ends, Seen
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target
from flashgen.codegen.typed import checked

from .cells import APPEND, SEQLENS, cells_of, sequences_of_options, sized
from .launch.gpu import choose_kernel
from .selection import loaded
from .selection.families import default_spec, excluded_families, family_of

if TYPE_CHECKING:
    from .tuning import TuneResult
    from .verification.screen import CaseResult

__all__ = ["compile", "load", "register_kernels", "tune", "unload", "verify", "warm"]


def _gpu(device: int | None) -> Gpu:
    if device is None:
        driver()  # says what is missing, where PyTorch would only say that it was built without CUDA
        device = torch.cuda.current_device()
    return gpu(device)


@checked
def compile(problem: Problem, config: Config | None = None, target: Target | str | None = None, *, device: int | None = None) -> Kernel:
    """The kernel for (problem, config, target), compiled or from the store, loaded on a GPU of that architecture.

    config: None for the family's default; target: None for the architecture of `device`; device: None for the current one.
    Raises IllegalConfigError with all reasons; ArgumentError if `target` is not the device's architecture.
    """
    on = _gpu(device)
    target = find_target(target) if isinstance(target, str) else target or on.device.target
    if target.name != on.device.target.name:
        raise ArgumentError(
            f"target must be {on.device.target.name}, the architecture of device {on.ordinal}; got {target.name}: "
            "`flashgen generate` compiles for others"
        )
    return loaded.kernels.load(_spec(problem, config, target), on)


def _spec(problem: Problem, config: Config | None, target: Target) -> KernelSpec:
    if config is None:
        return default_spec(problem, target)
    return KernelSpec(family_of(config), problem, config, target)


@checked
def load(folder: str | Path, *, device: int | None = None) -> list[Kernel]:
    """Imports the kernels that `flashgen generate` wrote to `folder` for the architecture of `device` (None: the current GPU).

    From then on `flashgen.attention` prefers them to records and to the model's pick: tuned ones for the workload that is nearest, as
    records are chosen, those that were generated for a length in its bucket, the others for all lengths.
    Neither NVRTC nor templates nor Jinja are needed; where none can be compiled, they are taken for all other sizes that they can
    compute, too. Returns them.
    Raises ArgumentError for a folder that is incomplete, altered or written by another version, or has none for this GPU.
    """
    return loaded.imports.load(Path(folder), _gpu(device))


@checked
def register_kernels(folder: str | Path) -> None:
    """As `load`, on every GPU of the process, and not before a GPU's first call: for packages of kernels, which are imported anywhere.

    Needs no GPU; a relative path is of the working directory that there is now. The first call on a GPU raises ArgumentError as `load`
    does, if none of the folders that were registered has kernels for its architecture. Kernels are loaded outside of a CUDA graph's
    capture alone.
    """
    loaded.imports.register(Path(folder))


def unload() -> None:
    """Forgets what `load` and `register_kernels` imported: `flashgen.attention` chooses by itself again."""
    loaded.imports.clear()


@checked
def warm(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype | str = "bf16",
    causal: bool = False,
    batch: int,
    heads: int,
    kv_heads: int | None = None,
    len_q: int,
    len_kv: int | None = None,
    passes: str = "forward",
    deterministic: bool = False,
    window: Ends | None = None,
    chunk: int | None = None,
    modifiers: Sequence[str] = (),
    packed: bool = False,
    page_size: int | None = None,
    batch_invariant: bool = False,
    device: int | None = None,
) -> Kernel:
    """Chooses, compiles and loads the kernel for tensors of these sizes, and their bucket, now, so that no call has to. Returns it.

    Other lengths of the bucket may have another kernel, which is made ready, too; those that have a tuning record of their own need
    a `warm` of their own.
    head_dim_v: None for head_dim; kv_heads: None for as many as heads; len_kv: None for len_q; device: None for the current one.
    passes: "forward", "backward" or "both", of which the backward kernel is returned.
    deterministic: of the backward kernel, whether its gradients are the same to the bit in every run.
    window, chunk: as `attention` has them.
    modifiers: names of others, whose values calls may change: softcap, alibi, bias, bias_fp32, boolean_mask, document_ids,
        document_ids_int64, prefix_len, sinks.
    packed: for calls of `attention_varlen`, of `batch` sequences whose mean lengths are len_q and len_kv.
    page_size: for calls of `attention_with_kvcache`, of sequences that may have len_kv keys, in pages of so many, or in one each; what
        appends to such a cache is made ready, too.
    batch_invariant: as `attention_with_kvcache` has it
    """
    on = _gpu(device)
    name = str(dtype).removeprefix("torch.")
    width_v = head_dim if head_dim_v is None else head_dim_v
    seen = Seen.of(causal, window, chunk)
    sizes = batch, heads, heads if kv_heads is None else kv_heads, len_q, len_q if len_kv is None else len_kv
    layout, named = sequences_of_options(packed, page_size), (*seen.modifiers, *modifiers)
    problems = [
        Problem(Dtype.parse(name), head_dim, width_v, seen.mask, operation, deterministic, named, layout, batch_invariant)
        for operation in operations_of(passes)
    ]
    if layout is Sequences.CACHED:
        problems.insert(0, Problem(Dtype.parse(name), head_dim, width_v, operation=APPEND, sequences=layout))
    asked = [(problem, sized(problem, *sizes, *seen.sizes, page_size=page_size)) for problem in problems]
    if layout is Sequences.CACHED:  # where nothing is rotated, what appends is told of no queries
        asked.insert(0, (problems[0], replace(asked[0][1], heads_q=asked[0][1].heads_kv, len_q=0)))
    for problem, workload in asked:
        excluded = excluded_families(operation_of(problem).call(problem, workload), on.device.target)
        choose_kernel(problem, workload, on, excluded, any_length=True)
        kernel = choose_kernel(problem, workload, on, excluded)
    return kernel


@checked
def tune(
    *,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    causal: bool | None = None,
    seqlens: Sequence[int] = SEQLENS,
    seqlen_kv: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    passes: str = "forward",
    deterministic: bool = False,
    window: Ends | None = None,
    chunk: int | None = None,
    modifiers: Sequence[str] = (),
    packed: bool = False,
    page_size: int | None = None,
    device: str | int | None = None,
    arch: str | None = None,
    jobs: int = 0,
    budget_seconds: float | None = None,
    exhaustive: bool = False,
    family: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> TuneResult:
    """What `flashgen tune` does, with the same options: see `flashgen.cells.cells_of` and `flashgen.tuning.Request`."""
    from . import tuning

    sizes = (seqlens, seqlen_kv, batch, heads, kv_heads)
    cells = cells_of(head_dim, head_dim_v, dtype, causal, *sizes, passes, deterministic, window, modifiers, chunk, packed, page_size)
    return tuning.run(tuning.Request(cells, device, arch, jobs, budget_seconds, exhaustive, family, settings or {}))


@checked
def verify(
    problem: Problem, config: Config | None = None, target: Target | str | None = None, *, device: int | str | None = None
) -> list[CaseResult]:
    """Runs the numerics rule over awkward shapes with the kernel of `compile(problem, config, target)`. One result a case.

    device: a GPU's ordinal, None for the current one, or 'cpu': the same kernel on emulated atoms, thread for thread, of any `target`
    (None for sm_90a). Raises as `compile` does; on the CPU CxxCompilerMissingError, or EmulatorFaultError for what a check finds.
    """
    from .verification.screen import verify_kernel

    if device == "cpu":
        from .launch import cpu

        target = target if target is not None else cpu.ARCHITECTURE
        return verify_kernel(cpu.load_emulated(_spec(problem, config, find_target(target) if isinstance(target, str) else target)))
    if isinstance(device, str):
        raise ArgumentError(f"device must be a GPU's ordinal, None or 'cpu'; got {shown(device)}")
    try:
        _gpu(device)
    except DriverError as error:
        raise DriverError(f"{error}; device='cpu' runs the same kernel without a GPU") from error
    return verify_kernel(compile(problem, config, target, device=device))
