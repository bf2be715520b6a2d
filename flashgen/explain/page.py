"""The page: one HTML file with the recorded runs as data, and nothing that it has to fetch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flashgen.codegen.devices import Device
from flashgen.codegen.ladder import L2_BYTES_PER_CYCLE
from flashgen.codegen.problem import Mask

from ..pages.html import ValueTable, self_contained_page
from .events import OperationKind
from .product import TILED_PRODUCT
from .rows import TileStatistics, tile_statistics
from .run import HEAD_DIM, RecordedRun, SmallProblem
from .steps import ScheduleStep

_FOLDER = Path(__file__).parent
_SCRIPTS = ("state.js", "tiles.js", "panel.js", "controls.js")
SHARED_BYTES_PER_CYCLE = 128  # of an SM: 32 banks of 4 bytes
TITLES = {
    TILED_PRODUCT: "Tiled product",
    "standard_attention": "Standard attention",
    "memory_efficient_attention": "Memory-efficient attention",
    "flash1_forward": "FlashAttention 1",
    "flash2_forward": "FlashAttention 2",
    "attention_forward_sm90": "FlashAttention 3",
    "flash1_backward": "FlashAttention 1, backward",
    "flash2_backward": "FlashAttention 2, backward",
    "attention_backward_sm90": "FlashAttention 3, backward",
}
_KERNELS = {"forward": "S", "backward": "gradients"}  # what a program's kernel without a name of its own computes


@dataclass(frozen=True)
class _Tables:
    """What runs and steps have in common, each once.

    lines: of sources; codes: what is done where; subjects: tiles, needed tiles and bytes; residents: tiles in shared memory
    """

    lines: ValueTable = field(default_factory=ValueTable)
    codes: ValueTable = field(default_factory=ValueTable)
    subjects: ValueTable = field(default_factory=ValueTable)
    residents: ValueTable = field(default_factory=ValueTable)


def page_html(runs: Sequence[RecordedRun], device: Device) -> str:
    """The page of these runs, all of the same number of tiles, in the order in which it shows them."""
    return self_contained_page(_FOLDER, _SCRIPTS, page_data(runs, device))


def page_data(runs: Sequence[RecordedRun], device: Device) -> dict[str, Any]:
    """What the page's script reads."""
    tables = _Tables()
    described = [_run(run, tables) for run in runs]
    sizes = {small.block: small for small in (run.small for run in runs)}
    return {
        "device": device.name,
        "levels": memory_levels(device),
        "problem": {"tiles": runs[0].small.tiles, "headDim": HEAD_DIM},
        "kinds": [kind.value for kind in OperationKind],
        "runs": described,
        **{each.name: getattr(tables, each.name).values for each in fields(tables)},
        "rows": {block: _rows(small) for block, small in sizes.items()},
        "edges": {block: _edges(small) for block, small in sizes.items()},
    }


def memory_levels(device: Device) -> list[dict[str, str]]:
    """The levels of a device's memory, from the fastest: name, size and bandwidth as they are shown."""
    target, cycles = device.target, device.sm_count * device.clock_hz
    memory = f"{device.memory_gb} GB" if device.memory_gb else "not known"
    return [
        _level("Registers", target.registers_per_sm * 4, "each thread its own", device.sm_count),
        _level("Shared memory", target.shared_memory_per_sm, _per_second(SHARED_BYTES_PER_CYCLE * cycles), device.sm_count),
        _level("L2 cache", device.l2_bytes, f"about {_per_second(L2_BYTES_PER_CYCLE * cycles)} (the model's estimate)"),
        {"name": "Device memory", "size": memory, "bandwidth": _per_second(device.memory_bandwidth)},
    ]


def _level(name: str, size: int, bandwidth: str, sm_count: int = 0) -> dict[str, str]:
    each = f"{sm_count} SMs x {size // 1024} KB" if sm_count else f"{size / 2**20:.0f} MB"
    whole = f"{each} = {sm_count * size / 2**20:.0f} MB" if sm_count else each
    return {"name": name, "size": whole, "bandwidth": bandwidth}


def _per_second(rate: float) -> str:
    return f"{rate / 1e12:.1f} TB/s"


def _short(tile: TileStatistics) -> list[float] | None:
    return tile and [round(x, 4) for x in tile]


def _rows(small: SmallProblem) -> list[Any]:
    """Of each row, without a mask: all its tiles."""
    return [list(map(_short, tiles)) for tiles in tile_statistics(replace(small, mask=Mask.FULL))]


def _edges(small: SmallProblem) -> list[Any]:
    """Of each row, under the causal mask: its last tile, of which the mask hides some keys. Of those before it hides none."""
    return [_short(tiles[row // small.block]) for row, tiles in enumerate(tile_statistics(replace(small, mask=Mask.CAUSAL)))]


def _run(run: RecordedRun, tables: _Tables) -> dict[str, Any]:
    blocks = run.spec.resources
    launches = [
        {
            "kernel": launch.suffix.removeprefix("_") or (_KERNELS[run.spec.problem.operation] if len(blocks) > 1 else "kernel"),
            "grid": launch.grid,
            "warps": blocks[launch.suffix].threads // 32,
            "shared": blocks[launch.suffix].shared_bytes,
        }
        for launch in run.program.launches
    ]
    return {
        "family": run.name,
        "title": TITLES[run.name],
        "mask": run.small.mask.value,
        "causal": run.small.mask is Mask.CAUSAL,
        "block": run.small.block,
        "length": run.small.length,
        "headroom": _headroom(run.text.lines),
        "config": f"{run.spec.family.name}, {run.spec.config.describe()}",
        "launches": launches,
        "backward": run.spec.problem.operation == "backward",
        "formula": {"read": run.formula.read, "written": run.formula.written, "added": run.formula.reduced},
        "source": [tables.lines.number(line) for line in run.text.lines],
        "steps": [_step(step, tables) for step in run.steps],
    }


def _headroom(lines: Sequence[str]) -> float:
    """By how much a maximum must rise, in base 2, before a text's online softmax rescales; 0: it always does."""
    found = (re.match(r"constexpr float kHeadroom = ([\d.]+)f;", line) for line in lines)
    return next((float(each[1]) for each in found if each), 0.0)


def _step(step: ScheduleStep, tables: _Tables) -> list[int]:
    operation, lines = step.operation, step.operation.lines
    what = [list(OperationKind).index(operation.kind), operation.operand, _warps(operation.warps)]
    where = [step.launch, lines.kernel, lines.tile, operation.function, operation.atom]
    return [
        tables.codes.number([*what, *where]),
        operation.block,
        tables.subjects.number([" ".join(step.tiles), " ".join(step.needs), operation.bytes]),
        tables.residents.number(" ".join(resident.tile + ("" if resident.landed else "~") for resident in step.shared)),
    ]


def _warps(warps: Sequence[int]) -> str:
    return f"{warps[0]}-{warps[-1]}" if len(warps) > 1 else str(warps[0])
