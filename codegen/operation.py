"""What an operation has to say: `Operation`, and the discovery of operations. An operation is what is computed, whatever family does it."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from .errors import choice_error
from .operands import Call, Operand, View
from .problem import Problem, Workload


class Operation(ABC):
    """A file in `codegen/operations` defines a subclass and one instance of it named `OPERATION`."""

    name: ClassVar[str]

    @abstractmethod
    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """The tensors that it reads and writes, in the order in which launches take their addresses."""

    @abstractmethod
    def scalars(self, problem: Problem) -> tuple[str, ...]:
        """Names of the numbers that a call gives beside its tensors."""

    @abstractmethod
    def examples(self) -> tuple[tuple[Problem, Workload], ...]:
        """Problems, each with a workload, that some family can compute: tests of all families run on them."""

    def call(self, problem: Problem, workload: Workload, views: Mapping[str, View], scalars: Mapping[str, float]) -> Call:
        """A call with these views and scalars; operands without a view are dense. Raises ArgumentError for what does not fit."""
        operands = self.operands(problem)
        dense = {o.name: View.dense(o.sizes(problem, workload)) for o in operands}
        call = Call(problem, workload, {**dense, **views}, scalars)
        call.require(operands, self.scalars(problem))
        return call


@cache
def operations() -> dict[str, Operation]:
    """Every operation that has a file in `codegen/operations`, by name."""
    from . import operations as package

    found = [importlib.import_module(f"{package.__name__}.{m.name}").OPERATION for m in pkgutil.iter_modules(package.__path__)]
    return {operation.name: operation for operation in found}


def find_operation(name: str) -> Operation:
    """The operation of that name. Raises ArgumentError that lists the known ones."""
    if name not in operations():
        raise choice_error("operation", name, operations())
    return operations()[name]


def operation_of(problem: Problem) -> Operation:
    """The operation that a problem is one of."""
    return find_operation(problem.direction.value)
