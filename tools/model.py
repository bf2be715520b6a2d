"""The model against measurement: times many configs in many cells, judges the model on them, and fits its weights.

    python tools/model.py measure times.json --head-dim 80 --head-dim 112 --head-dim 160 --head-dim 224 --seqlen 512 --seqlen 4096
    python tools/model.py fit times.json --head-dim 80 --head-dim 112 --head-dim 160 --head-dim 224
    python tools/model.py judge times.json --head-dim 64 --head-dim 128

`measure` needs a GPU. A cell is a head dim, a mask and a length, with 16384 tokens and heads * head_dim = 2048. Its configs are a seeded
random half from the family's space (all of it, where that is less) and the rest from all legal ones, and those that a tune tries there;
those that do not compile cleanly are left out.
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

from flashgen import selection
from flashgen.cli.options import problems
from flashgen.codegen.device import Device, find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.families.attention_forward import FAMILY, AttentionForwardConfig, QueryPlace, StepOrder
from flashgen.codegen.models import attention_forward as model
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.target import Target
from flashgen.tuning.request import MODEL_BEST

ROUNDS = 3
ROUND_SECONDS = 1.5e-3
Cell = tuple[int, bool, int]
"""Head dim, causal, length."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One config in one cell."""

    config: AttentionForwardConfig
    registers: int
    seconds: float


