"""One GPU model: `Device`, and how to come by one that is not in this machine: by its name, or for a target. Figures: table.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from ..errors import ArgumentError, choice_error, require_int, shown
from ..target import Target, find_target
from ..typed import require_field_types
from .table import DEVICES, KnownDevice

DRAM_EFFICIENCY = 0.85  # of the data sheet's bandwidth that a kernel can reach


@dataclass(frozen=True)
class Device:
    """One GPU model.

    name:              as the driver reports it, for example 'NVIDIA H200'
    sm_count:          streaming multiprocessors
    clock_hz:          SM clock under load, in Hz (the boost clock where nothing better is known)
    l2_bytes:          size of the L2 cache
    memory_bandwidth:  bytes a second
    memory_gb:         size of the memory in GB, as data sheets count them; 0 where nobody has said it
    mma_rate:          share of the target's mma rate that this model runs fp32 accumulation at (0.5 on GeForce)
    measured:          whether measurements on this model stand behind `Family.predict`; elsewhere it extrapolates
    """

    name: str
    target: Target
    sm_count: int
    clock_hz: float
    l2_bytes: int
    memory_bandwidth: float
    mma_rate: float = 1.0
    measured: bool = False
    memory_gb: int = 0

    def __post_init__(self) -> None:
        require_field_types(self)
        require_int("sm_count", self.sm_count, 1)
        require_int("l2_bytes", self.l2_bytes, 0)
        require_int("memory_gb", self.memory_gb, 0)
        for name in ("clock_hz", "memory_bandwidth", "mma_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ArgumentError(f"{name} must be finite and > 0; got {shown(getattr(self, name))}")


def named_devices() -> dict[str, Device]:
    """The devices that `--device` knows, by the name that it lists them under."""
    return {known.key: _device(known, known.names[0]) for known in DEVICES}


def find_device(text: str) -> Device:
    """The named device: 'h200', 'H100-SXM', 'RTX 4090', or as the driver reports it. Raises ArgumentError that lists the known ones."""
    for known in DEVICES if isinstance(text, str) else ():
        if _plain(text) in map(_plain, (known.key, *known.aliases, *known.names)):
            return _device(known, known.names[0])
    raise choice_error("device", text, [known.key for known in DEVICES])


def device_by_name(name: str) -> Device | None:
    """The known device that the driver reports under exactly that name, or None."""
    return next((_device(known, name) for known in DEVICES if name in known.names), None)


@cache
def devices_like(device: Device) -> tuple[Device, ...]:
    """Known devices whose configs are the first to take where this one has no records: other models of as many SMs of the same kind.

    Attention is mostly bound by what an SM computes, and such models differ in their memory.
    """

    def of_its_kind(other: Device) -> bool:
        same = (other.target, other.sm_count, other.mma_rate) == (device.target, device.sm_count, device.mma_rate)
        return same and other.name != device.name

    return tuple(other for known in DEVICES for name in known.names if of_its_kind(other := _device(known, name)))


def device_of_target(target: Target) -> Device:
    """A device that stands for a target when none is named: a measured one, else the first in the table, else a middling one."""
    known = [d for d in named_devices().values() if d.target == target]
    middling = Device(f"generic {target.name}", target, 64, 1.5e9, 32 * 2**20, 1e12)
    return min(known, key=lambda d: not d.measured, default=middling)


def mma_rate_by_name(name: str) -> float:
    """The `mma_rate` of a GPU that only its name is known of: every GeForce from Ampere on accumulates in fp32 at half rate."""
    return 0.5 if "GeForce" in name else 1.0


def _device(known: KnownDevice, name: str) -> Device:
    clock_hz, l2_bytes, bandwidth = known.clock_mhz * 1e6, known.l2_mib * 2**20, known.gb_per_s * 1e9
    sizes = known.sm_count, clock_hz, l2_bytes, bandwidth
    return Device(name, find_target(known.arch), *sizes, known.mma_rate, known.measured, known.gb)


def _plain(text: str) -> str:
    """What of a name tells GPUs apart: 'NVIDIA GeForce RTX 4090' and 'rtx4090' are the same."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", text.lower())
