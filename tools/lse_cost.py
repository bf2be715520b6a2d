"""What writing lse costs: the kernels that calls would use for the cells of a grid, with lse and without, interleaved.

    python tools/lse_cost.py --grid standard

Needs a GPU. Prints, for each cell, the median over the rounds of the time without lse over the time with it, with its spread, and at the
end the geometric mean of the cells.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from flashgen.bench.cells import grids
from flashgen.build.gpu.driver import gpu
from flashgen.codegen.errors import FlashgenError
from flashgen.selection import loaded
from flashgen.timing.kernels import Bench
from flashgen.timing.spread import Spread


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="standard", help="as of flashgen bench")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(argv)
    try:
        compare(options.grid, options.rounds)
    except FlashgenError as error:
        sys.exit(f"error: {error}")


def compare(grid: str, rounds: int) -> None:
    """Prints a line for each cell of the grid, and their mean."""
    cells = [cell for some in grids(grid).values() for cell in some]
    on, medians = gpu(0), []
    for cell in cells:
        kernel = loaded.kernels.choose(cell.problem, cell.workload, on)
        bench = Bench(cell.problem, cell.workload, on.ordinal)
        times = bench.seconds({"without": kernel, "with": kernel}, rounds, with_all=("with",))
        ratio = Spread.of([a / b for a, b in zip(times["without"], times["with"], strict=True)])
        medians.append(ratio.median)
        result = f"x {ratio.median:.4f} [{ratio.low:.4f}..{ratio.high:.4f}]"
        print(f"{cell.problem.name:22} {cell.workload.name}  {result}  {kernel.spec.config.name}", flush=True)
    print(f"geometric mean x {statistics.geometric_mean(medians):.4f}, least {min(medians):.4f}, {len(medians)} cells")


if __name__ == "__main__":
    main()
