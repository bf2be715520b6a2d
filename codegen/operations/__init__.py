"""One file for each operation: what is computed, whatever family of kernels does it. A new file is found by itself."""

from __future__ import annotations

import pkgutil


def operation_names() -> tuple[str, ...]:
    """The operations that have a file here, sorted. Nothing is imported for that."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
