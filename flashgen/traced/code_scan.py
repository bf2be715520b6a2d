"""What a function's code reads and does, as far as it decides how the function can be traced. Nothing is run."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

TRUSTED = (
    *("torch", "math", "operator", "functools", "itertools", "builtins", "typing", "enum", "collections", "dataclasses", "__future__"),
    *("_operator", "_functools"),
)
"""Packages whose functions and constants do not change."""
# They say of a stand-in what they would not say of the value, or see more than a trace takes down.
_SEES_THROUGH = {
    *("type", "id", "vars", "dir", "locals", "globals", "eval", "exec", "hasattr", "getattr", "setattr", "delattr", "callable"),
    *("super", "open", "input", "breakpoint", "__import__", "next", "iter", "print"),
}
_SINGLETONS = (None, True, False, ...)


@dataclass(frozen=True)
class ScannedCode:
    """global_names: that it reads, in inner functions too.

    assigned: captured or global variables that it assigns to.
    opaque:   whether stand-ins of what it captures might change what it does: it tests identities, catches errors, or looks into objects
    """

    global_names: tuple[str, ...]
    assigned: tuple[str, ...]
    opaque: bool


def is_trusted(module: str | None) -> bool:
    """Whether a module's name is one of TRUSTED, or below it."""
    return module is not None and module.partition(".")[0] in TRUSTED


def is_library_function(value: object) -> bool:
    """Whether a value is a function, a class or a module of a TRUSTED package that captures nothing."""
    if isinstance(value, ModuleType):
        return is_trusted(value.__name__)
    if isinstance(value, FunctionType):
        return value.__closure__ is None and is_trusted(value.__module__)
    if isinstance(value, BuiltinFunctionType):  # a function of a module, or a static one of a class
        owner = value.__self__
        return is_trusted(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__ if isinstance(owner, type) else None)
    return isinstance(value, type) and is_trusted(value.__module__)


@lru_cache(maxsize=2**10)
def scanned(code: CodeType) -> ScannedCode:
    """What a function of this code reads and does."""
    names: dict[str, None] = {}
    assigned: dict[str, None] = {}
    opaque = False
    for own in _with_inner(code):
        before = None
        for step in dis.get_instructions(own):
            match step.opname:
                case "LOAD_GLOBAL" | "LOAD_NAME":
                    names[step.argval] = None
                case "STORE_GLOBAL" | "DELETE_GLOBAL":
                    assigned[step.argval] = None
                case "STORE_DEREF" | "DELETE_DEREF" if own is code and step.argval in code.co_freevars:
                    assigned[step.argval] = None
                case "IMPORT_NAME":
                    opaque |= not is_trusted(step.argval)
                case "LOAD_ATTR" | "LOAD_METHOD":
                    opaque |= step.argval.startswith("__")
                case "IS_OP":
                    opaque |= before is None or before.opname != "LOAD_CONST" or before.argval not in _SINGLETONS
                case "PUSH_EXC_INFO" | "LOAD_BUILD_CLASS":
                    opaque = True
            before = step
    return ScannedCode(tuple(names), tuple(assigned), opaque or not _SEES_THROUGH.isdisjoint(names))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_inner(each)
