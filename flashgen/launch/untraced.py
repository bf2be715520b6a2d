"""What torch.compile must not look into: `untraced`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """The function, marked: torch.compile looks neither into it nor into what it calls when it has left a call to Python.

    PyTorch marks so by private names, which may go: they cost a call nothing, and load no compiler as `torch.compiler.disable` does.
    """
    with suppress(AttributeError, TypeError):
        marks = torch._C._dynamo.eval_frame
        skip = marks._FrameAction.SKIP
        marks.set_code_exec_strategy(function.__code__, marks._FrameExecStrategy(skip, skip))
    return function
