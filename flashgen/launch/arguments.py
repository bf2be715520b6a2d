"""What the arguments of a call of attention must be: one set of checks for tensors on a GPU, on the CPU, fake and empty ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from flashgen.codegen.attention import ELEMENTS, require_scale
from flashgen.codegen.errors import ArgumentError, choice_error
from flashgen.codegen.family import require_possible
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.problem import CacheDtype, Mask, Problem, Sequences
from flashgen.codegen.typed import require_type
from flashgen.codegen.workload import Workload

from ..numerics.oracle import TORCH_DTYPES
from .alignment import ALIGNMENT as ALIGNMENT  # with the checks, for plans
from .alignment import require_aligned, require_whole_storages
from .asked import check_tensors

LAYOUTS = {"bshd": (1, 2), "bhsd": (2, 1)}  # name -> (row dimension, head dimension)
DTYPES = {TORCH_DTYPES[dtype]: dtype for dtype in ELEMENTS}
_SCALES = (float, int, NoneType, torch.SymFloat, torch.SymInt)  # symbolic: numbers that a tracer stands for
_ALIGNED = ALIGNMENT  # elements, of the smallest type that there is
E4M3 = torch.float8_e4m3fn


class TracedArgumentError(ArgumentError, NotImplementedError):
    """A bad argument of a traced call. As a NotImplementedError it makes torch.compile leave the call to Python, which says the same."""


def check_types(q: Any, k: Any, v: Any, causal: Any, scale: Any, layout: Any, return_lse: Any, deterministic: Any = None) -> None:
    """Raises ArgumentError unless these have the types that `attention` takes, and tensors lie in memory by strides.

    torch.compile traces this, but not `require_type`: so that is not asked about what has the usual type.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
    check_options(causal, scale, layout, return_lse, deterministic)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_initialized(name, tensor)
        require_dense(name, tensor)


def require_initialized(name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError for what will be a tensor once its lazy module is called."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise ArgumentError(f"{name} must have elements; got a {type(tensor).__name__}, whose lazy module was not called yet")


def check_options(causal: Any, scale: Any, layout: Any, return_lse: Any, deterministic: Any = None) -> None:
    """The part of `check_types` that is not about tensors."""
    if type(causal) is type(return_lse) is bool and type(scale) in (NoneType, float) and type(layout) is str and deterministic is None:
        _require_layout(layout)  # as nearly all are, in short
        return
    for name, value, usual, annotation in (
        ("causal", causal, bool, bool),
        ("scale", scale, _SCALES, float | None),
        ("layout", layout, str, str),
        ("return_lse", return_lse, bool, bool),
    ):
        if not isinstance(value, usual) or isinstance(value, bool) is not (annotation is bool):
            require_type(name, value, annotation)
    if not isinstance(deterministic, (bool, NoneType)):
        require_type("deterministic", deterministic, bool | None)
    _require_layout(layout)
    if type(scale) is int:  # the operators take a float, which not every int has
        require_scale(scale)


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
) -> Problem:
    """The call's problem. Raises ArgumentError unless a kernel for some GPU could take it; only where tensors are is left to look at.

    Works on fake tensors; a symbolic head dim becomes a number, since kernels are made for one.
    """
    _check_shapes(q, k, v, layout)
    if scale is not None:
        require_scale(scale)
    problem = problem_of(q, v, causal, modifiers=modifiers)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strides(name, tensor)
    if tensors:
        (row, head), of_q, of_k = LAYOUTS[layout], q.shape, k.shape
        known = {"batch": of_q[0], "heads_q": of_q[head], "heads_kv": of_k[head], "len_q": of_q[row], "len_kv": of_k[row]}
        check_tensors(problem, known, q, tensors)
    return problem


