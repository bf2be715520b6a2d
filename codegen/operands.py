"""Operands: the named tensors that an operation reads and writes, and `Call`, what is known of them at launch but their addresses."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .problem import Problem
from .workload import Workload


class Axis(enum.Enum):
    """What a dimension of a tensor counts; the value is the field of `Workload` or `Problem` that holds its size."""

    BATCH = "batch"
    LEN_Q = "len_q"
    LEN_KV = "len_kv"
    HEADS_Q = "heads_q"
    HEADS_KV = "heads_kv"
    HEAD_DIM = "head_dim"
    HEAD_DIM_V = "head_dim_v"


class Element(enum.Enum):
    """The type of a tensor's elements: the problem's, or one that does not depend on it."""

    INPUT = "input"
    F32 = "f32"
    BOOL = "bool"
    I32 = "i32"


class Role(enum.Enum):
    """What a kernel does with a tensor."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"


@dataclass(frozen=True)
class Operand:
    """A tensor of an operation. `optional`: a call may leave it out; its address is 0 then."""

    name: str
    axes: tuple[Axis, ...]
    element: Element = Element.INPUT
    role: Role = Role.IN
    optional: bool = False

    @property
    def is_strided(self) -> bool:
        """Whether a caller chooses its strides: of four axes. All others are dense."""
        return len(self.axes) == 4

    def bytes(self, problem: Problem) -> int:
        """Size of one element."""
        return {Element.INPUT: problem.dtype.bytes, Element.F32: 4, Element.BOOL: 1, Element.I32: 4}[self.element]

    def sizes(self, problem: Problem, workload: Workload) -> tuple[int, ...]:
        """How many elements it has along each axis."""
        return self.sizes_in({**vars(problem), **vars(workload)})

    @cached_property
    def sizes_in(self) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
        """`sizes` where all fields of problem and workload are together: each call of a new length asks for every operand's."""
        names = [axis.value for axis in self.axes]
        if len(names) == 1:  # of one name, an itemgetter gives no tuple
            return lambda known: (known[names[0]],)
        return operator.itemgetter(*names)


class View(NamedTuple):
    """Sizes and strides of one tensor, in elements, in the order of its operand's axes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Call(NamedTuple):  # no dataclass, as each call of a new length makes one
    """All that is known at launch but addresses: views by operand name, scalars by name.

    `Operation.call` makes one. An optional operand that nobody wants has a view, too; its address is 0.
    """

    problem: Problem
    workload: Workload
    views: Mapping[str, View]
    scalars: Mapping[str, float]
