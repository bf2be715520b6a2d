"""Keys in pages of a cache: how a warp copies them, see templates/tile/warpgroup/cached_producer.cuh."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.attention import reciprocal
from flashgen.codegen.cached import box_keys, page_reasons, sequence_block, sequence_values
from flashgen.codegen.modifiers import kind_of
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem
from flashgen.codegen.sizes import common_divisor
from flashgen.codegen.workload import Workload

from .config import AttentionForwardSm90Config, Scheduler

# Those that count keys from the last one, or not at all: rows of key tiles are numbered from the first tile's begin on, which may be before
# the first key.
MODIFIERS = ("alibi", "sinks", "softcap", "window")
_TILES = ("common/cached_sequences", "common/tiled_span")  # behind the chain, of which the second one has a link
_BOXES = ("border", "box_keys", "tile_boxes")
USUAL_PAGE = 64  # keys, where nobody says more
LEAST_BOX = 32  # of a usual page
_LONGEST = 2**31 - 2**14  # keys, so that the end of a tile that they begin is an int, too


def with_page_files(tiles: tuple[str, ...]) -> tuple[str, ...]:
    """Files of tile operations, with those of caches, and the producer that takes keys from pages in place of the other one."""
    after = tiles.index("common/score_chain") + 1
    others = ("warpgroup/cached_producer" if name == "warpgroup/forward_producer" else name for name in tiles[after:])
    return (*tiles[:after], *_TILES, *others)


def cached_modifier_reasons(problem: Problem) -> list[str]:
    """Why these kernels do not compute a cache with its modifiers."""
    others = [kind for kind in map(kind_of, problem.modifiers) if kind not in MODIFIERS] if problem.is_cached else []
    rule = f"modifiers must be of {', '.join(MODIFIERS)} with sequences in a cache, as others count keys from the first one"
    return [f"{rule}; got {', '.join(others)}"] if others else []


def cache_reasons(workload: Workload) -> list[str]:
    """Why these kernels do not take a cache of such sizes."""
    reasons = page_reasons(workload)
    if workload.len_kv > _LONGEST:
        reasons.append(f"len_kv must be at most {_LONGEST} keys that a sequence has room for; got {workload.len_kv}")
    return reasons


def page_block(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The parameters, with those of a cache and of boxes where there is one."""
    if not problem.is_cached:
        return block
    more = (Parameter("u64", "border_reciprocal"), *(Parameter("int", name) for name in ("batch", "heads_q", *_BOXES)))
    return sequence_block(block).with_fields(*more)


def page_values(call: Call, block_kv: int) -> dict[str, int | float]:
    """Their numbers."""
    w = call.workload
    keys = box_keys(w, block_kv)
    border = keys if w.table_pages > 1 else 1
    boxes = {"border": border, "border_reciprocal": reciprocal(border), "box_keys": keys, "tile_boxes": block_kv // keys}
    return {**sequence_values(call), "batch": w.batch, "heads_q": w.heads_q, **boxes}


def paged_config(config: AttentionForwardSm90Config) -> AttentionForwardSm90Config:
    """A config that is good for dense sequences, for a cache: work tiles are claimed, and boxes are not too small."""
    odd = config.block_kv % LEAST_BOX if config.block_kv > 2 * LEAST_BOX else 0
    return replace(config, scheduler=Scheduler.DYNAMIC, block_kv=config.block_kv - odd)


def tile_boxes(problem: Problem, workload: Workload, block_kv: int) -> int:
    """Boxes of a key tile, of usual pages where a workload has none, as a bucket; 0 without a cache."""
    if not problem.is_cached:
        return 0
    return block_kv // (box_keys(workload, block_kv) if workload.page_size else common_divisor(block_kv, USUAL_PAGE))