def check_traced(*arguments: Any) -> Problem:
    """As `check_call`, for calls that PyTorch may be tracing: raises TracedArgumentError."""
    try:
        return check_call(*arguments)
    except ArgumentError as error:
        raise TracedArgumentError(str(error)) from error


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Ranks, dtypes, devices and sizes go together."""
    _require_layout(layout)
    if not _shapes_fit(q, k, v, layout):
        _refuse_shapes(q, k, v, layout)


def _shapes_fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> bool:
    """The rules in short: each call of a new length asks, and nearly all keep them. Those that are traced ask the long way."""
    if not type(q) is type(k) is type(v) is torch.Tensor or q.is_nested or k.is_nested or v.is_nested:
        return False
    of_q, of_k, of_v, device = q.shape, k.shape, v.shape, q.device
    if not len(of_q) == len(of_k) == len(of_v) == 4 or not q.layout is k.layout is v.layout is torch.strided:
        return False
    head = LAYOUTS[layout][1]
    heads_q, heads_kv = of_q[head], of_k[head]
    return (
        q.dtype in DTYPES
        and q.dtype is k.dtype is v.dtype
        and k.device == device
        and v.device == device
        and of_q[0] == of_k[0]
        and of_k[:3] == of_v[:3]
        and of_k[3] == of_q[3]
        and (not heads_q or bool(heads_kv and not heads_q % heads_kv))
    )


def _refuse_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Raises ArgumentError for the first rule that these break, if any."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_dense(name, tensor)  # others may have no shape
    dtype, device, of_q, of_k, of_v = q.dtype, q.device, q.shape, k.shape, v.shape
    for name, tensor, shape in (("q", q, of_q), ("k", k, of_k), ("v", v, of_v)):
        if len(shape) != 4:
            raise ArgumentError(f"{name} must have 4 dimensions ({', '.join(layout)}); got {len(shape)}")
        if tensor.dtype not in DTYPES:
            raise ArgumentError(f"{name} must be torch.bfloat16 or torch.float16; got {tensor.dtype}")
        if tensor.dtype != dtype:
            raise ArgumentError(f"{name} must have q's dtype {dtype}; got {tensor.dtype}")
        if tensor.device != device:
            raise ArgumentError(f"{name} must be on q's device {device}; got {tensor.device}")
        if shape[0] != of_q[0]:
            raise ArgumentError(f"{name} must have q's batch size {of_q[0]}; got {shape[0]}")
    row, head = LAYOUTS[layout]
    if of_k[3] != of_q[3]:
        raise ArgumentError(f"k must have q's head_dim {of_q[3]}; got {of_k[3]}")
    if of_v[row] != of_k[row]:
        raise ArgumentError(f"v must have k's length {of_k[row]}; got {of_v[row]}")
    if of_v[head] != of_k[head]:
        raise ArgumentError(f"v must have k's number of heads {of_k[head]}; got {of_v[head]}")
    if of_q[head] and (not of_k[head] or of_q[head] % of_k[head]):
        raise ArgumentError(f"q must have a number of heads that is a multiple of k's {of_k[head]}; got {of_q[head]}")


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError for nested and sparse tensors."""
    if tensor.is_nested:
        hint = "flashgen.attention_varlen takes q, k and v that all are nested, of layout torch.jagged"
        raise ArgumentError(f"{name} must be one dense tensor; got a nested one: {hint}")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name} must be dense (torch.strided); got {tensor.layout}")


def _require_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise choice_error("layout", layout, LAYOUTS)


def check_strides(name: str, tensor: torch.Tensor) -> None:
    """The last of 3 or 4 dimensions is contiguous, and rows are aligned.

    An empty tensor may have any strides: `contiguous` could not mend them.
    """
    strides = tensor.stride()
    if type(tensor) is torch.Tensor and strides[-1] == 1 and not (strides[0] | strides[1] | strides[-2]) % _ALIGNED:
        return  # as nearly all are, in short
    element_size, last = tensor.element_size(), len(strides) - 1
    if strides[last] != 1 and tensor.numel():
        raise ArgumentError(f"{name} must be contiguous in its last dimension (stride 1); got stride {strides[last]}")
    for dim in range(last):
        if strides[dim] * element_size % ALIGNMENT and tensor.shape[dim] > 1 and tensor.numel():
            raise ArgumentError(
                f"{name} must have rows aligned to {ALIGNMENT} bytes (strides of a multiple of {ALIGNMENT // element_size} elements); "
                f"got stride {strides[dim]} in dimension {dim}"
            )


