"""`flashgen.attention` of CPU tensors, and its gradients, by kernels in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.modifier import NO_MODIFIERS, Given, modifier_gradients, modifier_operands
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem, Sequences
from flashgen.codegen.target import find_target

from ..launch import arguments, cpu
from ..launch.alignment import require_whole_storages
from ..launch.append_arguments import AppendTensors, append_call, require_append_memory
from ..launch.append_plan import rotated_shape
from ..launch.asked import expanded, have_gradients
from ..launch.cached_arguments import CachedKeys, cached_workload
from ..launch.gradients import Gradients, gradient_call, is_trivial
from ..launch.laid_out import empty
from ..launch.packed_arguments import PackedTokens, packed_workload
from ..launch.packed_gradients import all_are_zero, packed_gradient_call
from ..launch.tensors import Tensors
from ..selection.families import default_spec, excluded_families


def attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    modifiers: Given = NO_MODIFIERS,
    others: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of CPU tensors that have passed `arguments.check_call`, by the default kernel. `others`: of modifiers.

    Raises ArgumentError for memory that a kernel cannot take.
    """
    arguments.require_memory(q, k, v)
    problem, workload = arguments.problem_and_workload(q, k, v, causal, layout, modifiers=modifiers)
    out = empty((*q.shape[:3], v.shape[3]), q, layout)
    lse = q.new_empty((workload.batch, workload.heads_q, workload.len_q), dtype=torch.float32)
    if lse.numel():
        q, k, v, written = (t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v, out))
        tensors = Tensors(
            problem,
            workload,
            {"q": q, "k": k, "v": v, "out": written, "lse": lse, **expanded(modifier_operands(problem), problem, workload, others)},
        )
        scalars = {**({} if scale is None else {"scale": scale}), **dict(modifiers.numbers)}
        excluded = excluded_families(tensors.call(scalars), find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(problem, excluded), tensors, scalars)
    return out, lse


def packed_attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: PackedTokens,
    causal: bool,
    scale: float | None,
    modifiers: Given = NO_MODIFIERS,
    others: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of packed CPU tensors that have passed `check_packed_call`, by the default kernel. `others`: of modifiers.

    Raises ArgumentError for memory that a kernel cannot take.
    """
    arguments.require_memory(q, k, v)
    problem = arguments.problem_of(q, v, causal, modifiers=modifiers, sequences=Sequences.PACKED)
    workload = packed_workload(q, k, tokens, modifiers)
    out, lse = q.new_zeros((*q.shape[:2], v.shape[2])), q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    if lse.numel() and workload.batch:
        named = {name: tensor for name, tensor in zip(PackedTokens._fields[:4], tokens[:4], strict=True) if tensor is not None}
        require_whole_storages(named)
        named |= {"q": q, "k": k, "v": v, "out": out, "lse": lse, **expanded(modifier_operands(problem), problem, workload, others)}
        tensors = Tensors(problem, workload, named)
        scalars = {**({} if scale is None else {"scale": scale}), **dict(modifiers.numbers)}
        excluded = excluded_families(tensors.call(scalars), find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(problem, excluded), tensors, scalars)
    return out, lse


def cached_attention_on_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    where: CachedKeys,
    causal: bool,
    scale: float | None,
    batch_invariant: bool = False,
    modifiers: Given = NO_MODIFIERS,
    others: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of CPU tensors and a cache that have passed `check_cached_call`, by the default kernel. `others`: of modifiers.

    Raises ArgumentError for memory that a kernel cannot take.
    """
    arguments.require_memory(q, k_cache=k_cache, v_cache=v_cache)
    of_cache = Sequences.CACHED, batch_invariant
    problem = arguments.problem_of(q, v_cache, causal, "forward", False, modifiers, *of_cache)
    workload = cached_workload(q, k_cache, where, modifiers)
    out, lse = q.new_empty((*q.shape[:3], v_cache.shape[3])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    if lse.numel():
        require_whole_storages({name: tensor for name, tensor in where._asdict().items() if tensor is not None})
        table = where.block_table if where.cache_batch_idx is None else where.cache_batch_idx[:, None]
        named = {"cache_seqlens": where.cache_seqlens, "block_table": table, "cache_leftpad": where.cache_leftpad}
        named |= {"k_descale": where.k_descale, "v_descale": where.v_descale}
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        given |= {"q": q, "k": k_cache, "v": v_cache, "out": out, "lse": lse}
        given |= expanded(modifier_operands(problem), problem, workload, others)
        tensors = Tensors(problem, workload, given)
        scalars = {**({} if scale is None else {"scale": scale}), **dict(modifiers.numbers)}
        excluded = excluded_families(tensors.call(scalars), find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(problem, excluded), tensors, scalars)
    return out, lse


def gradients_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    layout: str,
    deterministic: bool,
    modifiers: Given = NO_MODIFIERS,
    others: Sequence[torch.Tensor] = (),
    of_tensors: bool = False,
) -> Gradients:
    """Gradients of CPU tensors that have passed `check_gradient_call`, by the default kernel. of_tensors: of modifiers' as well."""
    arguments.require_memory(q, k, v, out=out, d_out=d_out)
    call = gradient_call(q, k, v, out, d_out, causal, scale, layout, deterministic, modifiers, others, of_tensors)
    d_q, d_k, d_v = (empty(tensor.shape, tensor, layout).zero_() for tensor in (q, k, v))
    having = (tensor for tensor, has in zip(others, have_gradients(modifiers.names), strict=True) if has)
    of_others = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in having] if of_tensors else []
    if not is_trivial(call):
        given = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out, "d_q": d_q, "d_k": d_k, "d_v": d_v}
        by_name = {name: t.transpose(1, 2) if layout == "bhsd" else t for name, t in given.items()} | {"lse": lse}
        by_name |= expanded(modifier_operands(call.problem), call.problem, call.workload, others)
        if of_tensors:
            by_name |= expanded(modifier_gradients(call.problem), call.problem, call.workload, of_others)
        if d_lse is not None:
            by_name["d_lse"] = d_lse
        tensors = Tensors(call.problem, call.workload, by_name)
        excluded = excluded_families(call, find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(call.problem, excluded), tensors, call.scalars)
    return d_q, d_k, d_v, *of_others


