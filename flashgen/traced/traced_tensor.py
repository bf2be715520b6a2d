"""`TracedTensor`: what a traced function gets for score and positions, and for the tensors that it captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, INT32, INT64, Expression, ScalarType

TYPES: dict[torch.dtype, ScalarType] = {
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), INT32),
    **{torch.int64: INT64, torch.bool: BOOL, torch.float32: FLOAT32},
}
"""The dtypes that a traced scalar can have, and the type of its expression."""
STORED: dict[torch.dtype, str] = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "bool", torch.uint8: "uint8"},
    **{torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64"},
}
"""The dtypes of captured tensors, as expressions name them."""


@dataclass(frozen=True)
class Scalar:
    """A 0-d tensor: its expression, and the dtype by which PyTorch promotes it."""

    node: Expression
    dtype: torch.dtype


@dataclass(frozen=True)
class PartialLoad:
    """A captured tensor of which the first dimensions have an index.

    tensor: whatever the trace knows it by. name: in expressions
    """

    tensor: Any
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    indices: tuple[Expression, ...] = ()


class TracedTensor(torch.Tensor):
    """Computes nothing: PyTorch tells the trace of each function that it is given to. `traced` says what it stands for."""

    traced: Scalar | PartialLoad

    @staticmethod
    def __new__(cls, traced: Scalar | PartialLoad) -> TracedTensor:
        """A tensor without memory."""
        shape, device = ((), None) if isinstance(traced, Scalar) else (traced.shape[len(traced.indices) :], traced.device)
        made: TracedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=traced.dtype, device=device)
        made.traced = traced
        return made

    def __iter__(self) -> Any:
        return iter(self.unbind())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ArgumentError("score_mod and mask_mod must not keep their arguments: they stand for tensors in the call alone")

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]
