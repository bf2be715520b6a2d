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

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given, given_modifiers, modifier_gradients, modifier_named, modifier_operands
from flashgen.codegen.modifiers import TRACED, listed_names
from flashgen.codegen.operands import Operand
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..numerics.oracle import torch_dtype
from .alignment import require_whole_storages
from .traced_call import is_indifferent, with_captured, with_gradients
from .views import with_axes

_PLAIN, _ENDS = {int, float}, {int, NoneType}  # types of sizes and numbers, and of a window's ends
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
MASK_NAME, DROPOUT = "boolean_mask", "dropout"
OF_KEYS = "key_padding_mask"  # in place of a boolean mask's name: its tensor is [batch, len_kv] as yet, see `with_made_axes`
UNDRAWN = "undrawn_dropout"  # in place of dropout's name: its seed is not among the tensors, see `with_seed`

_address = torch.Tensor.data_ptr  # each call asks

Modified = tuple[str, Sequence[int], Sequence[float], Sequence[torch.Tensor]]
"""What operators are told of modifiers: names, sizes, numbers, tensors. An empty tuple stands for none."""


def asked(
    names: str = "",
    sizes: Sequence[int] | None = (),
    numbers: Sequence[float] | None = (),
    tensors: Sequence[torch.Tensor] | None = None,
) -> tuple[Given, tuple[torch.Tensor, ...]]:
    """What operators are told, in the types of `codegen`. Raises ArgumentError as `given_modifiers`, and for more or fewer tensors.

    Views that PyTorch is to negate are negated: its dispatcher, which does that for q, k and v, does not look into an optional list.
    """
    if not names and not tensors and not sizes and not numbers:
        return NO_MODIFIERS, ()
    sizes, numbers = sizes or (), numbers or ()  # AOTInductor's packages give None for an empty list
    found = tuple([tensor.resolve_neg() if tensor.is_neg() else tensor for tensor in tensors or ()])
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


def with_made_axes(given: Given, tensors: Sequence[torch.Tensor]) -> tuple[Given, tuple[torch.Tensor, ...]]:
    """What operators are told, in the types of `codegen`, where `given` has OF_KEYS among its names: the mask gets the axes it lacks.

    A kernel is given its address, which is the same without them. So a call like the one before does without.
    """
    names, at = given.names, given.names.index(OF_KEYS)
    i = len(tensor_names(names[:at]))
    made = given._replace(names=(*names[:at], MASK_NAME, *names[at + 1 :]))
    return made, (*tensors[:i], with_axes(tensors[i]), *tensors[i + 1 :])


def seed_position(names: tuple[str, ...]) -> int | None:
    """Of the seed among all tensors of these modifiers, where UNDRAWN is among them; else None. Every mask has its axes."""
    return len(tensor_names(names[: names.index(UNDRAWN)])) if UNDRAWN in names else None


def with_seed(given: Given, tensors: Sequence[torch.Tensor], seed: torch.Tensor) -> tuple[Given, tuple[torch.Tensor, ...]]:
    """What operators are told, in the types of `codegen`, where `given` has UNDRAWN among its names, with the seed that is lacking."""
    names, i = given.names, seed_position(given.names)
    drawn = given._replace(names=tuple([DROPOUT if name == UNDRAWN else name for name in names]))
    return drawn, (*tensors[:i], seed, *tensors[i:])


@lru_cache(maxsize=2**10)
def have_gradients(names: tuple[str, ...]) -> tuple[bool, ...]:
    """Of each of `tensor_names`, whether the backward pass has a gradient of it."""
    return tuple(name in one.learned for one in map(modifier_named, names) for name in one.tensors)


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
            require_no_gradient(name, tensor)


@lru_cache(maxsize=2**10)
def _may_require_gradients(names: tuple[str, ...]) -> tuple[bool, ...]:
    """Captured tensors on which no score depends, or not smoothly, may: they get none, as in PyTorch."""
    learning = have_gradients(tuple(with_gradients(name, tensor_names((name,))) for name in names))
    all_of_names = zip(learning, (name for name in names for _ in tensor_names((name,))), tensor_names(names), strict=True)
    return tuple(has or is_indifferent(name, tensor) for has, name, tensor in all_of_names)


def require_no_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError if it requires grad."""
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
    """Views of the operands' whole sizes, by name; `operands`: those of modifiers, or their gradients, on the CPU.

    Along an axis of no elements, as of keys that are not there, a tensor of one stays as it is: kernels write a gradient's, 0. Raises
    ArgumentError for a tensor whose storage does not hold its elements.
    """
    found = {}
    for operand, tensor in zip(operands, tensors, strict=True):
        require_whole_storages({operand.name: tensor})
        sizes = operand.sizes(problem, workload)
        own = (*(1,) * (len(sizes) - tensor.ndim), *tensor.shape)
        found[operand.name] = tensor if operand.free else tensor.expand([size or one for size, one in zip(sizes, own, strict=True)])
    return found


def addresses_of_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where they lie. Raises ArgumentError for one whose storage is gone, which a kernel would read all the same."""
    found = [*map(_address, tensors)]
    if 0 in found:
        raise ArgumentError("tensors of modifiers must have storages that hold their elements; got one without")
    return found


def signature_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What of them decides a plan."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
