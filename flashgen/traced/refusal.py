"""Where in a user's code something happens that a traced function must not do, and the error that says so."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import NoReturn

import torch

from flashgen.codegen.errors import ArgumentError

_OWN, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)


class Restart(BaseException):
    """A trace must begin anew: a captured value has turned out to be needed as it is. Not an Exception, which users' code may catch."""


def refuse(argument: str, must: str, got: str) -> NoReturn:
    """Raises ArgumentError: "<argument> must ...; got ...", with function, file and line of the user's code that is running."""
    raise ArgumentError(f"{argument} must {must}; got {got}{_running_line()}")


def _running_line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_OWN, _TORCH)):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            quoted = f": `{line}`" if line else ""
            return f" in {code.co_qualname} ({code.co_filename}, line {frame.f_lineno}){quoted}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
