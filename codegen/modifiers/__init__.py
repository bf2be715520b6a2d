"""One file for each modifier: what changes scores, or which keys a query sees. A new file is found by itself."""

from __future__ import annotations

import hashlib
import pkgutil
from functools import cache

TAKEN_BY_MOST = (
    *("alibi", "bias", "bias_fp32", "boolean_mask", "chunk", "document_ids", "document_ids_int64", "dropout", "prefix_len", "sinks"),
    *("softcap", "traced", "window"),
)
"""Modifiers that the generic families have, and those for Hopper that are not persistent, wide or of pairs."""
TRACED = "traced("  # what names of traced functions begin with


def modifier_names() -> tuple[str, ...]:
    """The modifiers that have a file here, sorted. Nothing is imported for that."""
    return _names_in(tuple(__path__))


def is_modifier(name: str) -> bool:
    """Whether a problem may have a modifier of that name: one with a file here, or traced functions, whose name says more."""
    return name in modifier_names() or (name.startswith(TRACED) and name.endswith(")"))


def listed_names(names: str) -> list[str]:
    """Names with commas between them, of which those within parentheses are parts of names."""
    found, depth, begin = [], 0, 0
    for i, letter in enumerate(names):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append(names[begin:i])
            begin = i + 1
    return [*found, names[begin:]]


def kind_of(name: str) -> str:
    """What families call it among those that they have: traced functions are all of one kind."""
    return TRACED.removesuffix("(") if name.startswith(TRACED) else name


def short_name(name: str) -> str:
    """For names of files and kernels: of traced functions a digest."""
    return f"traced_{hashlib.sha256(name.encode()).hexdigest()[:12]}" if name.startswith(TRACED) else name


@cache  # each problem that has some asks for them
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders)))
