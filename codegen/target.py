"""What one GPU architecture is: `Target`, the discovery of target files, and the reading of architecture names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from .discovery import discovered
from .errors import ArgumentError, choice_error, require_int, shown
from .typed import require_field_types


@dataclass(frozen=True)
class Target:
    """One GPU architecture. Sizes in bytes; figures from the CUDA programming guide, "Compute Capabilities".

    name:                     with suffix, as NVRTC's --gpu-architecture takes it: 'sm_90a'
    capability:               compute capability, (9, 0)
    shared_memory_per_block:  the most one block may ask for (opt-in)
    shared_memory_per_sm:     what the blocks resident on one SM share; each also costs `shared_memory_reserved`
    registers_per_sm:         32-bit registers
    threads_per_sm, blocks_per_sm: most resident at once
    mma_flops_per_cycle:      dense fp16/bf16 FLOP a cycle and SM through mma.sync with fp32 accumulation (for the model)
    wgmma_flops_per_cycle:    the same through wgmma; 0 where there is none
    exp2_per_cycle:           ex2.approx results a cycle and SM (for the model)
    """

    name: str
    capability: tuple[int, int]
    shared_memory_per_block: int
    shared_memory_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    mma_flops_per_cycle: int
    exp2_per_cycle: int = 16
    wgmma_flops_per_cycle: int = 0
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    shared_memory_reserved: int = 1024

    def __post_init__(self) -> None:
        require_field_types(self)
        if len(self.capability) != 2:
            raise ArgumentError(f"capability must be two integers, such as (9, 0); got {shown(self.capability)}")
        for name, value in vars(self).items():
            if type(value) is int:
                require_int(name, value, 0, 2**31 - 1)
        if not re.fullmatch(r"sm_[1-9][0-9]{1,2}[af]?", self.name):
            raise ArgumentError(f"name must look like sm_80 or sm_90a; got {shown(self.name)}")
        if self.name.rstrip("af") != "sm_{}{}".format(*self.capability):
            raise ArgumentError(f"name must be that of the compute capability {shown(self.capability)}; got {shown(self.name)}")

    def blocks_resident(self, threads: int, registers: int, shared_bytes: int) -> int:
        """How many blocks of that size fit on one SM at once (0: not even one)."""
        # Registers are given out to warps in units of 256 (8 a thread).
        per_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = self.registers_per_sm // (per_warp * (threads // 32))
        by_shared = self.shared_memory_per_sm // (shared_bytes + self.shared_memory_reserved)
        return min(self.blocks_per_sm, self.threads_per_sm // threads, by_registers, by_shared)


@cache
def targets() -> dict[str, Target]:
    """Every target that has a file in `codegen/targets`, by name, oldest first."""
    from . import targets as package

    found: dict[tuple[int, int], Target] = {}
    for target in discovered(package, "TARGET", Target).values():
        if (other := found.setdefault(target.capability, target)) is not target:
            raise ArgumentError(f"targets must have a compute capability each; got {other.name} and {target.name}")
    return {found[capability].name: found[capability] for capability in sorted(found)}


def find_target(text: str) -> Target:
    """The target for 'sm_90a', 'sm_90', '90a', '90' or '9.0'. Raises ArgumentError that lists the known ones."""
    match = re.fullmatch(r"(?:sm_)?([0-9]{1,2})\.?([0-9])([af]?)", text) if isinstance(text, str) else None
    if match:
        capability = (int(match[1]), int(match[2]))
        for target in targets().values():
            if target.capability == capability and (not match[3] or target.name.endswith(match[3])):
                return target
    raise choice_error("arch", text, targets())


def target_for_capability(capability: tuple[int, int]) -> Target | None:
    """The target of a compute capability, or None if it has no file."""
    return next((t for t in targets().values() if t.capability == capability), None)
