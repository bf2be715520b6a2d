"""A rung's kernel, run in the emulator on a small problem and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.kernel import EmulationOrder, Schedule
from flashgen.build.emulator.memory import MemoryView
from flashgen.build.emulator.trace import TracedKernel
from flashgen.codegen.attention import attention_call, padded
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError, choice_error, require_int
from flashgen.codegen.families.attention_forward_sm90.config import RowMax
from flashgen.codegen.families.flash1_forward.config import ParallelOver
from flashgen.codegen.family import Traffic, find_family
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Program
from flashgen.codegen.render import Atoms, Source, render, traced
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload

from ..selection import compilation
from .events import tile_operations
from .lines import ShownText
from .steps import ScheduleStep, Tiling, schedule

# In the order of docs/ladder.md.
FORWARD = ("standard_attention", "memory_efficient_attention", "flash1_forward", "flash2_forward")
HOPPER = ("attention_forward_sm90",)  # flash3
BACKWARD = ("flash1_backward", "flash2_backward")
HOPPER_BACKWARD = ("attention_backward_sm90",)
EXPLAINED = (*FORWARD, *HOPPER, *BACKWARD, *HOPPER_BACKWARD)
BLOCK, HEAD_DIM, WARPS = 32, 32, 2  # rows of all tiles, their width, and warps of a block
CONSUMERS = 2  # warpgroups of a Hopper block that compute, by turns: each has the 64 rows of a tile that wgmma takes
MAX_TILES = 8  # of queries, and of keys
# Beside the tiles: a warp of the softmax for each row of a query tile; one block for a head, as in the paper's algorithm.
_BESIDE: dict[str, dict[str, Any]] = {
    "standard_attention": {"softmax_warps": BLOCK},
    "flash1_forward": {"parallel_over": ParallelOver.HEADS},
}
# Warp by warp, as far as each may go: the order in which a person reads.
_ORDER = EmulationOrder(Schedule.AHEAD, late_copies=False)

HOPPER_BLOCK = CONSUMERS * 64
# Square tiles, as the other rungs have. Forward with room for one of Q and one of O: each block has one query tile.
_HOPPER_TILES: dict[str, dict[str, Any]] = {
    "attention_forward_sm90": {
        **{"warpgroups": CONSUMERS, "block_kv": HOPPER_BLOCK, "query_stages": 1, "out_panels": 1},
        "row_max": RowMax.EXACT,
    },
    "attention_backward_sm90": {"block_q": HOPPER_BLOCK},
}

Heads = np.ndarray[Any, np.dtype[np.float16]]  # one head of a tensor, [length, head_dim]
Operand = np.ndarray[Any, np.dtype[Any]]  # one head, or a number for each of its rows


@dataclass(frozen=True)
class SmallProblem:
    """One head of `tiles` query tiles and as many key tiles."""

    mask: Mask
    tiles: int
    block: int = BLOCK  # rows of a tile

    def __post_init__(self) -> None:
        require_int("tiles", self.tiles, 1, MAX_TILES)

    @property
    def length(self) -> int:
        """Queries, and keys."""
        return self.tiles * self.block

    def of_family(self, family: str) -> SmallProblem:
        """With as many of the tiles that a family has."""
        return replace(self, block=HOPPER_BLOCK if family in _HOPPER_TILES else BLOCK)

    def problem(self, operation: str = "forward") -> Problem:
        """As families of the operation know it."""
        return Problem(Dtype.FP16, HEAD_DIM, HEAD_DIM, self.mask, operation)

    @property
    def workload(self) -> Workload:
        """As families know it."""
        return Workload(1, 1, 1, self.length, self.length)

    def inputs(self) -> dict[str, Heads]:
        """q, k and v, always the same."""
        random = np.random.default_rng(2)
        return {name: random.standard_normal((self.length, HEAD_DIM)).astype(np.float16) for name in ("q", "k", "v")}

    def scaled_products(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Scaled S, [queries, keys]: -inf where the mask hides a key."""
        inputs = self.inputs()
        found = inputs["q"].astype(np.float64) @ inputs["k"].astype(np.float64).T * HEAD_DIM**-0.5
        return np.where(np.tri(self.length, dtype=bool), found, -np.inf) if self.mask is Mask.CAUSAL else found

    def saved(self) -> dict[str, Operand]:
        """What a backward pass reads beside q, k and v: out and lse, which the forward pass has saved, and d_out."""
        products, d_out = self.scaled_products(), np.random.default_rng(3).standard_normal((self.length, HEAD_DIM)).astype(np.float16)
        lse = np.log(np.exp(products).sum(axis=1))
        out = np.exp(products - lse[:, None]) @ self.inputs()["v"].astype(np.float64)
        return {"out": out.astype(np.float16), "lse": lse.astype(np.float32), "d_out": d_out}


@dataclass(frozen=True)
class RecordedRun:
    """A run of a rung's kernels: its steps, what it computed, and what its family says of the bytes that it moves.

    name: of what is shown, the family's or that of a part
    """

    name: str
    spec: KernelSpec
    small: SmallProblem
    program: Program
    text: ShownText
    steps: list[ScheduleStep]
    results: dict[str, Heads]
    formula: Traffic


