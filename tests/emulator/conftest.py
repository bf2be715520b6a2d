"""Tests here run kernels on the CPU: they need a C++ compiler, and say so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.build.emulator.compiler import CxxCompilerMissingError, cxx_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        cxx_compiler()
    except CxxCompilerMissingError as error:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))
