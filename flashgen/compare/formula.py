"""What sizes alone say of a cell: bytes by an algorithm's loops and by the papers' bounds, and the roofline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.codegen.devices import Device
from flashgen.codegen.family import Traffic
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from .shapes import calls_of


@dataclass(frozen=True)
class Roofline:
    """The two limits of a device: FLOP a second of its tensor cores with fp32 accumulation, and bytes a second of its memory."""

    flops: float
    bandwidth: float

    @classmethod
    def of(cls, device: Device) -> Roofline:
        """By the rate of the fastest products that the architecture has."""
        target = device.target
        rate = max(target.mma_flops_per_cycle * device.mma_rate, target.wgmma_flops_per_cycle)
        return cls(rate * device.sm_count * device.clock_hz, device.memory_bandwidth)

    def attainable(self, intensity: float) -> float:
        """FLOP a second at an arithmetic intensity in FLOP a byte."""
        return min(self.flops, intensity * self.bandwidth)

    def bound(self, intensity: float) -> str:
        """Which of the two limits such an algorithm meets first."""
        return "memory" if intensity * self.bandwidth < self.flops else "compute"


@dataclass(frozen=True)
class ByteBounds:
    """Bytes of a cell that no kernel decides.

    compulsory: each operand of a call once; quadratic: Theta(Nd + N^2) with a constant of 1, standard attention's order; tiled:
    Theta(N^2 d^2 / M) with a constant of 1, that of an algorithm that keeps S on the SM, M being the elements of an SM's shared memory
    (Dao et al. 2022, theorem 2). N^2 stands for len_q * len_kv, and d for the mean of head_dim and head_dim_v. The backward pass has the
    same orders (theorem 5), so that the last two hold with it, too.
    """

    compulsory: int
    quadratic: float
    tiled: float

    @classmethod
    def of(cls, cell: Cell, device: Device) -> ByteBounds:
        """For the shared memory of this device's SMs."""
        p, w = cell.problem, cell.workload
        heads, d, element = w.batch * w.heads_q, (p.head_dim + p.head_dim_v) / 2, p.dtype.bytes
        shared_elements = device.target.shared_memory_per_sm / element
        pairs = w.len_q * w.len_kv
        return cls(
            sum(call.io_bytes for call in calls_of(cell)),
            heads * (w.len_q * d + pairs) * element,
            heads * pairs * d * d / shared_elements * element,
        )


def traffic_of(kernels: Iterable[tuple[KernelSpec, Cell]], device: Device) -> Traffic | None:
    """What the loops of the kernels' algorithms move in these calls together, None where a family does not say."""
    total = Traffic(0, 0)
    for spec, call in kernels:
        own = spec.family.traffic(call.problem, spec.config, call.workload, device)
        if own is None:
            return None
        total = Traffic(total.read + own.read, total.written + own.written, total.reduced + own.reduced)
    return total
