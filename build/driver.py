"""The CUDA driver: which GPUs are here and what they are. Errors come with the cure; nothing here creates a context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flashgen.codegen.device import Device, device_by_name, device_of_target, mma_rate_by_name
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.target import Target, target_for_capability

CUDA_MAJOR = 13
MINIMUM_DRIVER = "580"


class DriverError(FlashgenError):
    """The driver is missing, too old, or refused a call."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine: its ordinal in this process, its model, its UUID and the driver's version."""

    ordinal: int
    device: Device
    uuid: str
    driver_version: str


@cache
def driver() -> Any:
    """The binding of the initialised driver. Raises DriverError if there is none, no GPU, or one too old for our machine code."""
    try:
        from cuda.bindings import driver as binding

        (status,) = binding.cuInit(0)
    except Exception as error:  # no libcuda: the binding raises RuntimeError or its own types, by version
        raise DriverError(
            f"driver must be {MINIMUM_DRIVER} or newer, with an NVIDIA GPU, to launch kernels; got none: {str(error).splitlines()[0]}"
        ) from error
    if status != binding.CUresult.CUDA_SUCCESS:
        raise DriverError(f"driver finds no usable GPU: {status.name}")
    status, version = binding.cuDriverGetVersion()
    require_supported(version)
    return binding


def require_supported(version: int) -> None:
    """Raises DriverError if a driver that reports `version` (13000 for CUDA 13.0) cannot load our machine code."""
    if version < CUDA_MAJOR * 1000:
        raise DriverError(
            f"driver must be {MINIMUM_DRIVER} or newer (CUDA {CUDA_MAJOR}); got one for CUDA {version // 1000}.{version % 1000 // 10}: "
            "update the NVIDIA driver"
        )


def check(result: Any, what: str) -> Any:
    """Unpacks what a driver call returned: its value, values or None. Raises DriverError that says `what` failed."""
    status, *values = result
    if status != driver().CUresult.CUDA_SUCCESS:
        raise DriverError(f"{what} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


@cache
def driver_version() -> str:
    """'580.159.04' where the kernel module tells, else the CUDA version that the driver supports ('CUDA 13.0')."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        version = int(check(driver().cuDriverGetVersion(), "reading the driver's version"))
        return f"CUDA {version // 1000}.{version % 1000 // 10}"


def gpu_count() -> int:
    """How many GPUs this process sees; 0 without a driver."""
    try:
        return int(check(driver().cuDeviceGetCount(), "counting GPUs"))
    except DriverError:
        return 0


@cache
def gpu(ordinal: int) -> Gpu:
    """The GPU with that ordinal. Raises DriverError without a driver, ArgumentError for an ordinal that is not there."""
    cu = driver()
    count = gpu_count()
    if not 0 <= ordinal < count:
        raise ArgumentError(f"device must be from 0 to {count - 1}; got {ordinal}")
    handle = check(cu.cuDeviceGet(ordinal), "finding the GPU")

    def attribute(name: str) -> int:
        return int(check(cu.cuDeviceGetAttribute(getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle), f"reading {name}"))

    name = check(cu.cuDeviceGetName(128, handle), "reading the name").split(b"\0")[0].decode()
    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    target = target_for_capability(capability) or _generic_target(capability, attribute)
    device = read_device(name, target, attribute)
    uuid = bytes(check(cu.cuDeviceGetUuid(handle), "reading the UUID").bytes).hex()
    return Gpu(ordinal, device, uuid, driver_version())


def read_device(name: str, target: Target, attribute: Callable[[str], int]) -> Device:
    """The model of a GPU, by its name and what the driver says of it: `attribute` reads CU_DEVICE_ATTRIBUTE_<its argument>.

    The clock under load, the bandwidth of the data sheet and the rate of the tensor cores come from the table of known devices: the
    driver tells none of them. Some models have boards of different size under one name: those are not the one in the table.
    """
    sm_count, l2_bytes = attribute("MULTIPROCESSOR_COUNT"), attribute("L2_CACHE_SIZE")
    known = device_by_name(name)
    if known and known.sm_count == sm_count:
        return replace(known, target=target, l2_bytes=l2_bytes)
    bandwidth = 2e3 * attribute("MEMORY_CLOCK_RATE") * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return Device(
        name=name,
        target=target,
        sm_count=sm_count,
        clock_hz=attribute("CLOCK_RATE") * 1e3,
        l2_bytes=l2_bytes,
        memory_bandwidth=bandwidth or device_of_target(target).memory_bandwidth,  # 0 where the memory is the host's
        mma_rate=known.mma_rate if known else mma_rate_by_name(name),
    )


def _generic_target(capability: tuple[int, int], attribute: Any) -> Target:
    import warnings

    name = f"sm_{capability[0]}{capability[1]}"
    warnings.warn(f"{name} has no target file: using what the driver says of it", stacklevel=4)
    return Target(
        name=name,
        capability=capability,
        shared_memory_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_memory_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        threads_per_sm=attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        blocks_per_sm=attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        mma_flops_per_cycle=1024,
        shared_memory_reserved=attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"),
    )