def packed_gradients_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tokens: PackedTokens,
    causal: bool,
    scale: float | None,
    deterministic: bool,
    modifiers: Given = NO_MODIFIERS,
    others: Sequence[torch.Tensor] = (),
    of_tensors: bool = False,
) -> Gradients:
    """Gradients of packed CPU tensors that have passed `check_packed_gradient_call`, by the default kernel. of_tensors: see above."""
    arguments.require_memory(q, k, v, out=out, d_out=d_out)
    call = packed_gradient_call(q, k, v, out, d_out, tokens, causal, scale, deterministic, modifiers, others, of_tensors)
    d_q, d_k, d_v = (torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v))
    having = (tensor for tensor, has in zip(others, have_gradients(modifiers.names), strict=True) if has)
    of_others = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in having] if of_tensors else []
    if not all_are_zero(call):
        named = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse, "d_q": d_q, "d_k": d_k, "d_v": d_v}
        named |= dict(zip(PackedTokens._fields[:4], tokens[:4], strict=True))
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        given |= expanded(modifier_operands(call.problem), call.problem, call.workload, others)
        if of_tensors:
            given |= expanded(modifier_gradients(call.problem), call.problem, call.workload, of_others)
        excluded = excluded_families(call, find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(call.problem, excluded), Tensors(call.problem, call.workload, given), call.scalars)
    return d_q, d_k, d_v, *of_others


def append_on_cpu(problem: Problem, tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, rotated queries) of CPU tensors of the problem that `check_append` gave; the default kernel changes their caches.

    Raises ArgumentError for memory that a kernel cannot take.
    """
    require_append_memory(tensors)
    call = append_call(problem, tensors, rotary_interleaved, by_query)
    q_rotated = tensors.k_cache.new_empty(rotated_shape(tensors), dtype=tensors.dtype)
    lengths = torch.empty_like(tensors.cache_seqlens)
    if call.workload.batch:
        named = {**tensors.by_operand, "lengths": lengths}
        sizes = {operand.name: operand.sizes(problem, call.workload) for operand in operation_of(problem).operands(problem)}
        missing = {name: q_rotated.new_empty(sizes[name]) for name in ("k_new", "v_new", "q") if name not in named}
        named |= {**missing, "q_rotated": q_rotated if tensors.rotated is not None else q_rotated.view(sizes["q_rotated"])}
        excluded = excluded_families(call, find_target(cpu.ARCHITECTURE))
        cpu.run_on_cpu(_default_kernel(problem, excluded), Tensors(problem, call.workload, named), call.scalars)
    return lengths, q_rotated


@cache
def _default_kernel(problem: Problem, excluded: frozenset[str]) -> EmulatedKernel:
    return cpu.load_emulated(default_spec(problem, find_target(cpu.ARCHITECTURE), excluded))
