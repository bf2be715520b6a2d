"""Options, markers and fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

from flashgen.build import nvrtc
from flashgen.build.emulator import compiler
from flashgen.build.gpu.driver import DriverError, driver, gpu_count
from tests.support.compiles import VARIABLE, once, precompiled, runtime_once, source_once
from tests.support.plan import Costly, budgets, every_case, within

# What was garbage at a fork stays so: a child that collected it could wait for a lock that a thread of its parent held, for ever.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, GPU tests where there is no GPU")
    parser.addoption("--require-browser", action="store_true", help="also run the tests of pages, and fail them where there is no Chromium")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    rest = "run tests marked slow, and no others: of each family as many as take so long on 2 cores"
    parser.addoption("--slow-rest", metavar="SECONDS[,FAMILY=SECONDS]...", help=rest)
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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs on all cores where pytest-xdist is installed, but not on a GPU, where tests would spoil each other's times."""
    option = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")  # of xdist: a worker
    if whole and getattr(option, "numprocesses", 0) is None and not (option.usepdb or option.collectonly) and missing_gpu():
        option.numprocesses = min(os.cpu_count() or 1, 8)
        # Tests of a file, which share what they have compiled, stay together, but for those of the last files.
        option.dist = "worksteal"
        # Each launch in the emulator forks: large pages, for the objects of Python too, halve its cost.
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        os.environ.setdefault("PYTHONMALLOC", "malloc")
    if getattr(option, "numprocesses", 0) and missing_gpu():
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of PyTorch in each process: more would spin for cores that others have


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: the garbage collector need not look at them, neither as they come nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked slow or browser, unless they are asked for, and those of a GPU where there is none.

    With --slow-rest leaves out what every run has, and what does not fit the budget of its family.
    """
    if (option := config.getoption("--slow-rest")) is not None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        within_budget = within(map(costly, slow), budgets(option))
        taken = [item for item in slow if item.nodeid in within_budget]
    elif config.getoption("--slow"):
        taken = items
    else:
        taken = [item for item in items if not item.get_closest_marker("slow")]
    if missing_gpu() and not config.getoption("--require-gpu"):
        taken = [item for item in taken if not item.get_closest_marker("gpu")]
    if not config.getoption("--require-browser"):
        taken = [item for item in taken if not item.get_closest_marker("browser")]
    kept = set(taken)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = taken


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What is left out, and why."""
    left_out = [] if every_case(config) else ["tests marked slow are left out: --slow runs them"]
    if (reason := missing_gpu()) and not config.getoption("--require-gpu"):
        left_out.append(f"tests marked gpu are left out: {reason}")
    if not config.getoption("--require-browser"):
        left_out.append("tests marked browser are left out: --require-browser runs them")
    return left_out


def costly(item: pytest.Item) -> Costly:
    marker = item.get_closest_marker("of_family")
    return Costly(item.nodeid, *(marker.args if marker else (None, 0.0, False)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := missing_gpu()):
        pytest.fail(reason, pytrace=False)  # with --require-gpu: else it was left out


@pytest.fixture(scope="session", autouse=True)
def compiles(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """Texts are compiled once for all processes of a run, or for runs that $FLASHGEN_TEST_COMPILES gives one folder."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if hasattr(request.config, "workerinput") else base  # of xdist's workers, which have a folder each in one
    folder = Path(os.environ.get(VARIABLE) or root / "compiles")
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "runtime_object", runtime_once(folder, compiler.runtime_object))
        patch.setattr(compiler, "compile_for_emulator", once(folder, precompiled(folder, compiler.compile_for_emulator)))
        patch.setattr(nvrtc, "compile_source", source_once(folder, nvrtc.compile_source))
        patch.setenv(VARIABLE, str(folder))  # for processes that tests start
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Points the cache to a folder of this run, for subprocesses too: no test touches the user's."""
    folder = tmp_path_factory.mktemp("flashgen-cache")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        yield
