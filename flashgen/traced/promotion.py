"""In which dtype PyTorch computes with 0-d tensors and Python numbers, and values as expressions of that dtype.

Tensors of 16-bit floats are float32 once an element is loaded, as in compiled FlexAttention. Integers of less than 32 bits wrap as theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NoReturn, Protocol

import torch

from flashgen.codegen.expressions.build import apply, cast
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, INT32, Expression, ScalarType, constant

from .captured_number import CapturedNumber, is_captured, parts_of
from .traced_tensor import TYPES, PartialLoad, Scalar, TracedTensor

Value = Scalar | bool | int | float | CapturedNumber
_CATEGORIES = {bool: 0, int: 1, float: 2}
_OF_NUMBERS = (torch.bool, torch.int64, torch.float32)  # by category
_BITS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16}


class Context(Protocol):
    """What a trace does for those who compute with its values."""

    def refuse(self, must: str, got: str) -> NoReturn:
        """Raises ArgumentError."""

    def number(self, given: CapturedNumber, type: ScalarType) -> Expression:
        """A captured number as a leaf of type int32 or float32."""

    def captured(self, tensor: torch.Tensor) -> Scalar | PartialLoad:
        """A tensor that was met as it is."""


class Promotion:
    """Values in a trace."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.refuse = context.refuse

    def value(self, given: Any) -> Value:
        """An argument of a function as a value. Refuses what is none: a tensor of more dimensions, a text."""
        if is_captured(given) or type(given) in (Scalar, *_CATEGORIES):
            return given  # type: ignore[no-any-return]
        if isinstance(given, torch.Tensor):
            traced = given.traced if type(given) is TracedTensor else self._context.captured(given)
            if isinstance(traced, Scalar):
                return traced
            missing = len(traced.shape) - len(traced.indices)
            self.refuse(
                "index captured tensors with an integer for each dimension before it computes with them, and do all else outside",
                f"a tensor that lacks {missing} of {len(traced.shape)} indices",
            )
        if isinstance(given, (int, float)):  # numbers of NumPy, and of subclasses
            return float(given) if isinstance(given, float) else int(given)
        if hasattr(given, "__index__") or hasattr(given, "__float__"):
            return int(given) if hasattr(given, "__index__") else float(given)
        self.refuse("compute with tensors and numbers", f"a value of type {type(given).__qualname__}")

    def scalar(self, given: Any) -> Scalar:
        """An argument as a 0-d tensor."""
        value = self.value(given)
        if isinstance(value, Scalar):
            return value
        dtype = self.dtype_of(value)
        return Scalar(self.in_dtype(value, dtype), dtype)

    def dtype_of(self, *values: Value) -> torch.dtype:
        """The dtype in which PyTorch computes with values together."""
        tensors = [value.dtype for value in values if isinstance(value, Scalar)]
        dtype = reduce(torch.promote_types, tensors) if tensors else None
        own = -1 if dtype is None else 0 if dtype is torch.bool else 2 if dtype.is_floating_point else 1
        numbers = max((_CATEGORIES[self._kind(value)] for value in values if not isinstance(value, Scalar)), default=-1)
        return _OF_NUMBERS[numbers] if dtype is None or numbers > own else dtype

    def _kind(self, value: Any) -> type:
        return type(parts_of(value)[1] if is_captured(value) else value)

    def together(self, *given: Any, dtype: torch.dtype | None = None) -> tuple[list[Expression], torch.dtype]:
        """Arguments as expressions of the dtype in which PyTorch computes with them, or of another one."""
        values = [self.value(each) for each in given]
        dtype = dtype or self.dtype_of(*values)
        return [self.in_dtype(value, dtype) for value in values], dtype

    def floats(self, *given: Any) -> list[Expression]:
        """Arguments as float32, as functions that have no integers take them."""
        return self.together(*given, dtype=torch.float32)[0]

    def in_dtype(self, value: Value, dtype: torch.dtype) -> Expression:
        """A value in a dtype."""
        if dtype not in TYPES:
            self.refuse("compute in float32, int32, int64 or bool", f"{str(dtype).removeprefix('torch.')}")
        type = TYPES[dtype]
        if isinstance(value, Scalar):
            node = cast(value.node, type)
            return node if value.dtype is dtype else self.wrapped(node, dtype)
        given: Any = value
        if is_captured(value):
            return self.wrapped(self._number(value, type), dtype)
        if type is FLOAT32:
            return self._constant(value, lambda: constant(float(given), type))
        if type is BOOL:
            return constant(value != 0, BOOL)
        whole = int(given)
        limits = torch.iinfo(dtype)
        if not limits.min <= whole <= limits.max:
            self.refuse(f"compute with numbers that {str(dtype).removeprefix('torch.')} holds", f"{whole}")
        return constant(whole, type)

    def _constant(self, value: object, make: Callable[[], Expression]) -> Expression:
        try:
            return make()
        except OverflowError:
            self.refuse("compute with numbers that float32 holds", f"{value}")

    def _number(self, value: Any, type: ScalarType) -> Expression:
        is_float = isinstance(parts_of(value)[1], float)
        if type is FLOAT32 or is_float:
            return cast(self._context.number(value, FLOAT32), type)
        return cast(self._context.number(value, INT32), type)

    def wrapped(self, node: Expression, dtype: torch.dtype) -> Expression:
        """An int32 as an integer of less bits has it."""
        if dtype is torch.uint8:
            return apply("and", node, constant(255, INT32))
        if dtype in _BITS:
            unused = constant(32 - _BITS[dtype], INT32)
            return apply("shift_right", apply("shift_left", node, unused), unused)
        return node
