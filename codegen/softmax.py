"""What the families of softmax have in common: `SoftmaxFamily`, all but how often and in what order a row is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from .attention import ELEMENTS, reciprocal
from .config import Config
from .devices import DRAM_EFFICIENCY, Device
from .family import Family, Prediction, Traffic
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .problem import Dtype, Mask, Problem
from .program import BlockResources, KernelLaunch, Program
from .target import Target
from .workload import Workload

MAX_ROWS = 2**31 - 1024  # over batch and heads: a kernel counts them in an int
MAX_COLUMNS = 2**31 - 2**16  # a lane's column goes on past the last one by what it loads at once
LAUNCH_SECONDS = 2e-6
_WARPS, _UNROLLS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)


class SoftmaxFamily(Family):
    """Softmax of rows of any length, read `passes` times. Warps of a block share a long row, or take several short ones.

    Configs have the fields `warps`, of a block, and `unroll`, columns that a lane loads before it uses them.
    """

    operation = "softmax"
    automatic = False
    preference = -1
    passes: ClassVar[int]
    parameters = ParameterBlock(
        (
            Parameter("const Element*", "x"),
            Parameter("Element*", "y"),
            *(Parameter("i64", f"{tensor}_{dim}") for tensor in ("x", "y") for dim in ("batch", "head", "row")),
            *(Parameter("u64", f"{name}_reciprocal") for name in ("len_q", "heads_q")),
            *(Parameter("int", name) for name in ("rows", "columns", "len_q", "heads_q", "row_warps")),
        )
    )
    atoms = ("types", "index", "shared_memory", "barrier", "cvt", "cvt_f32", "register", "ex2", "mul", "shfl_sync")
    tiles: ClassVar[tuple[str, ...]] = (
        *("common/shared_regions", "common/tile_scheduler", "common/softmax_rows", "warp/row_slice"),
        *("common/element_16bit", "common/element_fp32", "warp/matrix_row"),
    )

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family. Elements of 16 bits and of 32 are read in different ways."""
        other = "common/element_16bit" if problem.dtype is Dtype.FP32 else "common/element_fp32"
        return self.atoms, tuple(tile for tile in self.tiles if tile != other)

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        if problem.operation != self.operation:
            return [f"pass must be {self.operation}; got {problem.operation}"]
        reasons = []
        for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if width:
                reasons.append(f"{name} must be left out for softmax, which has none; got {width}")
        if problem.mask is not Mask.FULL:
            reasons.append(f"mask must be full for softmax, which has none; got {problem.mask.value}")
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: Any, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        for name, powers in (("warps", _WARPS), ("unroll", _UNROLLS)):
            if (value := getattr(config, name)) not in powers:
                nearest = min(powers, key=lambda power: abs(power - value))
                reasons.append(f"{name} must be a power of two from {powers[0]} to {powers[-1]}; got {value} (nearest: {nearest})")
        return reasons

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family."""
        default = self.config_type()
        for warps in (4, 8, 16, 32):
            for unroll in (2, 4, 8):
                yield dataclasses.replace(default, warps=warps, unroll=unroll)  # type: ignore[call-arg]  # every config has them

    def default(self, problem: Problem, target: Target) -> Config:
        """See Family."""
        config = self.config_type()
        self.require_legal(problem, config, target)
        return config

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family."""
        return {"element": ELEMENTS.get(problem.dtype, "float"), "shared_bytes": self.shared_bytes(config)}

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        """See Family."""
        return {"": BlockResources(config.warps * 32, self.shared_bytes(config))}

    def shared_bytes(self, config: Any) -> int:
        """Of a block: a maximum and a sum of each warp."""
        return 2 * 4 * int(config.warps)

    def row_warps(self, config: Any, columns: int) -> int:
        """Warps that share a row: as few as load it at once, a power of two, and at most all of a block's."""
        row_warps = 1
        while row_warps < config.warps and row_warps * 32 * config.unroll < columns:
            row_warps *= 2
        return row_warps

    def program(self, config: Any, call: Call, device: Device) -> Program:
        """See Family."""
        w = call.workload
        rows, row_warps = w.batch * w.heads_q * w.len_q, self.row_warps(config, w.len_kv)
        if not rows:
            return Program(())
        values = {"rows": rows, "columns": w.len_kv, "len_q": w.len_q, "heads_q": w.heads_q, "row_warps": row_warps}
        values |= {"len_q_reciprocal": reciprocal(w.len_q), "heads_q_reciprocal": reciprocal(w.heads_q)}
        for name in ("x", "y"):
            batch, head, row, _ = call.views[name].strides
            values |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
        return Program((KernelLaunch(-(-rows // (config.warps // row_warps)), values),))

    def call_refusals(self, call: Call, config: Any = None) -> list[str]:
        """See Family."""
        rows = call.workload.batch * call.workload.heads_q * call.workload.len_q
        reasons = [] if rows <= MAX_ROWS else [f"x must have at most {MAX_ROWS} rows, over batch and heads; got {rows}"]
        if (columns := call.workload.len_kv) > MAX_COLUMNS:
            reasons.append(f"x must have at most {MAX_COLUMNS} columns; got {columns}")
        return reasons + super().call_refusals(call, config)

    def traffic(self, problem: Problem, config: Any, workload: Workload, device: Device) -> Traffic:
        """See Family. A row is read in each pass, and written in the last one."""
        w = workload
        row_bytes = w.batch * w.heads_q * w.len_q * w.len_kv * problem.dtype.bytes
        return Traffic(self.passes * row_bytes, row_bytes)

    def predict(self, problem: Problem, config: Any, workload: Workload, device: Device, registers: int | None = None) -> Prediction:
        """See Family. Reads of `passes` passes and one write by the memory's bandwidth, as if no cache held a row."""
        w = workload
        if not w.batch * w.heads_q * w.len_q * w.len_kv:
            return Prediction(0.0, "nothing")
        traffic = self.traffic(problem, config, w, device)
        moved = traffic.read + traffic.written
        idle = 1.0 + 0.02 * abs(config.warps - 8) / 8 + 0.02 * abs(config.unroll - 4) / 4  # a guess: blocks of middling size do best
        return Prediction(LAUNCH_SECONDS + idle * moved / (DRAM_EFFICIENCY * device.memory_bandwidth), "memory")
