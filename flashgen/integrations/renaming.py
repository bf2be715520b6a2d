"""Errors of flashgen's calls by the names that other interfaces have for its arguments."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.errors import ArgumentError


def by_other_names(error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """The error with the other name of the argument that it is about; `names`: flashgen's to theirs."""
    first, _, rest = str(error).partition(" ")
    return ArgumentError(f"{names[first]} {rest}") if first in names else error
