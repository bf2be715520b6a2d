"""The errors that flashgen raises. Every message starts with the argument it is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class ArgumentError(FlashgenError, ValueError):
    """An argument has a value that is not allowed: the message names it, what was given and what is allowed."""


class IllegalConfigError(ArgumentError):
    """A config cannot run this problem on this target. `reasons` holds all of the reasons."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"config {what} is illegal: " + "; ".join(reasons))


def choice_error(argument: str, given: object, allowed: Iterable[object]) -> ArgumentError:
    """The error for a value outside a fixed set of choices."""
    return ArgumentError(f"{argument} must be one of {', '.join(str(a) for a in allowed)}; got {given!r}")


def require_int(argument: str, given: object, low: int, high: int | None = None) -> None:
    """Raises ArgumentError unless `given` is an int (not a bool) in [low, high]."""
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if not isinstance(given, int) or isinstance(given, bool) or given < low or (high is not None and given > high):
        raise ArgumentError(f"{argument} must be {allowed}; got {given!r}")
