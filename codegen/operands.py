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
    TOKENS_Q = "tokens_q"
    TOKENS_KV = "tokens_kv"
    PAGES = "pages"
    PAGE = "page_size"
    TABLE = "table_pages"
    NEW_KEYS = "new_keys"
    BOUNDARIES = "boundaries"  # of packed sequences: where each begins, and the end of the last one; batch + 1, which is no field
    HEADS_Q = "heads_q"
    HEADS_KV = "heads_kv"
    HEAD_DIM = "head_dim"
    HEAD_DIM_V = "head_dim_v"


_TOKENS = (Axis.TOKENS_Q, Axis.TOKENS_KV)


class Element(enum.Enum):
    """The type of a tensor's elements: the problem's, or one that does not depend on it."""

    INPUT = "input"
    F32 = "f32"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    E4M3 = "e4m3"
    BF16 = "bf16"
    F16 = "f16"
    BOOL = "bool"


_BYTES = {
    **dict.fromkeys((Element.I64,), 8),
    **dict.fromkeys((Element.F32, Element.I32), 4),
    **dict.fromkeys((Element.I16, Element.BF16, Element.F16), 2),
    **dict.fromkeys((Element.I8, Element.U8, Element.E4M3, Element.BOOL), 1),
}


class Role(enum.Enum):
    """What a kernel does with a tensor."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"


@dataclass(frozen=True)
class Operand:
    """A tensor of an operation, of no axes for one number.

    optional: a call may leave it out; its address is 0 then
    free:     it may have any shape, which no workload says and no view has; kernels are told of it by other values
    """

    name: str
    axes: tuple[Axis, ...]
    element: Element = Element.INPUT
    role: Role = Role.IN
    optional: bool = False
    free: bool = False

    @property
    def is_strided(self) -> bool:
        """Whether a caller chooses its strides: of four axes, of tokens, heads and columns, a page table, or a number for each head.

        All others are dense. The last stride is 1 but where numbers are of heads.
        """
        if self.is_of_heads:
            return True
        return len(self.axes) == 4 or (len(self.axes) == 3 and self.axes[0] in _TOKENS) or self.axes[-1:] == (Axis.TABLE,)

    @property
    def is_of_heads(self) -> bool:
        """Whether it has a number for each key/value head of each entry of the batch: with any strides, 0 where they have the same."""
        return self.axes == (Axis.BATCH, Axis.HEADS_KV)

    def bytes(self, problem: Problem) -> int:
        """Size of one element."""
        return _BYTES.get(self.element) or problem.dtype.bytes

    def sizes(self, problem: Problem, workload: Workload) -> tuple[int, ...]:
        """How many elements it has along each axis."""
        return self.sizes_in({**vars(problem), **vars(workload)})

    @cached_property
    def sizes_in(self) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
        """`sizes` where all fields of problem and workload are together: each call of a new length asks for every operand's."""
        if Axis.BOUNDARIES in self.axes:
            return lambda known: (known[Axis.BATCH.value] + 1,)
        names = [axis.value for axis in self.axes]
        if len(names) < 2:  # of one name, an itemgetter gives no tuple
            return lambda known: tuple(known[name] for name in names)
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
