"""Keywords of `flashgen.attention` and of others' functions that a function of flashgen knows, but does not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.codegen.errors import ArgumentError


def refuse_keywords(function: str, refused: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raises ArgumentError for what is `refused`, with the reason, and TypeError for other keywords. None counts as not given.

    torch.compile traces this.
    """
    for name, value in given.items():
        if name not in refused:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ArgumentError(f"{name} must be left out of flashgen.{function}: {refused[name]}")
