"""What writing lse costs: the kernels that calls would use for the cells of a grid, with lse and without, interleaved.

    python tools/lse_cost.py --grid standard

Needs a GPU. Prints, for each cell, the median over the rounds of the time without lse over the time with it, with its spread, and at the
end the geometric mean of the cells.
"""

from __future__ import annotations

import argparse
import statistics

from flashgen import selection
from flashgen.bench.cells import grids
from flashgen.build.driver import gpu
from flashgen.measure import Bench
from flashgen.spread import Spread


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="standard", help="as of flashgen bench")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    on, medians = gpu(0), []
    for cell in (cell for cells in grids(options.grid).values() for cell in cells):
        kernel = selection.kernels.choose(cell.problem, cell.workload, on)
        times = Bench(cell.problem, cell.workload, on.ordinal).seconds(
            {"without": kernel, "with": kernel}, options.rounds, with_lse=("with",)
        )
        ratio = Spread.of([a / b for a, b in zip(times["without"], times["with"], strict=True)])
        medians.append(ratio.median)
        print(
            f"{cell.problem.name:22} {cell.workload}  x {ratio.median:.4f} [{ratio.low:.4f}..{ratio.high:.4f}]  {kernel.spec.config.name}",
            flush=True,
        )
    print(f"geometric mean x {statistics.geometric_mean(medians):.4f}, least {min(medians):.4f}, {len(medians)} cells")


if __name__ == "__main__":
    main()
