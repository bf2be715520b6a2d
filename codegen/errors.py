"""The errors that flashgen raises. Every message starts with the argument it is about."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

from .sizes import NUMBERS

_LONGEST = 200  # characters of a value that an error repeats
_WRITTEN = {"torch.dtype", "torch.device", "torch.layout"}  # types that are written as they are; PyTorch is not imported here


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class ArgumentError(FlashgenError, ValueError):
    """An argument has a value that is not allowed: the message names it, what was given and what is allowed."""


class IllegalConfigError(ArgumentError):
    """A config cannot run this problem on this target. `reasons` holds all of the reasons."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        self._what = what
        super().__init__(f"config {what} is illegal: " + "; ".join(reasons))

    def __reduce__(self) -> tuple[Any, ...]:  # by the message alone, which is not what it is made of, it could not be unpickled
        return type(self), (self._what, self.reasons)


def shown(given: object) -> str:
    """A value as an error repeats it: of Python's own types, and PyTorch's dtypes, devices and layouts, as it is written, cut if long.

    Of others the type: tensors may be on a GPU.
    """
    kind = type(given)
    try:
        if kind.__module__ == "builtins" or isinstance(given, enum.Enum) or f"{kind.__module__}.{kind.__qualname__}" in _WRITTEN:
            text = repr(given)
            return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    except Exception:  # an integer of thousands of digits, nesting without end, an item that cannot say what it is
        pass
    return f"a value of type {kind.__module__}.{kind.__qualname__}"


def choice_error(argument: str, given: object, allowed: Iterable[object]) -> ArgumentError:
    """The error for a value outside a fixed set of choices."""
    return ArgumentError(f"{argument} must be one of {', '.join(str(a) for a in allowed) or 'none'}; got {shown(given)}")


def require_int(argument: str, given: Any, low: int, high: int | None = None) -> None:
    """Raises ArgumentError unless `given` is an int (neither a bool nor of another subclass) in [low, high]."""
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if type(given) not in NUMBERS or given < low or (high is not None and given > high):
        raise ArgumentError(f"{argument} must be {allowed}; got {shown(given)}")
