"""Tests here run kernels on the CPU: they need a C++ compiler, and say so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.build.host_compiler import HostCompilerMissingError, host_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        host_compiler()
    except HostCompilerMissingError as error:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))
