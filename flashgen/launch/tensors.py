"""`Tensors`: the operands of one call, in ordinary and in awkward memory layouts, with what is only written poisoned by NaN."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import modifier_gradients, modifier_operands
from flashgen.codegen.operands import Call, Operand, Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..numerics.oracle import oracle_of, torch_dtype

_FAR = 2**31  # elements: an offset of 32 bits does not reach the next row
_WILD = 2**31 - 16  # where there is no NaN
_NORESERVE = 0x4000  # of Linux; the module mmap lacks it in Python 3.11
_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1))  # of the first dimensions in memory, outermost first, as far as there are so many


@dataclass(frozen=True)
class Tensors(Mapping[str, torch.Tensor]):
    """The operands of one call by name, in their axes."""

    problem: Problem
    workload: Workload
    by_name: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @classmethod
    def random(cls, problem: Problem, workload: Workload, generator: torch.Generator) -> Tensors:
        """Inputs as the operation's oracle draws them, on the generator's device; all of it dense."""
        drawn = oracle_of(problem).inputs(problem, workload, generator)
        by_name = {}
        for operand in operation_of(problem).operands(problem):
            size, dtype = operand.sizes(problem, workload), torch_dtype(operand, problem)
            if operand.free and operand.role is not Role.IN:  # the gradient of a captured tensor
                size = tuple(drawn[operand.name.removeprefix("d_")].shape)
            by_name[operand.name] = (
                drawn[operand.name] if operand.name in drawn else torch.empty(size, dtype=dtype, device=generator.device)
            )
        tensors = cls(problem, workload, by_name)
        tensors.derive()
        tensors.poison()
        return tensors

    def derive(self, scalars: Mapping[str, float] | None = None) -> None:
        """Fills in place the inputs that follow from others, which may have changed; `scalars`: those that are not as usual."""
        given = {**operation_of(self.problem).scalars(self.problem, self.workload), **(scalars or {})}
        oracle_of(self.problem).derive(self.problem, self, given)

    def without_optional_inputs(self) -> Tensors:
        """Without the inputs that a call may leave out."""
        excluded = [operand.name for operand in self.operands if operand.optional and operand.role is Role.IN]
        return Tensors(self.problem, self.workload, {name: tensor for name, tensor in self.items() if name not in excluded})

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operation's operands that are here."""
        return tuple(operand for operand in operation_of(self.problem).operands(self.problem) if operand.name in self.by_name)

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """What a kernel writes, by name."""
        return {operand.name: self[operand.name] for operand in self.operands if operand.role is not Role.IN}

    def call(self, scalars: Mapping[str, float] | None = None) -> Call:
        """The call of these tensors; `scalars`: those that are not as usual."""
        of_modifiers = (*modifier_operands(self.problem), *modifier_gradients(self.problem))
        own = {operand.name for operand in of_modifiers if operand.is_strided}  # with any strides, as numbers of heads have
        own |= {operand.name for operand in self.operands if operand.is_of_heads}
        free = {operand.name for operand in self.operands if operand.free}
        strides = {name: _strides(tensor, name in own) for name, tensor in self.items() if name not in free}
        return operation_of(self.problem).call(self.problem, self.workload, strides, scalars)

    def changed(self) -> dict[str, torch.Tensor]:
        """Dense copies of what a kernel both reads and writes, by name: how it was before."""
        return {o.name: self[o.name].clone(memory_format=torch.contiguous_format) for o in self.operands if o.role is Role.INOUT}

    def replacing(self, **others: torch.Tensor) -> Tensors:
        """With other tensors of these names."""
        return Tensors(self.problem, self.workload, {**self.by_name, **others})

    def apart(self) -> Tensors:
        """The same values, where no stride of a tensor is one of another: a kernel that takes one for the other is wrong.

        Operands that are always dense stay so, and on a GPU outputs, as launches know no others there. What lies between rows is NaN.
        """
        on_cpu = next(iter(self.values())).device.type == "cpu"
        dense = modifier_gradients(self.problem)
        strided = [o for o in self.operands if o.is_strided and (on_cpu or o.role is not Role.OUT) and o not in dense]
        laid = {
            operand.name: _laid_apart(self[operand.name], _ORDERS[i % len(_ORDERS)], _gap(self[operand.name], i))
            for i, operand in enumerate(strided)
        }
        return self.replacing(**laid)

    def far(self) -> Tensors:
        """The same values on the CPU, where no row, head or batch is within 2^31 elements of the next: an offset of 32 bits is wrong.

        Raises ArgumentError if all operands are dense: none could be laid so.
        """
        dense = (*modifier_operands(self.problem), *modifier_gradients(self.problem))  # whose strides are bounded
        strided = [operand.name for operand in self.operands if operand.is_strided and operand not in dense]
        if not strided:
            raise ArgumentError(f"operands must have one whose strides a caller chooses; got {', '.join(self)}, which are dense")
        laid = {name: _laid_apart(self[name], (1, 0, 2), _FAR + _gap(self[name], i)) for i, name in enumerate(strided)}
        return self.replacing(**laid)

    def poison(self) -> None:
        """Fills what a kernel only writes with NaN, or a wild number: what it does not write shows."""
        for operand in self.operands:
            if operand.role is Role.OUT:
                tensor = self[operand.name]
                in_memory = tuple(slice(None) if step else slice(1) for step in tensor.stride())  # a gradient may be the same along an axis
                tensor[in_memory].fill_(math.nan if tensor.is_floating_point() else _WILD)


def _strides(tensor: torch.Tensor, any_last: bool = False) -> tuple[int, ...]:
    """In elements; 0 where the size is 1, so that a stride that is never used cannot overflow. The last one is 1, unless `any_last`."""
    if not tensor.ndim:
        return ()
    *outer, last = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (*outer, last if any_last else 1)


def _gap(tensor: torch.Tensor, number: int) -> int:
    """Elements between entries of a tensor, other ones for each `number`: rows stay aligned to 16 bytes."""
    return max(8, 16 // tensor.element_size()) * (number + 1)


def _laid_apart(tensor: torch.Tensor, dims: tuple[int, int, int], gap: int) -> torch.Tensor:
    """A copy whose dimensions but the last lie in memory in this order, outermost first, each with so many elements between its entries."""
    last = tensor.ndim - 1
    strides, step = [*(0,) * last, 1], tensor.shape[last]
    for dim in (dim for dim in reversed(dims) if dim < last):
        strides[dim] = step + gap
        step = strides[dim] * max(1, tensor.shape[dim])
    if gap < _FAR:
        between = math.nan if tensor.is_floating_point() else _WILD
        memory = torch.full((gap + step,), between, dtype=tensor.dtype, device=tensor.device)
    else:
        memory = torch.frombuffer(untouched((gap + step) * tensor.element_size()), dtype=tensor.dtype)
    return memory.as_strided(tuple(tensor.shape), tuple(strides), gap).copy_(tensor)


def untouched(size: int) -> mmap.mmap:
    """So many bytes of address space, of which only pages that somebody writes take memory."""
    space = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    space.madvise(mmap.MADV_NOHUGEPAGE)  # each row would take 2 MiB
    return space
