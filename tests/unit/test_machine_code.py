"""Loading machine code, with a driver that only counts: once a process, and for good."""

from __future__ import annotations

import dataclasses
import enum
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.ahead import load, unload
from flashgen.build.artifact import Artifact
from flashgen.build.gpu import kernel as kernel_module
from flashgen.build.gpu.driver import DriverError, Gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.spec import KernelSpec
from flashgen.selection import loaded
from flashgen.selection.bundle import Generated
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, WORKLOAD

GPU = Gpu(0, DEVICE, "uuid", "13.0")
SPEC = KernelSpec(FAMILY, PROBLEM, CONFIGS[0], DEVICE.target)
ARTIFACT = Artifact(SPEC.name, "sm_90a", "text", b"machine code", "log", "13.0")


class Driver:
    """Stands for cuda.bindings.driver: hands out numbers for libraries, and says which are loaded."""

    class CUresult(enum.Enum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_NO_BINARY_FOR_GPU = 209

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.loads = 0

    def cuLibraryLoadData(self, cubin: bytes, *rest: Any) -> tuple[Any, ...]:
        if cubin == b"broken":
            return (self.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None)
        self.loads += 1
        self.loaded[self.loads] = cubin
        return self.CUresult.CUDA_SUCCESS, self.loads

    def cuLibraryUnload(self, library: int) -> tuple[Any, ...]:
        del self.loaded[library]
        return (self.CUresult.CUDA_SUCCESS,)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, 100 + library

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, ordinal

    def cuKernelSetAttribute(self, *arguments: Any) -> tuple[Any, ...]:
        return (self.CUresult.CUDA_SUCCESS,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, 200 + device

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        return (self.CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, 0

    def cuKernelGetFunction(self, kernel: int) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, 300 + kernel


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    for module in ("kernel", "driver"):
        monkeypatch.setattr(f"flashgen.build.gpu.{module}.driver", lambda: found)
    for kept in ("_libraries", "_contexts"):
        monkeypatch.setattr(kernel_module, kept, {})
    return found


def test_machine_code_stays_loaded_once_nobody_holds_the_kernel(driver: Driver) -> None:
    """A CUDA graph that captured it may be replayed: the graph does not hold it either."""
    kernel = Kernel(SPEC, ARTIFACT, GPU)
    handle = kernel.handles
    del kernel
    gc.collect()
    assert list(driver.loaded.values()) == [ARTIFACT.cubin]
    assert Kernel(SPEC, ARTIFACT, GPU).handles == handle


def test_an_import_that_is_dropped_stays_loaded_and_coming_back_costs_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.ahead._gpu", lambda device: GPU)
    monkeypatch.setattr("flashgen.selection.bundle.read_bundle", lambda folder, target: [Generated(SPEC, ARTIFACT)])
    for _ in range(3):
        assert [kernel.spec for kernel in load("folder")] == [SPEC]
        unload()
        gc.collect()
    assert loaded.imports.find(PROBLEM, WORKLOAD, GPU) is None
    assert driver.loads == len(driver.loaded) == 1


def test_other_machine_code_is_loaded_beside_it(driver: Driver) -> None:
    other = dataclasses.replace(ARTIFACT, cubin=b"other machine code")
    assert Kernel(SPEC, ARTIFACT, GPU).handles != Kernel(SPEC, other, GPU).handles
    assert len(driver.loaded) == 2


def test_a_refusal_is_not_remembered(driver: Driver) -> None:
    broken = dataclasses.replace(ARTIFACT, cubin=b"broken")
    for _ in range(2):
        with pytest.raises(DriverError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
            Kernel(SPEC, broken, GPU)
    assert driver.loads == 0