def cell_of(cell: Cell) -> tuple[Problem, Workload]:
    """The problem and workload of a cell."""
    head_dim, causal, length = cell
    (problem,) = problems(head_dim, 0, "bf16", causal)
    heads = max(1, 2048 // head_dim)
    return problem, Workload(max(1, 16384 // length), heads, heads, length, length)


def all_legal(problem: Problem, target: Target) -> Iterator[AttentionForwardConfig]:
    """Legal configs of every shape, whether worth considering or not."""
    sizes = itertools.product((2, 3, 4, 5, 6, 8, 10, 12, 16), (16, 32), (16, 32, 48, 64, 80, 96, 112, 128), (1, 2, 3, 4, 6, 8))
    for (warps, rows, step, steps), stages, query, first in itertools.product(sizes, (2, 3, 4), QueryPlace, StepOrder):
        caps = set()
        for blocks in (1, 2, 3, 4):
            config = AttentionForwardConfig(
                block_q=warps * rows,
                block_kv=step * steps,
                step_kv=step,
                warps=warps,
                stages=stages,
                query=query,
                first=first,
                blocks_per_sm=blocks,
            )
            if FAMILY.registers_cap(config, target) not in caps and not FAMILY.check(problem, config, target):
                yield config
            caps.add(FAMILY.registers_cap(config, target))


def sample(problem: Problem, target: Target, count: int) -> list[AttentionForwardConfig]:
    """`count` legal configs, or all if there are fewer, the same each time."""
    everything: list[Any] = list(all_legal(problem, target))
    space: list[Any] = FAMILY.legal_configs(problem, target)
    rng = random.Random(problem.name)
    chosen = dict.fromkeys(rng.sample(space, min(count // 2, len(space))))
    for config in rng.sample(everything, len(everything)):
        if len(chosen) < count:
            chosen[config] = None
    return list(chosen)


def tuned(cell: Cell, device: Device) -> list[Any]:
    """The configs that a tune tries in a cell."""
    return [candidate.config for candidate in selection.shortlist(*cell_of(cell), device, MODEL_BEST, [FAMILY])]


def measure(path: Path, head_dims: Sequence[int], masks: Sequence[bool], lengths: Sequence[int], count: int) -> None:
    """Times the samples of all cells and writes them to `path` after each cell."""
    from flashgen.build.artifact import Artifact
    from flashgen.build.compiler import compile_many
    from flashgen.build.driver import gpu
    from flashgen.build.kernel import Kernel
    from flashgen.codegen.spec import KernelSpec
    from flashgen.measure import Bench

    on = gpu(0)
    target, rows = on.device.target, []
    for head_dim, causal in itertools.product(head_dims, masks):
        (problem,) = problems(head_dim, 0, "bf16", causal)
        tried = (config for length in lengths for config in tuned((head_dim, causal, length), on.device))
        configs = dict.fromkeys((*sample(problem, target, count), *tried))
        specs = [KernelSpec(FAMILY, problem, config, target) for config in configs]
        jobs = ((s, partial(selection.compile_spec, s)) for s in specs)
        made = {s: a for s, a in compile_many(jobs) if isinstance(a, Artifact) and not a.report.defects}
        kernels = {s.config.name: Kernel(s, a, on) for s, a in made.items()}
        for length in lengths:
            bench = Bench(*cell_of((head_dim, causal, length)), on.ordinal)
            timings = dict(bench.time(kernels, ROUNDS, ROUND_SECONDS))
            for spec, artifact in made.items():
                row = {"head_dim": head_dim, "causal": causal, "length": length, "config": spec.config.to_json()}
                rows.append(row | {"registers": artifact.report.registers, "seconds": timings[spec.config.name].seconds})
            path.write_text(json.dumps({"device": on.device.name, "driver": on.driver_version, "rows": rows}), encoding="utf-8")
            print(f"d {head_dim} {'causal' if causal else 'full'} S {length}: {len(made)} of {len(specs)} configs", flush=True)


def read(path: Path, head_dims: Sequence[int]) -> tuple[Device, dict[Cell, list[Measured]]]:
    """What `measure` wrote, of these head dims. Raises ArgumentError if it holds none of them."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cells: dict[Cell, list[Measured]] = defaultdict(list)
    for row in data["rows"]:
        if row["head_dim"] in head_dims:
            measured = Measured(AttentionForwardConfig.from_json(row["config"]), row["registers"], row["seconds"])
            cells[row["head_dim"], row["causal"], row["length"]].append(measured)
    if not cells:
        raise ArgumentError(f"head-dim must be one that {path} holds; got {', '.join(map(str, head_dims))}")
    return find_device(data["device"]), dict(cells)


def predictions(cell: Cell, rows: list[Measured], device: Device, weights: model.Weights) -> np.ndarray:
    """The model's seconds for the configs of a cell."""
    problem, workload = cell_of(cell)

    def seconds(row: Measured) -> float:
        return FAMILY.predict(problem, row.config, workload, device, row.registers, weights).seconds

    return np.array([seconds(row) for row in rows])


@dataclasses.dataclass(frozen=True)
class Score:
    """How the model does in one cell: rank correlation, and by how much its best five, and a tune, miss the best config."""

    spearman: float
    gap: float
    tune_gap: float

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray, tried: np.ndarray) -> Score:
        """Compares seconds with seconds. `tried`: whether a tune tries the config."""
        ranks = [np.argsort(np.argsort(x)) for x in (predicted, measured)]
        best_five = measured[np.argsort(predicted, kind="stable")[:5]]
        found = measured[tried].min() if tried.any() else math.inf
        return cls(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), *(float(t / measured.min() - 1) for t in (best_five.min(), found)))


def judge(device: Device, cells: dict[Cell, list[Measured]], weights: model.Weights) -> list[Score]:
    """Prints a line for each cell, and the two figures that count."""
    scores = []
    print(f"{device.name}; Spearman's rank correlation, and by how much the model's best five, and a tune, miss the best config")
    for cell, rows in sorted(cells.items()):
        tried = set(tuned(cell, device))
        measured = np.array([row.seconds for row in rows])
        score = Score.of(predictions(cell, rows, device, weights), measured, np.array([row.config in tried for row in rows]))
        scores.append(score)
        kind = "causal" if cell[1] else "full"
        print(f"d {cell[0]:3} {kind:6} S {cell[2]:5}  {len(rows):4} configs  {score.spearman:.3f}  {score.gap:6.1%}  {score.tune_gap:6.1%}")
    near = sum(score.gap <= 0.03 for score in scores)
    median = statistics.median(score.spearman for score in scores)
    print(f"median {median:.3f}; best five within 3 % in {near} of {len(scores)} cells")
    return scores


def loss(device: Device, cells: dict[Cell, list[Measured]], weights: model.Weights) -> float:
    """What `fit` makes small: wrong order, missed best configs, and wrong times of the fast ones."""
    total = 0.0
    for cell, rows in cells.items():
        predicted, measured = predictions(cell, rows, device, weights), np.array([row.seconds for row in rows])
        score = Score.of(predicted, measured, np.zeros(len(rows), dtype=bool))
        fast = (measured.min() / measured) ** 8  # half at 9 % behind: whether slow configs come 2 or 3 times as late does not matter
        error = np.log(predicted / measured)
        bias = np.average(error, weights=fast)
        spread = math.sqrt(np.average((error - bias) ** 2, weights=fast))
        total += 1 - score.spearman + score.gap + 2 * spread + 0.5 * abs(bias)
    return total / len(cells)


def fit(device: Device, cells: dict[Cell, list[Measured]], seconds: float) -> model.Weights:
    """Nelder and Mead's search from the present weights, each taken relative to its present value, as long as it finds better ones."""
    import time

    from scipy.optimize import minimize

    start, names = model.FITTED, [f.name for f in dataclasses.fields(model.Weights)]
    deadline = time.monotonic() + seconds

    def weights(factors: np.ndarray) -> model.Weights:
        return model.Weights(**{name: getattr(start, name) * float(f) for name, f in zip(names, factors, strict=True)})

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
    parser.add_argument("what", choices=("measure", "fit", "judge"))
    parser.add_argument("file", type=Path, help="what measure writes, and the others read")
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
        measure(options.file, options.head_dim, masks, options.seqlen or (512, 4096, 16384), options.configs)
        return
    device, cells = read(options.file, options.head_dim)
    judge(device, cells, model.FITTED if options.what == "judge" else fit(device, cells, options.seconds))


if __name__ == "__main__":
    main()
