"""The tensors of modifiers in a call: what they must be, and how kernels see them.

PyTorch's operators are told of modifiers by names, sizes and numbers (`given_modifiers` in codegen/modifier.py), and by the tensors that
these modifiers have, in the order of the names. A tensor may lack leading axes of its operand, or have a size of 1 there: it is then the
same along these, as PyTorch broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import NO_MODIFIERS, Given, given_modifiers, modifier_gradients, modifier_named, modifier_operands
from flashgen.codegen.modifiers import TRACED, listed_names
from flashgen.codegen.modifiers.dropout import checked_dropout
from flashgen.codegen.modifiers.softcap import checked_softcap
from flashgen.codegen.operands import Operand
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.seen import Causal, Ends, Seen
from flashgen.codegen.typed import require_type
from flashgen.codegen.workload import Workload

from ..numerics.oracle import torch_dtype
from .built_in import CallOf
from .recorded_call import recorded_call
from .seeds import drawn_seed
from .traced_call import is_indifferent, traced_call, with_captured, with_gradients

_PLAIN, _ENDS = {int, float}, {int, NoneType}  # types of sizes and numbers, and of a window's ends
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)

Modified = tuple[str, Sequence[int], Sequence[float], Sequence[torch.Tensor]]
"""What operators are told of modifiers: names, sizes, numbers, tensors. An empty tuple stands for none."""


def asked(
    names: str = "", sizes: Sequence[int] = (), numbers: Sequence[float] = (), tensors: Sequence[torch.Tensor] | None = None
) -> tuple[Given, tuple[torch.Tensor, ...]]:
    """What operators are told, in the types of `codegen`. Raises ArgumentError as `given_modifiers`, and for more or fewer tensors."""
    if not names and not tensors and not sizes and not numbers:
        return NO_MODIFIERS, ()
    found = tuple(tensors or ())
    if TRACED in names:
        sizes, numbers = with_captured(names, sizes, numbers, found)
    known = {*map(type, sizes), *map(type, numbers)} <= _PLAIN  # else a tracer's symbol is among them
    given, wanted = (_given if known else _given_anew)(names, tuple(sizes), tuple(numbers))
    if len(found) != len(wanted):
        raise ArgumentError(f"tensors must be those of {names or 'no modifiers'}: {', '.join(wanted) or 'none'}; got {len(found)}")
    return given, found


def _given_anew(names: str, sizes: Sequence[int], numbers: Sequence[float]) -> tuple[Given, tuple[str, ...]]:
    """What operators are told, and its tensors' names."""
    given = given_modifiers(names, sizes, numbers)
    return given, tensor_names(given.names)


_given = lru_cache(maxsize=2**10)(_given_anew)  # each call asks


@lru_cache(maxsize=2**10)
def tensor_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The operands of these modifiers."""
    return tuple(tensor for name in names for tensor in modifier_named(name).tensors)


@lru_cache(maxsize=2**10)
def have_gradients(names: tuple[str, ...]) -> tuple[bool, ...]:
    """Of each of `tensor_names`, whether the backward pass has a gradient of it: not of what is added to scores that are mapped."""
    each, maps = [modifier_named(name) for name in names], any(modifier_named(name).maps_scores for name in names)
    return tuple(name in one.learned and not (maps and one.sum_parameters) for one in each for name in one.tensors)


@lru_cache(maxsize=2**10)
def names_with_gradients(names: str, needed: tuple[bool, ...]) -> str:
    """The names that the backward pass is told, where those of the modifiers' tensors that are `needed` are to have gradients."""
    known = tuple(sorted(listed_names(names)))
    wanted = [tensor for tensor, need in zip(tensor_names(known), needed, strict=True) if need]
    return ",".join(with_gradients(name, wanted) for name in known)


