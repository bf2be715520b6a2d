"""Operands: the named tensors that an operation reads and writes, and `Call`, what is known of them at launch but their addresses."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ArgumentError, shown
from .problem import Problem, Workload


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

    def sizes(self, problem: Problem, workload: Workload) -> tuple[int, ...]:
        """How many elements it has along each axis."""
        sizes = {**vars(workload), "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        return tuple(sizes[axis.value] for axis in self.axes)


@dataclass(frozen=True)
class View:
    """Sizes and strides of one tensor, in elements, in the order of its operand's axes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, sizes: tuple[int, ...]) -> View:
        """Without gaps, the last axis innermost."""
        strides, step = [0] * len(sizes), 1
        for axis in reversed(range(len(sizes))):
            strides[axis] = step
            step *= sizes[axis]
        return cls(sizes, tuple(strides))


@dataclass(frozen=True)
class Call:
    """All that is known at launch but addresses: views by operand name, scalars by name.

    `Operation.call` makes one; an optional operand that is left out has no view.
    """

    problem: Problem
    workload: Workload
    views: Mapping[str, View]
    scalars: Mapping[str, float]

    def require(self, operands: tuple[Operand, ...], scalars: tuple[str, ...]) -> None:
        """Raises ArgumentError unless this has a view of each operand, of its sizes, and each scalar, and nothing else."""
        known = {operand.name: operand for operand in operands}
        needed = {name for name, operand in known.items() if not operand.optional}
        if not needed <= self.views.keys() <= known.keys():
            raise ArgumentError(f"views must be of {', '.join(known)}; got {', '.join(self.views) or 'none'}")
        if self.scalars.keys() != set(scalars):
            raise ArgumentError(f"scalars must be {', '.join(scalars) or 'none'}; got {', '.join(self.scalars) or 'none'}")
        for name, view in self.views.items():
            sizes = known[name].sizes(self.problem, self.workload)
            if view.sizes != sizes or len(view.strides) != len(sizes):
                raise ArgumentError(f"view of {name} must have sizes {shown(sizes)} and as many strides; got {view}")
