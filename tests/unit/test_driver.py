"""The driver: versions that are too old, and machines that have none."""

from __future__ import annotations

import pytest

from flashgen.build import driver
from flashgen.build.driver import DriverError, require_supported


@pytest.mark.parametrize("version", [13000, 13010, 14000])
def test_a_driver_of_our_major_version_or_newer_is_fine(version: int) -> None:
    require_supported(version)


@pytest.mark.parametrize(("version", "name"), [(12080, "12.8"), (11040, "11.4")])
def test_an_older_driver_is_refused_with_the_cure(version: int, name: str) -> None:
    with pytest.raises(DriverError, match=rf"^driver must be 580 or newer \(CUDA 13\); got one for CUDA {name}: update the NVIDIA driver"):
        require_supported(version)


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
