"""What is found by itself: a package of files, each of which defines one object by a fixed name. A new file needs no list to stand in."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TypeVar

from .errors import ArgumentError, shown

T = TypeVar("T")


def discovered(package: ModuleType, attribute: str, kind: type[T]) -> dict[str, T]:
    """The object of that name in each module of a package, by the module's name. Raises ArgumentError as `defined` does."""
    return {module.name: defined(package, module.name, attribute, kind) for module in pkgutil.iter_modules(package.__path__)}


def defined(package: ModuleType, module: str, attribute: str, kind: type[T]) -> T:
    """The object of that name in one module of a package. Raises ArgumentError if it is not there, or of another kind."""
    name = f"{package.__name__}.{module}"
    try:
        found = getattr(importlib.import_module(name), attribute, None)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ArgumentError(f"{name} must be there and define {attribute}, of type {kind.__name__}; there is no such module") from error
    if not isinstance(found, kind):
        raise ArgumentError(f"{name} must define {attribute}, of type {kind.__name__}; got {shown(found)}")
    return found
