"""The models against measurement: times many configs in many cells, judges a family's model on them, and fits its weights.

    python tools/model.py measure times.json --head-dim 80 --head-dim 112 --head-dim 160 --head-dim 224 --seqlen 512 --seqlen 4096
    python tools/model.py fit times.json --family attention_forward --head-dim 80 --head-dim 112 --head-dim 160 --head-dim 224
    python tools/model.py judge times.json --family attention_forward --head-dim 64 --head-dim 128
    python tools/model.py picks times.json --head-dim 24 --head-dim 32

`measure` needs a GPU. A cell is a head dim, a mask and a length, with 16384 tokens and heads * head_dim = 2048. Its configs are, of each
family, a seeded random half from its space (all of it, where that is less) and the rest from all legal ones, and those that a tune tries
there; those that do not compile cleanly are left out. `picks` compares what is taken where nothing was measured with the fastest config
of any family.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.cli.options import problems
from flashgen.codegen.devices import Device, find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.families.attention_forward import model as attention_forward
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward.family import FAMILY
from flashgen.codegen.families.attention_forward_sm90 import model as attention_forward_sm90
from flashgen.codegen.family import Family, families, find_family
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.spec import KernelSpec, PlainSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload
from flashgen.selection import compilation
from flashgen.selection.picks import model_picks
from flashgen.selection.ranking import shortlist
from flashgen.tuning.request import MODEL_BEST

ROUNDS = 3
ROUND_SECONDS = 1.5e-3
PICK = 0.015  # difference of predictions, as a share, that makes a config e times as likely to be picked where `fit` counts picks
FITTED: dict[str, Any] = {"attention_forward": attention_forward.FITTED, "attention_forward_sm90": attention_forward_sm90.FITTED}
Cell = tuple[int, bool, int]
"""Head dim, causal, length."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One config in one cell."""

    spec: KernelSpec
    registers: int
    seconds: float


