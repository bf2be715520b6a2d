"""The driver: versions that are too old, and machines that have none."""

from __future__ import annotations

import enum
from collections.abc import Callable

import pytest

from flashgen.build.gpu import driver
from flashgen.build.gpu.driver import DriverError, DriverState, driver_state, require_supported


@pytest.mark.parametrize("version", [13000, 13010, 14000])
def test_a_driver_of_our_major_version_or_newer_is_fine(version: int) -> None:
    require_supported(version)


@pytest.mark.parametrize(("version", "name"), [(12080, "12.8"), (11040, "11.4")])
def test_an_older_driver_is_refused_with_the_cure(version: int, name: str) -> None:
    with pytest.raises(DriverError, match=rf"^driver must be 580 or newer \(CUDA 13\); got one for CUDA {name}: update the NVIDIA driver"):
        require_supported(version)


class Binding:
    """Stands for cuda.bindings.driver."""

    class CUresult(enum.Enum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_NO_DEVICE = 100

    def __init__(self, version: int, status: str = "CUDA_SUCCESS") -> None:
        self.version, self.status = version, self.CUresult[status]

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (self.status,)

    def cuDriverGetVersion(self) -> tuple[CUresult, int]:
        return self.CUresult.CUDA_SUCCESS, self.version


def missing() -> Binding:
    raise RuntimeError("libcuda.so.1 is not here\nand more")


@pytest.mark.parametrize(
    ("binding", "expected", "message"),
    [
        (lambda: Binding(13000), DriverState("580.1", 13000, None), None),
        (missing, DriverState("580.1", None, "libcuda.so.1 is not here"), "got none: libcuda.so.1 is not here$"),
        (
            lambda: Binding(13000, "CUDA_ERROR_NO_DEVICE"),
            DriverState("580.1", 13000, "CUDA_ERROR_NO_DEVICE"),
            "no usable GPU: CUDA_ERROR_NO",
        ),
        (lambda: Binding(12080), DriverState("580.1", 12080, None), "got one for CUDA 12.8: update"),
    ],
)
def test_the_state_of_a_driver(
    monkeypatch: pytest.MonkeyPatch, binding: Callable[[], Binding], expected: DriverState, message: str | None
) -> None:
    monkeypatch.setattr(driver, "_binding", binding)
    monkeypatch.setattr(driver, "_kernel_module", lambda: "580.1")
    assert driver_state() == expected
    load = driver.driver.__wrapped__
    if message is None:
        assert load().version == 13000
    else:
        with pytest.raises(DriverError, match=message):
            load()


def test_a_failed_call_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Status:
        CUDA_SUCCESS = 0

    class Binding:
        CUresult = Status

    class Failure:
        name = "CUDA_ERROR_INVALID_IMAGE"

    monkeypatch.setattr(driver, "driver", lambda: Binding)
    assert driver.check((0,), "nothing") is None
    assert driver.check((0, 7), "reading") == 7
    assert driver.check((0, 7, 8), "reading") == (7, 8)
    with pytest.raises(DriverError, match=r"^loading k failed: CUDA_ERROR_INVALID_IMAGE"):
        driver.check((Failure, None), "loading k")
