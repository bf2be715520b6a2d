"""What an operation has to say: `Operation`, and the discovery of operations. An operation is what is computed, whatever family does it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from typing import ClassVar

from .discovery import discovered
from .errors import ArgumentError, choice_error, shown
from .modifier import modifier_operands
from .operands import Call, Operand, View
from .problem import Problem
from .workload import Workload


class Operation(ABC):
    """A file in `codegen/operations` defines a subclass and one instance of it named `OPERATION`.

    is_attention: whether it is a pass of attention, whose problems have head dims and a mask
    """

    name: ClassVar[str]
    is_attention: ClassVar[bool] = True

    @abstractmethod
    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """The tensors that it reads and writes, in the order in which launches take their addresses."""

    @abstractmethod
    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """The numbers that a call gives beside its tensors, by name, as they are where a caller says nothing else."""

    @abstractmethod
    def flops(self, problem: Problem, workload: Workload) -> float:
        """Floating-point operations by the field's convention."""

    def io_bytes(self, problem: Problem, workload: Workload) -> int:
        """Bytes of the operands, each once, without optional ones: what the memory must move at least.

        Those of modifiers do not count: what they take depends on how much of them is the same.
        """
        of_modifiers = modifier_operands(problem)
        required = (operand for operand in self.operands(problem) if not operand.optional and operand not in of_modifiers)
        return sum(math.prod(operand.sizes(problem, workload)) * operand.bytes(problem) for operand in required)

    def sizes_to_verify(self, workload: Workload) -> Workload:
        """The workload with such sizes as operations but attention have, too: for verification, which knows those of attention."""
        return workload

    @abstractmethod
    def examples(self) -> tuple[tuple[Problem, Workload], ...]:
        """Problems, each with a workload, that some family can compute: tests of all families run on them."""

    def call(
        self,
        problem: Problem,
        workload: Workload,
        strides: Mapping[str, tuple[int, ...]] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> Call:
        """A call of these sizes; `strides`: of operands that are not dense, in elements, an entry for each of their axes.

        scalars: those that are not as usual.
        Raises ArgumentError for names or numbers of strides that are not the operation's.
        """
        views, usual, known = {}, self.scalars(problem, workload), {**vars(problem), **vars(workload)}
        strides, scalars = strides or {}, scalars or {}
        for operand in self.operands(problem):
            sizes = operand.sizes_in(known)
            given = strides.get(operand.name) or dense(sizes)
            if len(given) != len(sizes):
                raise ArgumentError(f"strides of {operand.name} must be {len(sizes)}, one for each axis; got {shown(given)}")
            views[operand.name] = view_of((sizes, given))
        if not strides.keys() <= views.keys():
            raise ArgumentError(f"strides must be of {', '.join(views)}; got {', '.join(strides)}")
        if not scalars.keys() <= usual.keys():
            raise ArgumentError(f"scalars must be of {', '.join(usual) or 'none'}; got {', '.join(scalars)}")
        return Call(problem, workload, views, {**usual, **scalars})


view_of = partial(tuple.__new__, View)  # of a pair; View's own constructor takes twice as long


def dense(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, the last axis innermost."""
    steps = [1]
    for size in sizes[:0:-1]:
        steps.append(steps[-1] * size)
    return tuple(steps[::-1]) if sizes else ()


@cache
def operations() -> dict[str, Operation]:
    """Every operation that has a file in `codegen/operations`, by name."""
    from . import operations as package

    found = discovered(package, "OPERATION", Operation)  # type: ignore[type-abstract]
    for file, operation in found.items():
        if operation.name != file:
            raise ArgumentError(f"name of the operation in codegen/operations/{file}.py must be {file}; got {operation.name}")
    return found


def find_operation(name: str) -> Operation:
    """The operation of that name. Raises ArgumentError that lists the known ones."""
    if name not in operations():
        raise choice_error("operation", name, operations())
    return operations()[name]


def operation_of(problem: Problem) -> Operation:
    """The operation that a problem is one of."""
    return find_operation(problem.operation)
