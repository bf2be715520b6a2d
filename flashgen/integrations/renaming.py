"""Errors of flashgen's calls by the names that other interfaces have for its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flashgen.codegen.errors import ArgumentError


def by_other_names(error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """The error with the other names of arguments; `names`: flashgen's to theirs.

    A word such as bias stands for an argument where a message begins; one letter, or a name with an underscore, everywhere. What was given
    stays as it is.
    """
    allowed, got, given = str(error).partition("; got ")
    anywhere = "|".join(name for name in names if len(name) == 1 or "_" in name)
    renamed = re.sub(rf"^(?:{'|'.join(names)})\b|\b(?:{anywhere})\b", lambda found: names[found[0]], allowed)
    return error if renamed == allowed else ArgumentError(renamed + got + given)
