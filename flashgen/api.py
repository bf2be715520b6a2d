"""The Python face: `attention`, `compile`, `load`, `warm`, `tune`, `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from flashgen.build.gpu.driver import DriverError, Gpu, driver, gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.config import Config
from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import NO_MODIFIERS
from flashgen.codegen.modifiers.window import Causal, Ends, Seen
from flashgen.codegen.operation import operation_of
from flashgen.codegen.operations import operations_of
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target
from flashgen.codegen.typed import checked
from flashgen.codegen.workload import Workload

from .cells import SEQLENS, cells_of
from .launch.arguments import LAYOUTS, check_types, require_together
from .launch.asked import asked, modified_of_call
from .launch.gpu import CaptureError, choose_kernel
from .operators.autograd import differentiable_attention, is_differentiated
from .operators.plans import nobody_listens, run_at_hand
from .operators.registration import attention_forward, attention_output
from .selection import bundle, loaded
from .selection.families import default_spec, excluded_families, family_of

if TYPE_CHECKING:
    from .tuning import TuneResult
    from .verification.screen import CaseResult

__all__ = ["CaptureError", "attention", "compile", "load", "tune", "unload", "verify", "warm"]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    window: Ends | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v, on the GPU that holds the tensors and in its current stream.

    q: [batch, len_q, heads_q, head_dim] for layout "bshd", [batch, heads_q, len_q, head_dim] for "bhsd"; bf16 or fp16
    k: the same with len_kv and heads_kv; v: as k, with head_dim_v. heads_q is a multiple of heads_kv.
       Any strides with a contiguous last dimension and rows aligned to 16 bytes; head dims are multiples of 8 up to 256.
    causal: query i sees keys j <= i + len_kv - len_q (aligned bottom-right), or with "top_left" keys j <= i
    scale: from 1.1755e-38 to 2.3587e+38, what fp32 can multiply by; None stands for head_dim ** -0.5
    deterministic: whether gradients must be the same to the bit in every run, which takes some time; None for what
       torch.are_deterministic_algorithms_enabled() says when they are computed. Out and lse always are the same.
    window: (left, right): query i sees keys from i + len_kv - len_q - left to i + len_kv - len_q + right, both included; None opens a
       side. Ends may be negative. Where a causal mask ends earlier, it counts. Tiles of keys that no query of a tile sees cost no time.
       len_q + len_kv must be below 2^29 then.
    softcap: a scaled score s becomes softcap * tanh(s / softcap)
    alibi_slopes: fp32, [heads_q] or [batch, heads_q]: a score loses slope * |i + len_kv - len_q - j|, after the softcap. No gradient.
    sinks: [heads_q], fp32 or 16 bits: a score of each query head that joins the softmax of its rows, unscaled, with a value of 0. So P of
       a row has a sum below 1, and lse includes the sink: it is the sink where a row sees no key. They have gradients, which
       `deterministic` need not ask for, and which err by up to |lse| * 2^-24 of themselves. Finite, or -inf for none.
    Returns out [.., head_dim_v] in q's layout, dense; with return_lse also the natural log-sum-exp of the scaled scores,
    fp32 [batch, heads_q, len_q].

    Every row whose scores, scaled and unscaled, are finite in fp32 is right; beyond that rows are NaN, and a NaN score gives NaN. A row
    that sees no key, or whose scores are all -inf, gives 0 and an lse of -inf, where plain PyTorch gives NaN. On Hopper, bf16 values of v
    beyond 2^41 may overflow in rows whose scaled scores rise by some 50 from their last keys to earlier ones. Probabilities are divided by
    their sum at the end, so that the sum of |v| over the keys that a row sees must be finite in fp32.

    The first call for a problem and length bucket may compile (about two seconds on Hopper); `warm` does that ahead of time.
    Raises ArgumentError for bad arguments, DriverError and CompileError for the machine's faults, CaptureError for a first
    call while a CUDA graph is captured. Out and lse have gradients (Dao 2023, algorithm 2), which autograd and torch.func give; those of k
    and v are the same to the bit in every run, deterministic or not. Asking for a second derivative, or a forward-mode one, raises
    FlashgenError.
    """
    modified: tuple[Any, ...] = ()  # what operators are told of modifiers
    if window is not None or softcap is not None or alibi_slopes is not None or sinks is not None or isinstance(causal, str):
        causal, modified = modified_of_call(causal, window, softcap, alibi_slopes, sinks, _queries_beyond_keys(q, k, layout))
    if not is_dynamo_compiling() and (deterministic is None or isinstance(deterministic, bool)):
        modifiers, tensors = asked(*modified) if modified else (NO_MODIFIERS, ())
        run = run_at_hand(q, k, v, causal, scale, layout, return_lse, deterministic, modifiers, tensors)
        if run is not None:
            both = run(q, k, v, return_lse, *tensors)
            return both if return_lse else both[0]  # type: ignore[return-value]  # lse is there if it is wanted
    try:
        check_types(q, k, v, causal, scale, layout, return_lse, deterministic)
        differentiated = is_differentiated(q, k, v, *(modified[3] if modified else ()))
        if differentiated:
            given = differentiable_attention(q, k, v, causal, scale, layout, deterministic, *modified)
        else:
            given = (attention_forward if return_lse else attention_output)(q, k, v, causal, scale, layout, *modified)
    except Exception as error:
        if not is_compiling():
            require_together(q, k, v, error, in_mode=not nobody_listens())
        raise
    return given[0] if differentiated and not return_lse else given


