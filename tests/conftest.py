"""Options, markers and fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from flashgen.build.driver import DriverError, driver, gpu_count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, GPU tests where there is no GPU")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden after a family's revision was raised")


@cache
def missing_gpu() -> str | None:
    """Why GPU tests cannot run here, or None if they can."""
    try:
        driver()
        found = None if gpu_count() else "driver finds no GPU"
    except DriverError as error:
        found = str(error)
    return found and f"needs an NVIDIA GPU and driver 580 or newer: {found}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    if item.get_closest_marker("gpu") and (reason := missing_gpu()):
        if item.config.getoption("--require-gpu"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Points the cache to a folder of this run, for subprocesses too: no test touches the user's."""
    folder = tmp_path_factory.mktemp("flashgen-cache")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        yield
