"""Results of the benchmark that tests make up."""

from __future__ import annotations

from flashgen.bench.result import BenchResult, CallOverhead, CellResult, Environment, PeerTimes
from flashgen.cells import Cell
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

ENVIRONMENT = Environment(
    "2030-01-02T03:04:05+00:00", "flashgen bench --out x", "NVIDIA H200", 132, "580.1", "3.11.9", "0.1.0", "2.11.0", "9.19.0", "13.0",
    {"flash-attn-4": "4.0.0"},
)  # fmt: skip
FULL = Cell(Problem(Dtype.BF16, 64), Workload(1, 1, 1, 1000, 1000))  # 0.256 GFLOP
CAUSAL = Cell(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), Workload(1, 1, 1, 1000, 1000))
DECODE = Cell(Problem(Dtype.FP16, 128, 64), Workload(2, 8, 2, 1, 5000))


def cell(where: Cell, grid: str = "standard", **rounds_ms: tuple[float, ...]) -> CellResult:
    return CellResult(grid, where, {peer: PeerTimes(ms, False, 0.5) for peer, ms in rounds_ms.items()})


def result() -> BenchResult:
    """Three peers on three cells of two grids; one error, one note, one absent peer, the CPU's cost."""
    cells = [
        cell(FULL, flashgen=(1.0, 2.0, 4.0), flash=(2.0, 2.0, 2.0), cudnn=(0.5, 2.0, 3.0)),
        cell(CAUSAL, flashgen=(1.0, 1.0, 1.0), flash=(2.0, 2.0, 2.0)),
        cell(DECODE, "decode", flashgen=(0.01, 0.01, 0.01), flash=(0.04, 0.04, 0.04), cudnn=(0.02, 0.02, 0.02)),
    ]
    cells[1].errors["cudnn"] = "RuntimeError: no | kernel"
    cells[0].notes["flashgen"] = "kernel k"
    return BenchResult(
        ENVIRONMENT, 3, ["flashgen", "flash", "cudnn"], {"fa4": "ModuleNotFoundError: No module named 'flash_attn'"}, "flash", cells,
        {"flashgen": CallOverhead(11.2, 15.5)}, {"flash": "OSError: gone"}, True,
    )  # fmt: skip
