"""The operators of attention on a KV cache: schemas, implementations, fakes and FLOPs.

`flashgen::attention_cached_output` computes out, `flashgen::attention_cached_forward` lse, too; neither changes the cache: append.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload

from ..launch import packed_arguments
from ..launch.asked import asked
from ..launch.cached_arguments import check_cached_call, check_cached_traced
from ..launch.cached_values import require_right_lengths
from ..launch.untraced import untraced
from .cached_plans import OPTIONAL, CachedOptions, cached_checks, cached_plan_for
from .gradients import NoDerivativeError
from .registration import LIBRARY, cpu_is_allowed, register_for_all_others

NO_DERIVATIVE = "flashgen.attention_with_kvcache has no gradients, and no rules for the transforms of torch.func: it is for inference"
_ARGUMENTS = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, "
    "Tensor? k_descale, Tensor? v_descale, bool causal, float? scale, bool batch_invariant=False, "
    'str modifiers="", SymInt[] sizes=[], float[] numbers=[], Tensor[]? tensors=None)'
)
LIBRARY.define(f"attention_cached_output{_ARGUMENTS} -> Tensor out")
LIBRARY.define(f"attention_cached_forward{_ARGUMENTS} -> (Tensor out, Tensor lse)")


def _told(*arguments: Any) -> tuple[tuple[torch.Tensor, ...], CachedOptions]:
    """All tensors, and the options, of what operators are told."""
    q, k_cache, v_cache, cache_seqlens, *optional = arguments[:9]
    causal, scale, *others = arguments[9:]
    batch_invariant, *modified = others or (False,)
    given, of_modifiers = asked(*modified)
    there = sum(bit for bit, tensor in zip(OPTIONAL, optional, strict=True) if tensor is not None)
    existing = [tensor for tensor in optional if tensor is not None]
    return (q, k_cache, v_cache, cache_seqlens, *existing, *of_modifiers), CachedOptions(there, causal, scale, given, batch_invariant)


def _run_cuda(with_lse: bool, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors, options = _told(*arguments)
    if packed_arguments.values_are_checked:
        check_cached_call(*cached_checks(tensors, options))
        require_right_lengths(tensors[1], options.where(tensors))
    return cached_plan_for(tensors, options).run(with_lse, *tensors)


@untraced
def _forward_cuda(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _run_cuda(True, *arguments)


@untraced
def _output_cuda(*arguments: Any) -> torch.Tensor:
    return _run_cuda(False, *arguments)[0]


@untraced
def _forward_elsewhere(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = _told(*arguments)
    given = cached_checks(tensors, options)
    check_cached_call(*given)
    cpu_is_allowed(tensors[0])
    if packed_arguments.values_are_checked:
        require_right_lengths(tensors[1], options.where(tensors))
    from . import cpu

    return cpu.cached_attention_on_cpu(*given)


@untraced
def _output_elsewhere(*arguments: Any) -> torch.Tensor:
    return _forward_elsewhere(*arguments)[0]


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v_cache, *_ = arguments
    check_cached_traced(*cached_checks(*_told(*arguments)))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v_cache.shape[3])), lse


def _output_fake(*arguments: Any) -> torch.Tensor:
    return _forward_fake(*arguments)[0]


def _refuse_derivative(*_: Any) -> NoReturn:
    raise NoDerivativeError(NO_DERIVATIVE)


for _name, _cuda, _elsewhere, _fake in (
    ("attention_cached_output", _output_cuda, _output_elsewhere, _output_fake),
    ("attention_cached_forward", _forward_cuda, _forward_elsewhere, _forward_fake),
):
    LIBRARY.impl(_name, _cuda, "CUDA")
    register_for_all_others(_name, _elsewhere)
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=LIBRARY)
    torch.library.register_vmap(f"flashgen::{_name}", _refuse_derivative, lib=LIBRARY)
attention_cached_output = torch.ops.flashgen.attention_cached_output.default
attention_cached_forward = torch.ops.flashgen.attention_cached_forward.default


@register_flop_formula([torch.ops.flashgen.attention_cached_output, torch.ops.flashgen.attention_cached_forward])
def _flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], seqlens: Sequence[int], table: Sequence[int] | None, *rest: Any, **_: Any
) -> int:
    """For `torch.utils.flop_counter`; shapes in place of tensors. How long each sequence is only the device knows: all count as full."""
    _, _, _, _, causal, _, *modified = rest  # then whether it is batch invariant
    nothing: tuple[Any, ...] = (False, "", (), (), None)
    _, names, sizes, numbers, shapes = (*modified, *nothing[len(modified) :])
    given = asked(names, sizes, numbers, [torch.empty(shape, device="meta") for shape in shapes or ()])[0]
    mask = Mask.CAUSAL if causal else Mask.FULL
    problem = Problem(Dtype.BF16, q[3], v[3], mask, modifiers=given.names, sequences=Sequences.CACHED)  # the dtype does not matter
    table_pages = 1 if table is None else table[1]
    of_pages = {"pages": k[0], "page_size": k[1], "table_pages": table_pages}
    workload = Workload(q[0], q[2], k[2], q[1], table_pages * k[1], **dict(given.sizes), **of_pages)
    return int(operation_of(problem).flops(problem, workload))
