"""One file for each modifier: what changes scores, or which keys a query sees. A new file is found by itself."""

from __future__ import annotations

import pkgutil
from functools import cache


def modifier_names() -> tuple[str, ...]:
    """The modifiers that have a file here, sorted. Nothing is imported for that."""
    return _names_in(tuple(__path__))


@cache  # each problem that has some asks for them
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders)))
