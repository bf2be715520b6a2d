"""Registers the operators as soon as both flashgen and PyTorch are imported, in either order; flashgen alone imports no PyTorch.

A program that PyTorch exported names its operators, and whoever loads it may have called nothing of flashgen before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_operators() -> None:
    """Registers the operators now if PyTorch is imported already, else when it has been."""
    if "torch" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _register() -> None:
    try:
        for module in ("autograd", "packed_gradients", "transforms", "append", "cached"):  # first what tells best what a PyTorch lacks
            importlib.import_module(f".{module}", __package__)
    except ImportError as error:
        if not (error.name or "").startswith("flashgen."):
            _complain(error)
        # Else a part of the operators is what imports PyTorch: they follow with the first public function.
    except Exception as error:
        _complain(error)


def _complain(error: Exception) -> None:
    """PyTorch is of use without flashgen, and who uses flashgen meets the error again: so it is told, and no more."""
    import logging

    logging.getLogger("flashgen").warning("torch.ops.flashgen is not there: %s: %s", type(error).__name__, error)


class _AfterTorch:
    """A finder that finds nothing by itself: it has those after it find PyTorch, and the operators registered once that is imported."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            del loader.exec_module  # from the instance, whose class has the one that is called here
            try:
                execute(module)
            except BaseException:
                sys.meta_path.insert(0, self)  # another try may do
                raise
            _register()

        loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