def require_gradients(names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> None:
    """Raises ArgumentError if one of these requires grad, but has no gradient."""
    for name, may, tensor in zip(tensor_names(names), _may_require_gradients(names), tensors, strict=True):
        if not may:
            _require_no_gradient(name, tensor)


@lru_cache(maxsize=2**10)
def _may_require_gradients(names: tuple[str, ...]) -> tuple[bool, ...]:
    """Captured tensors on which no score depends, or not smoothly, may: they get none, as in PyTorch."""
    learning = have_gradients(tuple(with_gradients(name, tensor_names((name,))) for name in names))
    all_of_names = zip(learning, (name for name in names for _ in tensor_names((name,))), tensor_names(names), strict=True)
    return tuple(has or is_indifferent(name, tensor) for has, name, tensor in all_of_names)


def _require_no_gradient(name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} must not require grad, as it has no gradient here: detach it; got requires_grad=True")


def check_tensors(problem: Problem, known: Mapping[str, int], q: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ArgumentError unless a kernel can take these as its problem's modifiers' operands. Works on fake tensors.

    known: the fields of `Workload` that axes of operands name; a tracer's symbols may stand for them
    """
    for operand, tensor in zip(modifier_operands(problem), tensors, strict=True):
        sizes, dtype = operand.sizes_in({**vars(problem), **known}), torch_dtype(operand, problem)
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ArgumentError(f"{operand.name} must be one dense tensor (torch.strided); got {tensor.layout}")
        if tensor.dtype != dtype:
            raise ArgumentError(f"{operand.name} must be {dtype}; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(f"{operand.name} must be on q's device {q.device}; got {tensor.device}")
        shape = tuple(tensor.shape)
        if operand.free:
            if not tensor.numel():
                raise ArgumentError(f"{operand.name} must have elements, as a kernel reads one for each score; got the shape {shape}")
            continue
        if not sizes:
            if shape:
                raise ArgumentError(f"{operand.name} must be one number, of no dimensions; got the shape {shape}")
            continue
        fits = 1 <= len(shape) <= len(sizes) and all(own in (1, size) for own, size in zip(shape[::-1], sizes[::-1], strict=False))
        if not fits or (shape[-1] != sizes[-1] and not operand.is_strided):
            raise ArgumentError(f"{operand.name} must have the shape {_allowed(operand, sizes)}; got {shape}")
        if sizes[-1] > 1 and tensor.stride(-1) != 1 and not operand.is_strided:
            raise ArgumentError(f"{operand.name} must be contiguous in its last dimension (stride 1); got stride {tensor.stride(-1)}")


def _allowed(operand: Operand, sizes: tuple[int, ...]) -> str:
    names = ", ".join(axis.value for axis in operand.axes)
    return f"({names}) = {sizes}, or one that broadcasts to it{'' if operand.is_strided else ' by its leading dimensions'}"


def tensor_strides(problem: Problem, tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Strides of operands whose tensors have passed `check_tensors`, by name: 0 along what a tensor lacks."""
    found = {}
    for operand, tensor in zip(modifier_operands(problem), tensors, strict=True):
        if not operand.axes:
            continue
        missing = len(operand.axes) - tensor.ndim
        own = [step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        last = own[-1:] if operand.is_strided else [1] * len(own[-1:])
        found[operand.name] = (*(0,) * missing, *own[:-1], *last)
    return found


def gradient_strides(problem: Problem, tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Strides of gradients of operands of which each score has an element: dense, 0 along what a tensor lacks."""
    found = {}
    given = {f"d_{operand.name}": tensor for operand, tensor in zip(modifier_operands(problem), tensors, strict=True)}
    for operand in modifier_gradients(problem):
        if operand.is_strided:
            sizes = (*(1,) * (4 - given[operand.name].ndim), *given[operand.name].shape)
            found[operand.name] = tuple(step if size > 1 else 0 for size, step in zip(sizes, dense(sizes), strict=True))
    return found


def expanded(operands: Sequence[Operand], problem: Problem, workload: Workload, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of the operands' whole sizes, by name; `operands`: those of modifiers, or their gradients."""
    pairs = zip(operands, tensors, strict=True)
    return {operand.name: tensor if operand.free else tensor.expand(operand.sizes(problem, workload)) for operand, tensor in pairs}


def modified_of_call(
    causal: Causal,
    window: Ends | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    chunk: int | None = None,
    prefix_len: torch.Tensor | None = None,
    document_ids: Any = None,
    dropout_p: float = 0.0,
    score_mod: Any = None,
    mask_mod: Any = None,
    *,
    top_left: int,
    device: torch.device | None = None,
    call: CallOf | None = None,
) -> tuple[bool, Modified | tuple[()]]:
    """Whether the mask is causal, and what operators are told of modifiers. Raises ArgumentError.

    top_left: see `Seen.of`; device: that a seed is drawn on, by PyTorch's generator; call: what functions are for
    """
    traced = None
    if score_mod is not None or mask_mod is not None:
        if is_dynamo_compiling():
            traced = recorded_call(score_mod, mask_mod, top_left, window is None and prefix_len is None, device)
        else:
            own = softcap, alibi_slopes is not None, bias is not None, mask is not None or key_padding_mask is not None
            traced = traced_call(score_mod, mask_mod, call, causal, window, prefix_len is not None, top_left, own)
        window = window if traced.window is None else traced.window
        softcap = softcap if traced.softcap is None else traced.softcap
        alibi_slopes = alibi_slopes if traced.alibi_slopes is None else traced.alibi_slopes
        bias = bias if traced.bias is None else traced.bias
        mask = mask if traced.mask is None else traced.mask
    is_causal, of_seen, sizes = _seen(causal, window, chunk, top_left)
    names = list(of_seen)
    numbers, tensors = [], []  # those of several modifiers come in the order of their names, sorted, as `given_modifiers` takes them
    dropped = 0.0 if type(dropout_p) is float and dropout_p == 0 else checked_dropout(dropout_p)
    if dropped:
        names.append("dropout")
        numbers.append(dropped)
    if softcap is not None:
        names.append("softcap")
        numbers.append(checked_softcap(softcap))
    if alibi_slopes is not None:
        names.append("alibi")
        tensors.append(_tensor("alibi_slopes", alibi_slopes))
        if alibi_slopes.requires_grad:
            _require_no_gradient("alibi_slopes", alibi_slopes)
    if bias is not None:
        names.append("bias_fp32" if _tensor("bias", bias).dtype == torch.float32 else "bias")
        tensors.append(bias)
    if key_padding_mask is not None:
        of_keys = _of_keys(key_padding_mask)
        mask = of_keys if mask is None else _tensor("mask", mask) & of_keys
    if mask is not None:
        names.append("boolean_mask")
        tensors.append(_tensor("mask", mask))
    if document_ids is not None:
        names.append("document_ids")
        tensors.extend(_documents(document_ids, top_left))
    if dropped:
        tensors.append(drawn_seed(device))
    if prefix_len is not None:
        names.append("prefix_len")
        tensors.append(_tensor("prefix_len", prefix_len))
    if sinks is not None:
        names.append("sinks")
        given = _tensor("sinks", sinks)
        tensors.append(given.float() if given.dtype in _SIXTEEN_BITS else given)
    if traced is not None and traced.name:
        names.append(traced.name)
        sizes = (*sizes, *traced.whole)
        numbers.extend(traced.numbers)
        tensors.extend(traced.tensors)
    if not names:
        return is_causal, ()
    text = names[0] if len(names) == 1 else ",".join(names) if is_dynamo_compiling() else _listed(tuple(names))
    return is_causal, (text, sizes, numbers, tensors)


_listed = lru_cache(maxsize=2**10)(",".join)  # one text each time, as those of traced functions are long


def seed_of(names: str = "", sizes: Any = (), numbers: Any = (), tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
    """Of the dropout that operators are told of: the only number in memory. None without. torch.compile traces this."""
    return next((tensor for tensor in tensors if tensor.dtype == torch.int64 and tensor.ndim == 0), None)


_Told = tuple[bool, tuple[str, ...], Sequence[int]]  # whether the mask is causal, the modifiers, their sizes


def _seen(causal: Causal, window: Ends | None, chunk: int | None, top_left: int) -> _Told:
    """Of `Seen.of`, which remembers what it was asked in the usual types. torch.compile looks into no memory."""
    if type(causal) in (bool, str) and type(chunk) in _ENDS and not is_dynamo_compiling():
        top_left = top_left if type(causal) is str else 0  # it says nothing else
        if window is None:
            return _remembered(causal, None, None, chunk, top_left)
        if type(window) is tuple and len(window) == 2 and {*map(type, window)} <= _ENDS:
            return _remembered(causal, *window, chunk, top_left)
    return _told(Seen.of(causal, window, chunk, top_left))


def _told(seen: Seen) -> _Told:
    return seen.mask is Mask.CAUSAL, seen.modifiers, seen.sizes_of_modifiers


@lru_cache(maxsize=2**10)
def _remembered(causal: Causal, left: int | None, right: int | None, chunk: int | None, top_left: int) -> _Told:
    return _told(Seen.of(causal, (left, right), chunk, top_left))


def _of_keys(key_padding_mask: torch.Tensor) -> torch.Tensor:
    """As a mask. Raises ArgumentError."""
    if _tensor("key_padding_mask", key_padding_mask).ndim != 2:
        raise ArgumentError(f"key_padding_mask must have the shape (batch, len_kv); got {tuple(key_padding_mask.shape)}")
    return key_padding_mask.unsqueeze(1).unsqueeze(1)  # in half the time of an index


def _documents(document_ids: Any, top_left: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of queries, and of keys. Raises ArgumentError."""
    if isinstance(document_ids, torch.Tensor):
        if top_left != 0:
            rule = "must be a pair of tensors, of queries and of keys, where len_q is not len_kv"
            raise ArgumentError(f"document_ids {rule}; got one, and len_q - len_kv is {top_left}")
        return document_ids, document_ids
    if not isinstance(document_ids, tuple) or len(document_ids) != 2:
        raise ArgumentError(f"document_ids must be a tensor or a pair of tensors, of queries and of keys; got {shown(document_ids)}")
    return _tensor("document_ids[0]", document_ids[0]), _tensor("document_ids[1]", document_ids[1])


def _tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        require_type(name, tensor, torch.Tensor)
    return tensor


def addresses_of_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where they lie. Raises ArgumentError for one whose storage is gone, which a kernel would read all the same."""
    found = [tensor.data_ptr() for tensor in tensors]
    if 0 in found:
        raise ArgumentError("tensors of modifiers must have storages that hold their elements; got one without")
    return found


def signature_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What of them decides a plan."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