def explained_spec(family: str, small: SmallProblem, device: Device) -> KernelSpec:
    """The kernel that stands for a rung. Raises ArgumentError for a family that is not explained, or no legal one on the device."""
    if family not in EXPLAINED:
        raise choice_error("family", family, EXPLAINED)
    found = find_family(family)
    problem = small.problem(found.operation)
    tiles = _HOPPER_TILES.get(family, {"block_q": BLOCK, "block_kv": BLOCK, "warps": WARPS})
    config = found.config_type(**tiles, **_BESIDE.get(family, {}))
    if reasons := found.check(problem, config, device.target):
        raise ArgumentError(f"device must run {family}; got {device.name}: {'; '.join(reasons)}")
    return KernelSpec(found, problem, config, device.target)


def explained_on(device: Device) -> tuple[str, ...]:
    """The rungs whose kernels run on a device."""
    problem = SmallProblem(Mask.FULL, 1).problem
    families = map(find_family, EXPLAINED)
    return tuple(family.name for family in families if not family.refusals(problem(family.operation), device.target))


def texts_of(spec: KernelSpec) -> tuple[Source, Source]:
    """A spec's text as a GPU gets it, and with emulated atoms."""
    return render(spec), render(spec, Atoms.EMULATED)


def record(spec: KernelSpec, small: SmallProblem, device: Device, texts: tuple[Source, Source] | None = None) -> RecordedRun:
    """Compiles the kernel for the emulator, runs it and records what it does. `texts`: in place of those of the spec, both edited alike.

    Raises CxxCompilerMissingError without a C++ compiler, TraceError without a tool that reads lines, EmulatorFaultError if a check of
    the emulator fails.
    """
    small, (shown, emulated) = small.of_family(spec.family.name), texts or texts_of(spec)
    text = ShownText(shown, emulated)
    kernel = TracedKernel(spec, compilation.store().get_or_compile(traced(emulated), Emulated.TRACED))
    program = spec.family.program(spec.config, attention_call(spec.problem, small.workload), device)
    inputs: dict[str, Operand] = {**small.inputs(), **(small.saved() if spec.problem.operation == "backward" else {})}
    written = [
        operand for operand in operation_of(spec.problem).operands(spec.problem) if operand.role is Role.OUT and not operand.optional
    ]
    results: dict[str, Heads] = {operand.name: np.full((small.length, HEAD_DIM), np.nan, np.float16) for operand in written}
    views = {name: _view(name, array, name in results) for name, array in (inputs | results).items()}
    kernel.launch(program, views, _ORDER, workers=1)
    steps = schedule([tile_operations(trace, text) for trace in kernel.traces], tilings(small, program))
    formula = spec.family.traffic(spec.problem, spec.config, small.workload, device)
    assert formula is not None, f"{spec.family.name} says what its loops move"
    return RecordedRun(spec.family.name, spec, small, program, text, steps, results, formula)


def compile_ahead_of(specs: Sequence[KernelSpec], done: Callable[[], None] = lambda: None) -> None:
    """Compiles the kernels of several specs at once, on all cores, and calls `done` after each; `record` finds them in the store."""
    from flashgen.build.nvrtc import compile_many

    def job(spec: KernelSpec) -> Any:
        return lambda: compilation.store().get_or_compile(traced(render(spec, Atoms.EMULATED)), Emulated.TRACED)

    for _, found in compile_many([(spec.name, job(spec)) for spec in specs]):
        if isinstance(found, Exception):
            raise found
        done()


def tilings(small: SmallProblem, program: Program) -> dict[str, Tiling]:
    """How operands and buffers divide into tiles."""
    sizes = {buffer.name: buffer.bytes for buffer in program.buffers}
    block, row, row_of_s = small.block, HEAD_DIM * 2, -(-small.length // 16) * 16
    of_rows = {name: Tiling(row, block) for name in ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")}
    of_s_and_p = {"S": Tiling(row_of_s * 4, block, block * 4), "P": Tiling(row_of_s * 2, block, block * 2)}
    of_numbers = {"lse": Tiling(4, block)}
    # Where row_lse of a tile has a flag behind its rows, that counts as rows, too.
    of_numbers |= {name: Tiling(4, sizes[name] // 4 // small.tiles) for name in ("row_lse", "row_delta") if name in sizes}
    sums = {"running_rows": Tiling(16 + padded(HEAD_DIM) * 4, block), "d_q_sum": Tiling(padded(HEAD_DIM) * 4, block)}
    return of_rows | of_s_and_p | of_numbers | sums


def _view(name: str, array: Operand, writable: bool) -> MemoryView:
    rows, columns = array.shape[0], array.size // array.shape[0]
    sizes, strides = ((1, rows, 1, columns), (array.size, columns, columns, 1)) if array.ndim == 2 else ((1, 1, rows), (rows, rows, 1))
    return MemoryView(name, array.ctypes.data, array.itemsize, sizes, strides, writable)