def problem_of(
    q: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    operation: str = "forward",
    deterministic: bool = False,
    modifiers: Given = NO_MODIFIERS,
    sequences: Sequences = Sequences.DENSE,
    batch_invariant: bool = False,
) -> Problem:
    """What these tensors ask for. Raises ArgumentError if no family can compute it on any target."""
    dtype_kv = CacheDtype.E4M3 if v.dtype is E4M3 else None
    widths, further = (int(q.shape[-1]), int(v.shape[-1])), (modifiers.names, sequences, batch_invariant, dtype_kv)
    return _possible_problem(q.dtype, *widths, causal, operation, deterministic, *further)


@lru_cache(maxsize=2**10)
def _possible_problem(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    operation: str,
    deterministic: bool,
    modifiers: tuple[str, ...],
    sequences: Sequences,
    batch_invariant: bool,
    dtype_kv: CacheDtype | None,
) -> Problem:
    """One instance for all calls, which differ in their lengths far more often than in this. Raises ArgumentError as `problem_of`."""
    mask = Mask.CAUSAL if causal else Mask.FULL
    further = modifiers, sequences, batch_invariant, dtype_kv
    problem = Problem(DTYPES[dtype], head_dim, head_dim_v, mask, operation, deterministic, *further)
    require_possible(problem)
    return problem


def require_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, error: Exception, in_mode: bool) -> None:
    """Raises ArgumentError where that may be why PyTorch has met `error`: a subclass (a masked, distributed, fake tensor), or a mode.

    Modes such as the one for fake tensors take none but their own. An error of another type, for example for want of memory, stays. What
    PyTorch asserts is always about the tensors: one that has left its transform looks like any other.
    """
    kinds = [type(tensor) for tensor in (q, k, v)]
    strange = in_mode or not {*kinds} <= {torch.Tensor, Parameter}
    if type(error) is AssertionError or (strange and type(error) in (AttributeError, NotImplementedError, RuntimeError, TypeError)):
        names, told = ", ".join(kind.__name__ for kind in kinds), str(error).partition("\n")[0]
        raise ArgumentError(f"q, k and v must be tensors that PyTorch takes together; got {names}: {told}") from error


def problem_and_workload(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    layout: str,
    operation: str = "forward",
    deterministic: bool = False,
    modifiers: Given = NO_MODIFIERS,
) -> tuple[Problem, Workload]:
    """The types of `codegen` for these tensors, which have passed `check_call`."""
    return problem_of(q, v, causal, operation, deterministic, modifiers), workload_of(q, k, layout, modifiers)


def workload_of(q: torch.Tensor, k: torch.Tensor, layout: str, modifiers: Given = NO_MODIFIERS) -> Workload:
    """The sizes of these tensors, which have passed `check_call`, and of the call's modifiers."""
    (row, head), of_q, of_k = LAYOUTS[layout], q.shape, k.shape
    if modifiers.sizes:
        return Workload(of_q[0], of_q[head], of_k[head], of_q[row], of_k[row], **dict(modifiers.sizes))
    return Workload(of_q[0], of_q[head], of_k[head], of_q[row], of_k[row])


def require_memory(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **others: torch.Tensor) -> None:
    """Raises ArgumentError unless these begin at addresses that kernels can take, and their storages hold all their elements."""
    named = {name: tensor for name, tensor in {"q": q, "k": k, "v": v, **others}.items() if tensor is not None}
    require_aligned({name: tensor.data_ptr() for name, tensor in named.items()})
    require_whole_storages(named)


def axis_strides(tensor: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Strides in elements along (batch, length, head, column), the axes of an operand, of a tensor that has passed `check_call`."""
    return ordered_strides(tensor.shape, tensor.stride(), layout)


def ordered_strides(sizes: Sequence[int], strides: Sequence[int], layout: str) -> tuple[int, ...]:
    """These strides, of a tensor in that layout, along (batch, length, head, column).

    A stride is 0 where the size is 1, so that one that is never used cannot overflow. Columns are adjacent.
    """
    row, head = LAYOUTS[layout]
    batch = strides[0] if sizes[0] > 1 else 0
    return batch, strides[row] if sizes[row] > 1 else 0, strides[head] if sizes[head] > 1 else 0, 1
