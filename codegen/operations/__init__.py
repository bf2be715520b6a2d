"""One file for each operation: what is computed, whatever family of kernels does it. A new file is found by itself."""

from __future__ import annotations

import pkgutil
from functools import cache

from ..errors import choice_error

BOTH = "both"  # passes of attention, where more than one may be asked for


def operations_of(passes: str) -> tuple[str, ...]:
    """The operations that a choice of passes stands for: one by its name, or forward and backward for "both".

    Raises ArgumentError for another.
    """
    if passes == BOTH:
        return "forward", "backward"
    if passes not in operation_names():
        raise choice_error("pass", passes, (*operation_names(), BOTH))
    return (passes,)


def operation_names() -> tuple[str, ...]:
    """The operations that have a file here, sorted. Nothing is imported for that."""
    return _names_in(tuple(__path__))


@cache  # each problem that is made asks for them
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders)))
