"""What a mask that is no tensor says to models that take it for one: `NoTensor`.

Models ask masks for elements, dtypes and copies. Without this they would get AttributeErrors that name no cure, or what any object of
Python says, such as that it is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from flashgen.codegen.errors import ArgumentError

from . import counts

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "and", "rand", "or", "ror", "xor", "rxor", "invert", "neg"),
    *("lt", "le", "gt", "ge", "iter", "float", "int"),
)


class NotATensorError(ArgumentError, AttributeError):
    """Also an AttributeError: whoever asks by hasattr whether a tensor's attribute is there is told that it is not."""


def refuse_use(asked: str) -> NoReturn:
    """Raises ArgumentError for what was asked of a mask."""
    raise counts.refused_error(
        f"attention_mask must not be asked for {asked} here: it is flashgen's PreparedMask, which has no elements. Give the part of the "
        "model that asks attn_implementation='sdpa', or 'eager' if it has none",
        NotATensorError,
    )


class NoTensor:
    """The base of a mask without elements; a subclass calls `refuse_uses` with the names of tensors' attributes."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, torch.Tensor)):
            refuse_use("its elements by ==")
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        refuse_use(f"its elements by {getattr(function, '__name__', function)}")


def refuse_uses(mask: type, names: Iterable[str]) -> None:
    """Makes a class refuse attributes by name, and the operators of tensors."""
    for name in names:
        setattr(mask, name, property(lambda _, name=name: refuse_use(name)))  # type: ignore[misc]
    for name in _OPERATORS:
        setattr(mask, f"__{name}__", lambda *_, name=name: refuse_use(f"its elements by {name}"))
