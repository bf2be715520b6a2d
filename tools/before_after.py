"""Times kernels of another checkout against this one's, interleaved, in the cells of the benchmark's grids.

    git worktree add ../before <commit>
    python -m tools.before_after --old ../before --grid standard,gqa,mixed,short
    python -m tools.before_after --old ../before --pass backward --family attention_backward

For each cell the config is the one that this checkout chooses, or that of the family asked for. Both checkouts render it, and both texts
run on the same inputs in shuffled order. Printed are the median over the rounds of the old kernel's time over the new one's, its spread,
and registers; then each grid's geometric mean and extremes. Results are not checked here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flashgen.bench.cells import STANDARD, grids
from flashgen.build.artifact import Artifact
from flashgen.build.gpu.driver import Gpu, gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_many
from flashgen.cells import Cell
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.render import Source
from flashgen.selection import compilation
from flashgen.selection.families import families_not_asked
from flashgen.selection.loaded import Kernels
from flashgen.timing.kernels import Bench
from flashgen.timing.spread import Spread
from tools.move_records import Fault, Rendered, rendered_by, rendered_here

ROUNDS, ROUND_SECONDS = 15, 8e-3  # longer than a tuner's: what is looked for is half a percent


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the commit to compare with")
    parser.add_argument("--grid", default=STANDARD, help="grids of the benchmark, separated by commas")
    parser.add_argument("--pass", dest="operation", default="forward", choices=("forward", "backward"))
    parser.add_argument("--family", help="the only family whose kernels are chosen")
    options = parser.parse_args(argv)
    try:
        compare(options.old, grids(options.grid, options.operation), options.family)
    except FlashgenError as error:
        sys.exit(f"error: {error}")


def compare(old: Path, cells: dict[str, list[Cell]], family: str | None) -> None:
    """Prints a line for each cell, and one for each grid. Raises ArgumentError where the launches of the two checkouts differ."""
    on, chosen = gpu(0), Kernels()
    for grid, some in cells.items():
        kernels = [chosen.choose(cell.problem, cell.workload, on, families_not_asked(family)) for cell in some]
        ratios = []
        for cell, kernel, before in zip(some, kernels, kernels_of(old, kernels, on), strict=True):
            seconds = Bench(cell.problem, cell.workload, on.ordinal).seconds({"old": before, "new": kernel}, ROUNDS, ROUND_SECONDS)
            ratio = Spread.of([a / b for a, b in zip(seconds["old"], seconds["new"], strict=True)])
            registers = f"{before.artifact.report.registers} -> {kernel.artifact.report.registers} registers"
            print(
                f"{grid:10} {cell.problem.name} {cell.workload.name}: x {ratio.median:.4f} [{ratio.low:.3f}..{ratio.high:.3f}], {registers}"
            )
            ratios.append(ratio.median)
        mean, least, most = statistics.geometric_mean(ratios), min(ratios), max(ratios)
        print(f"{grid}: geometric mean {mean:.4f}, from {least:.4f} to {most:.4f}, {len(ratios)} cells")


def kernels_of(old: Path, kernels: Sequence[Kernel], on: Gpu) -> list[Kernel]:
    """What the old checkout makes of the same problems and configs, in its own revisions."""
    revisions = json.loads((old / "tests/golden/revisions.json").read_text(encoding="utf-8"))
    specs = [kernel.spec for kernel in kernels]
    texts = rendered_by(old, [{**spec.to_json(), "revision": revisions[spec.family.name]["revision"]} for spec in specs])
    sources: dict[str, Source] = {}
    for spec, text in zip(specs, texts, strict=True):
        if isinstance(text, Fault) or text.launch != rendered_here(spec).launch:
            told = text.fault if isinstance(text, Fault) else "launched with other threads, shared memory or parameters"
            raise ArgumentError(f"old must launch {spec.name} as this checkout does; got: {told}")
        sources[spec.name] = source_of(text)
    jobs = [(name, partial(compilation.store().get_or_compile, source, on.device.target.name)) for name, source in sources.items()]
    artifacts = dict(compile_many(jobs))
    found = [(spec, artifacts[spec.name]) for spec in specs]
    if failed := [str(artifact) for _, artifact in found if not isinstance(artifact, Artifact)]:
        raise FlashgenError(failed[0])
    return [Kernel(spec, artifact, on) for spec, artifact in found if isinstance(artifact, Artifact)]


def source_of(text: Rendered) -> Source:
    """As the compiler takes it."""
    return Source(text.entry, text.text)


if __name__ == "__main__":
    main()