def cell_of(cell: Cell) -> tuple[Problem, Workload]:
    """The problem and workload of a cell."""
    head_dim, causal, length = cell
    (problem,) = problems(head_dim, 0, "bf16", causal)
    heads = max(1, 2048 // head_dim)
    return problem, Workload(max(1, 16384 // length), heads, heads, length, length)


def all_legal(problem: Problem, target: Target) -> Iterator[AttentionForwardConfig]:
    """Legal configs of `attention_forward` of every shape, whether worth considering or not."""
    sizes = itertools.product((2, 3, 4, 5, 6, 8, 10, 12, 16), (16, 32), (16, 32, 48, 64, 80, 96, 112, 128), (1, 2, 3, 4, 6, 8))
    for (warps, rows, step, steps), stages, query, first_product in itertools.product(sizes, (2, 3, 4), QueryPlace, FirstProduct):
        caps = set()
        for blocks in (1, 2, 3, 4):
            config = AttentionForwardConfig(
                block_q=warps * rows,
                block_kv=step * steps,
                step_kv=step,
                warps=warps,
                stages=stages,
                query=query,
                first_product=first_product,
                blocks_per_sm=blocks,
            )
            if FAMILY.registers_cap(config, target) not in caps and not FAMILY.check(problem, config, target):
                yield config
            caps.add(FAMILY.registers_cap(config, target))


def sample(family: Family, problem: Problem, target: Target, count: int) -> list[Any]:
    """`count` legal configs, or all if there are fewer, the same each time. None that pack heads: the cells have groups of one."""
    space: list[Any] = [config for config in family.legal_configs(problem, target) if family.group_unit(config) == 1]
    everything = list(all_legal(problem, target)) if family is FAMILY else space
    rng = random.Random(problem.name)
    chosen = dict.fromkeys(rng.sample(space, min(count // 2, len(space))))
    for config in rng.sample(everything, len(everything)):
        if len(chosen) < count:
            chosen[config] = None
    return list(chosen)


def tuned(family: Family, cell: Cell, device: Device) -> list[Any]:
    """The configs of a family that a tune tries in a cell."""
    return [candidate.config for candidate in shortlist(*cell_of(cell), device, MODEL_BEST, [family])]


def measure(path: Path, among: Sequence[str], head_dims: Sequence[int], masks: Sequence[bool], lengths: Sequence[int], count: int) -> None:
    """Times the samples of all cells and families and writes them to `path` after each cell."""
    from flashgen.build.artifact import Artifact
    from flashgen.build.gpu.driver import gpu
    from flashgen.build.gpu.kernel import Kernel
    from flashgen.build.nvrtc import compile_many
    from flashgen.timing.kernels import Bench

    on = gpu(0)
    target, rows = on.device.target, []
    for head_dim, causal in itertools.product(head_dims, masks):
        (problem,) = problems(head_dim, 0, "bf16", causal)
        specs: dict[KernelSpec, None] = {}
        for family in (find_family(name) for name in among):
            tried = (config for length in lengths for config in tuned(family, (head_dim, causal, length), on.device))
            specs |= dict.fromkeys(KernelSpec(family, problem, c, target) for c in (*sample(family, problem, target, count), *tried))
        jobs = ((s, partial(compilation.compile_spec, s)) for s in specs)
        made = {s: a for s, a in compile_many(jobs) if isinstance(a, Artifact) and not a.report.defects}
        kernels = {s.name: Kernel(s, a, on) for s, a in made.items()}
        for length in lengths:
            bench = Bench(*cell_of((head_dim, causal, length)), on.ordinal)
            timings = dict(bench.time(kernels, ROUNDS, ROUND_SECONDS))
            for spec, artifact in made.items():
                row = {"length": length, "spec": spec.to_json(), "registers": artifact.report.registers}
                rows.append(row | {"seconds": timings[spec.name].seconds})
            path.write_text(json.dumps({"device": on.device.name, "driver": on.driver_version, "rows": rows}), encoding="utf-8")
            print(f"d {head_dim} {'causal' if causal else 'full'} S {length}: {len(made)} of {len(specs)} configs", flush=True)


def read(path: Path, head_dims: Sequence[int], among: Sequence[str] = ()) -> tuple[Device, dict[Cell, list[Measured]]]:
    """What `measure` wrote, of these head dims and families, all by default. Raises ArgumentError if it holds none of them."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cells: dict[Cell, list[Measured]] = defaultdict(list)
    for row in data["rows"]:
        plain = row["spec"]
        if plain["problem"]["head_dim"] in head_dims and plain["family"] in (among or families()):
            spec = PlainSpec.from_json(plain).as_of_now()
            cell = (spec.problem.head_dim, spec.problem.mask is Mask.CAUSAL, row["length"])
            cells[cell].append(Measured(spec, row["registers"], row["seconds"]))
    if not cells:
        raise ArgumentError(f"head-dim must be one that {path} holds; got {', '.join(map(str, head_dims))}")
    return find_device(data["device"]), dict(cells)


def predictions(cell: Cell, rows: list[Measured], device: Device, weights: Any) -> np.ndarray:
    """The seconds that the model of a family, which is that of all rows, expects for the configs of a cell."""
    problem, workload = cell_of(cell)
    predict: Callable[..., Any] = rows[0].spec.family.predict
    return np.array([predict(problem, row.spec.config, workload, device, row.registers, weights).seconds for row in rows])


@dataclasses.dataclass(frozen=True)
class Score:
    """How a model does in one cell: rank correlation, and by how much its first, its best five, and a tune, miss the best config."""

    spearman: float
    first_gap: float
    gap: float
    tune_gap: float

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray, tried: np.ndarray) -> Score:
        """Compares seconds with seconds. `tried`: whether a tune tries the config."""
        ranks = [np.argsort(np.argsort(x)) for x in (predicted, measured)]
        best_five = measured[np.argsort(predicted, kind="stable")[:5]]
        found = measured[tried].min() if tried.any() else math.inf
        gaps = (float(t / measured.min() - 1) for t in (best_five[0], best_five.min(), found))
        return cls(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), *gaps)


def judge(device: Device, cells: dict[Cell, list[Measured]], weights: Any) -> list[Score]:
    """Prints a line for each cell, and the two figures that count. All rows are of one family."""
    judged = []
    print(f"{device.name}; Spearman's rank correlation, and by how much the model's first, its best five, and a tune, miss the best config")
    for cell, rows in sorted(cells.items()):
        tried = set(tuned(rows[0].spec.family, cell, device))
        measured = np.array([row.seconds for row in rows])
        score = Score.of(predictions(cell, rows, device, weights), measured, np.array([row.spec.config in tried for row in rows]))
        judged.append(score)
        gaps = "  ".join(f"{gap:6.1%}" for gap in (score.first_gap, score.gap, score.tune_gap))
        print(f"{_name(cell)}  {len(rows):4} configs  {score.spearman:.3f}  {gaps}")
    near = sum(score.gap <= 0.03 for score in judged)
    median = statistics.median(score.spearman for score in judged)
    print(f"median {median:.3f}; best five within 3 % in {near} of {len(judged)} cells")
    return judged


def picks(device: Device, cells: dict[Cell, list[Measured]]) -> dict[Cell, float]:
    """By how much what is taken where nothing was measured misses the fastest config of any family. Prints a line for each cell."""
    gaps = {}
    for cell, rows in sorted(cells.items()):
        seconds = {row.spec: row.seconds for row in rows}
        best = min(seconds, key=seconds.__getitem__)
        taken = next((spec for spec in model_picks(*cell_of(cell), device) if spec in seconds), None)
        if taken is None:
            print(f"{_name(cell)}  none of the model's picks was measured")
            continue
        gaps[cell] = seconds[taken] / seconds[best] - 1
        print(f"{_name(cell)}  {gaps[cell]:6.1%}  {taken.config.name}, best {best.config.name}")
    print(
        f"within 5 % in {sum(gap <= 0.05 for gap in gaps.values())} of {len(cells)} cells, worst {max(gaps.values(), default=math.nan):.1%}"
    )
    return gaps


def _name(cell: Cell) -> str:
    return f"d {cell[0]:3} {'causal' if cell[1] else 'full':6} S {cell[2]:5}"


def loss(device: Device, cells: dict[Cell, list[Measured]], weights: Any) -> float:
    """What `fit` makes small: wrong order, missed best configs, first of all by the first pick, and wrong times of the fast ones."""
    total = 0.0
    for cell, rows in cells.items():
        predicted, measured = predictions(cell, rows, device, weights), np.array([row.seconds for row in rows])
        score = Score.of(predicted, measured, np.zeros(len(rows), dtype=bool))
        fast = (measured.min() / measured) ** 8  # half at 9 % behind: whether slow configs come 2 or 3 times as late does not matter
        error = np.log(predicted / measured)
        bias = np.average(error, weights=fast)
        spread = math.sqrt(np.average((error - bias) ** 2, weights=fast))
        # The gap of the first pick, smoothed: of two that are predicted all but equal, each might be the first.
        first = float(np.average(measured / measured.min() - 1, weights=(predicted.min() / predicted) ** (1 / PICK)))
        total += 1 - score.spearman + score.gap + 2 * first + 2 * spread + 0.5 * abs(bias)
    return total / len(cells)


def fit(device: Device, cells: dict[Cell, list[Measured]], start: Any, seconds: float) -> Any:
    """Nelder and Mead's search from the weights `start`, each taken relative to its value there, as long as it finds better ones."""
    import time

    from scipy.optimize import minimize

    kind, names = type(start), [f.name for f in dataclasses.fields(start)]
    deadline = time.monotonic() + seconds

    def weights(factors: np.ndarray) -> Any:
        return kind(**{name: getattr(start, name) * float(f) for name, f in zip(names, factors, strict=True)})

    def cost(factors: np.ndarray) -> float:
        if (factors <= 0).any() or time.monotonic() > deadline:
            return math.inf
        return loss(device, cells, weights(factors))

    search: Callable[..., Any] = minimize
    best, value = np.ones(len(names)), cost(np.ones(len(names)))
    print(f"loss {value:.4f}")
    while time.monotonic() < deadline:  # again from where it ended: the simplex had become flat
        found = search(cost, best, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-5, "maxfev": 3000, "adaptive": True})
        if found.fun > value - 1e-4:
            break
        best, value = found.x, found.fun
        print(f"loss {value:.4f}", flush=True)
    for name, weight in dataclasses.asdict(weights(best)).items():
        print(f"    {name}={weight:.4g},")
    return weights(best)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "fit", "judge", "picks"))
    parser.add_argument("file", type=Path, help="what measure writes, and the others read")
    parser.add_argument("--family", choices=tuple(FITTED), help="to fit or judge (default: attention_forward_sm90), or to measure alone")
    parser.add_argument("--head-dim", type=int, action="append", required=True)
    parser.add_argument("--seqlen", type=int, action="append")
    parser.add_argument("--mask", choices=("full", "causal", "both"), default="both")
    parser.add_argument("--configs", type=int, default=320, help="sampled in each cell")
    parser.add_argument("--seconds", type=float, default=300.0, help="that fit may take")
    options = parser.parse_args(argv)
    try:
        run(options)
    except (FlashgenError, OSError) as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    """What the command line asks for."""
    if options.what == "measure":
        masks = {"full": (False,), "causal": (True,), "both": (False, True)}[options.mask]
        among = [options.family] if options.family else list(FITTED)
        measure(options.file, among, options.head_dim, masks, options.seqlen or (512, 4096, 16384), options.configs)
        return
    if options.what == "picks":
        picks(*read(options.file, options.head_dim))
        return
    family = options.family or "attention_forward_sm90"
    device, cells = read(options.file, options.head_dim, [family])
    judge(device, cells, FITTED[family] if options.what == "judge" else fit(device, cells, FITTED[family], options.seconds))


if __name__ == "__main__":
    main()
