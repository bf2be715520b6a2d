"""One GPU model: `Device`, and the table of named devices for use where the GPU is not in this machine."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import choice_error
from .target import Target, find_target


@dataclass(frozen=True)
class Device:
    """One GPU model.

    name:              as the driver reports it, for example 'NVIDIA H200'
    sm_count:          streaming multiprocessors
    clock_hz:          SM clock under load, in Hz (the boost clock where nothing better is known)
    l2_bytes:          size of the L2 cache
    memory_bandwidth:  bytes a second, by the vendor's data sheet
    mma_rate:          share of the target's mma rate that this model runs fp32 accumulation at (0.5 on GeForce)
    """

    name: str
    target: Target
    sm_count: int
    clock_hz: float
    l2_bytes: int
    memory_bandwidth: float
    mma_rate: float = 1.0


def _device(name: str, arch: str, sm_count: int, clock_mhz: int, l2_mib: int, gb_per_s: int, mma_rate: float = 1.0) -> Device:
    return Device(name, find_target(arch), sm_count, clock_mhz * 1e6, l2_mib * 2**20, gb_per_s * 1e9, mma_rate)


def named_devices() -> dict[str, Device]:
    """The devices that `--device` knows. Figures: the vendor's architecture white papers and data sheets."""
    return {
        "a100": _device("NVIDIA A100-SXM4-80GB", "sm_80", 108, 1410, 40, 2039),
        "a10": _device("NVIDIA A10", "sm_86", 72, 1695, 6, 600),
        "rtx3090": _device("NVIDIA GeForce RTX 3090", "sm_86", 82, 1695, 6, 936, 0.5),
        "l4": _device("NVIDIA L4", "sm_89", 58, 2040, 48, 300),
        "l40s": _device("NVIDIA L40S", "sm_89", 142, 2520, 96, 864),
        "rtx4090": _device("NVIDIA GeForce RTX 4090", "sm_89", 128, 2520, 72, 1008, 0.5),
        "h100": _device("NVIDIA H100 80GB HBM3", "sm_90a", 132, 1755, 50, 3350),
        "h200": _device("NVIDIA H200", "sm_90a", 132, 1755, 60, 4800),
        "b200": _device("NVIDIA B200", "sm_100a", 148, 1965, 126, 8000),
        "rtx5090": _device("NVIDIA GeForce RTX 5090", "sm_120a", 170, 2407, 96, 1792, 0.5),
    }


def find_device(text: str) -> Device:
    """The named device, for example 'h200'. Raises ArgumentError that lists the known ones."""
    devices = named_devices()
    if text.lower() not in devices:
        raise choice_error("device", text, devices)
    return devices[text.lower()]


def device_of_target(target: Target) -> Device:
    """A device that stands for a target when none is named: the first of that target in the table, else a middling one."""
    known = (d for d in named_devices().values() if d.target == target)
    return next(known, Device(f"generic {target.name}", target, 64, 1.5e9, 32 * 2**20, 1e12))