def _queries_beyond_keys(q: torch.Tensor, k: torch.Tensor, layout: str) -> int:
    """len_q - len_kv; 0 for tensors that `check_types` will speak of."""
    try:
        row = LAYOUTS[layout][0]
        return q.shape[row] - k.shape[row]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
        return 0


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

    From then on `flashgen.attention` prefers them: those that were generated for a length in its bucket, the others for all lengths.
    Neither NVRTC nor templates are needed. Returns them.
    Raises ArgumentError for a folder that is incomplete, altered or written by another version, or has none for this GPU.
    """
    on = _gpu(device)
    found = [(Kernel(spec, artifact, on), bucket) for spec, artifact, bucket in bundle.read_bundle(Path(folder), on.device.target)]
    for kernel, bucket in found:
        loaded.imports.add(kernel, bucket)
    return [kernel for kernel, _ in found]


def unload() -> None:
    """Forgets what `load` imported: `flashgen.attention` chooses by itself again."""
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
    modifiers: Sequence[str] = (),
    device: int | None = None,
) -> Kernel:
    """Chooses, compiles and loads the kernel for dense tensors of these sizes, and their bucket, now, so that no call has to. Returns it.

    Other lengths of the bucket may have another kernel, which is made ready, too; those that have a tuning record of their own need
    a `warm` of their own.
    head_dim_v: None for head_dim; kv_heads: None for as many as heads; len_kv: None for len_q; device: None for the current one.
    passes: "forward", "backward" or "both", of which the backward kernel is returned.
    deterministic: of the backward kernel, whether its gradients are the same to the bit in every run.
    window: as `attention` has it.
    modifiers: names of others, whose values calls may change: softcap, alibi, sinks.
    """
    on = _gpu(device)
    name = str(dtype).removeprefix("torch.")
    width_v = head_dim if head_dim_v is None else head_dim_v
    seen = Seen.of(causal, window)
    workload = Workload(batch, heads, heads if kv_heads is None else kv_heads, len_q, len_q if len_kv is None else len_kv, *seen.ends)
    for operation in operations_of(passes):
        problem = Problem(Dtype.parse(name), head_dim, width_v, seen.mask, operation, deterministic, (*seen.modifiers, *modifiers))
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
    modifiers: Sequence[str] = (),
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
    cells = cells_of(head_dim, head_dim_v, dtype, causal, *sizes, passes, deterministic, window, modifiers)
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
