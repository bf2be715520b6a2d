"""What a family needs for masks that hide keys of no range: the kernel that finds which tiles they leave, before the others.

Kernels then visit these tiles alone. See templates/tile/common/seen_tiles.cuh.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from .modifier import modifier_values, modifiers_of, opens_keys, with_modifiers
from .operands import Axis, Call
from .packed import LIST, most_key_tiles, most_tiles
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText

SUFFIX, ORDER_SUFFIX = "_tiles", "_order"
THREADS = 512
FEWEST_ORDERED, MOST_ORDERED = 16, 4096  # rows of a head whose tiles are handed out longest first; the most are 16 KB of shared memory
FLAG_BYTES = 32 * 4  # of shared memory: a flag for each tile of a word
WORD_BYTES, WORD_TILES = 8, 32  # TileWord
_WORDS = Parameter("u32*", "seen_tiles")
_OF_MAIN = (_WORDS, *(Parameter("int", name) for name in ("seen_batch", "seen_head", "seen_words")))
_OF_TILES = ParameterBlock((_WORDS, *(Parameter("int", name) for name in ("seen_rows", "seen_heads", "seen_words", "len_q", "len_kv"))))
_ORDER = Parameter("u32*", "tile_order")
_OF_ORDER = ParameterBlock((_WORDS, _ORDER, *(Parameter("int", name) for name in ("seen_rows", "seen_words"))))
_OF_LISTED_TILES = ParameterBlock((_WORDS, LIST, *(Parameter("int", name) for name in ("seen_rows", "seen_words"))))


class TileShape(NamedTuple):
    """Queries and keys of a tile, and whether key tiles are rows, as in the backward pass."""

    queries: int
    keys: int
    rows_are_keys: bool = False


@cache
def scatters(problem: Problem) -> bool:
    """Whether a modifier hides keys of no range."""
    return any(modifier.scattered_by is not None for modifier in modifiers_of(problem))


def word_bytes(problem: Problem, stages: int, words: int) -> int:
    """Of shared memory for what says which tiles are in a pipeline's stages: so many words for each."""
    return words * stages * 4 if scatters(problem) else 0


def block_reasons(problem: Problem, config: Any, block_kv: int | None = None) -> list[str]:
    """Why a mask in blocks cannot have tiles of these sizes: most blocks are of 128, and tiles that go beyond one are often seen in part.

    block_kv: where the config has none
    """
    queries, keys = config.block_q, block_kv or config.block_kv
    if not any(modifier.in_blocks for modifier in modifiers_of(problem)) or 128 % queries == 128 % keys == 0:
        return []
    return [f"tiles must divide 128 x 128 queries and keys with a mask in blocks; got {queries} x {keys}"]


@cache
def hiding(problem: Problem) -> Problem:
    """The problem with those of its modifiers alone that say which keys queries see: all that the kernel needs to know."""
    each = (modifier for modifier in modifiers_of(problem) if modifier.hides_keys or modifier.opens or modifier.scattered_by is not None)
    return replace(problem, modifiers=tuple(sorted(modifier.name for modifier in each)))


@cache
def _axes(problem: Problem) -> frozenset[Axis]:
    """By which rows of tiles differ. The ranges of a prefix differ by the entry of the batch."""
    found = {axis for modifier in modifiers_of(problem) for axis in modifier.scattered_by or ()}
    return frozenset(found | {Axis.BATCH} if opens_keys(problem) else found)


def tile_kernels(problem: Problem, orders: bool = False) -> tuple[KernelText, ...]:
    """The kernel, before all others, if there is one.

    orders: and another one, by which rows with most tiles come first; not of packed sequences
    """
    if not scatters(problem):
        return ()
    block = _OF_LISTED_TILES if problem.is_packed else _OF_TILES
    found = KernelText(with_modifiers(block, hiding(problem)), SUFFIX, "TilesParameters")
    return (found, KernelText(_OF_ORDER, ORDER_SUFFIX, "OrderParameters")) if orders and not problem.is_packed else (found,)


def tile_resources(problem: Problem, orders: bool = False) -> dict[str, BlockResources]:
    """What their blocks take."""
    if not scatters(problem):
        return {}
    others = {ORDER_SUFFIX: BlockResources(THREADS, MOST_ORDERED * 4)} if orders and not problem.is_packed else {}
    return {SUFFIX: BlockResources(THREADS, FLAG_BYTES), **others}


def with_seen_tiles(block: ParameterBlock, problem: Problem, orders: bool = False) -> ParameterBlock:
    """The parameters of a kernel that visits the tiles that are seen."""
    return _with_words(block, orders and not problem.is_packed) if scatters(problem) else block


@cache
def _with_words(block: ParameterBlock, orders: bool) -> ParameterBlock:
    return block.with_fields(*_OF_MAIN, *((_ORDER,) if orders else ()))


def tile_context(problem: Problem, shape: TileShape) -> dict[str, object]:
    """What templates are told: template arguments of `find_seen_tiles`, and threads of a block."""
    flags = ("true" if flag else "false" for flag in (shape.rows_are_keys, problem.deterministic))
    found = {"seen_tile": f"{shape.queries}, {shape.keys}, {', '.join(flags)}", "tiles_threads": THREADS}
    return {**found, "most_ordered": MOST_ORDERED}


class TileLaunch(NamedTuple):
    """Of a call: the launch of the kernel, its memory, and what the kernels behind it are told. Nothing of a call without such masks."""

    launches: tuple[KernelLaunch, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    values: dict[str, int | float] = {}  # noqa: RUF012  # nobody changes it


NO_TILES = TileLaunch()


def tile_launch(call: Call, shape: TileShape, orders: bool = False) -> TileLaunch:
    """See TileLaunch. orders: whether the kernels are those that `tile_kernels` has then."""
    problem, w = call.problem, call.workload
    if not scatters(problem):
        return NO_TILES
    if problem.is_packed:
        return _listed_tile_launch(call, shape)
    query_tiles, key_tiles = -(-w.len_q // shape.queries), -(-w.len_kv // shape.keys)
    rows, columns = (key_tiles, query_tiles) if shape.rows_are_keys else (query_tiles, key_tiles)
    rows = max(1, rows)  # a launch without keys writes zeros, for one tile of them
    axes, words = _axes(problem), max(1, -(-columns // WORD_TILES))
    batches, heads = w.batch if Axis.BATCH in axes else 1, w.heads_q if Axis.HEADS_Q in axes else 1
    values: dict[str, int | float] = {"seen_rows": rows, "seen_heads": heads, "seen_words": words, "len_q": w.len_q, "len_kv": w.len_kv}
    values |= modifier_values(call._replace(problem=hiding(problem)))
    kind = BufferKind.KEPT if _may_be_kept(problem) else BufferKind.CALL
    launch = KernelLaunch(batches * heads * rows * words, values, suffix=SUFFIX, finds=kind is BufferKind.KEPT)
    steps: dict[str, int | float] = {
        "seen_batch": heads * rows if batches > 1 else 0,
        "seen_head": rows if heads > 1 else 0,
        "seen_words": words,
    }
    found = TileLaunch((launch,), (Buffer(_WORDS.name, batches * heads * rows * words * WORD_BYTES, kind),), steps)
    if not orders or not FEWEST_ORDERED <= rows <= MOST_ORDERED:
        return found
    sizes: dict[str, int | float] = {"seen_rows": rows, "seen_words": words}
    ordering = KernelLaunch(batches * heads, sizes, suffix=ORDER_SUFFIX, finds=launch.finds)
    return TileLaunch((launch, ordering), (*found.buffers, Buffer(_ORDER.name, batches * heads * rows * 4, kind)), steps)


@cache
def _may_be_kept(problem: Problem) -> bool:
    """Whether all tensors by which tiles are found are of one modifier: then a block mask, if it is one, knows of all of them."""
    return sum(bool(modifier.tensors) for modifier in modifiers_of(hiding(problem))) == 1


def _listed_tile_launch(call: Call, shape: TileShape) -> TileLaunch:
    """Of packed sequences: a row for each tile that may be listed, with room for as many others as one sequence may have."""
    problem, w = call.problem, call.workload
    rows = most_key_tiles(w, shape.keys) if shape.rows_are_keys else most_tiles(w, shape.queries)
    across = -(-w.tokens_q // shape.queries) if shape.rows_are_keys else -(-w.tokens_kv // shape.keys)
    rows, words, heads = max(1, rows), max(1, -(-across // WORD_TILES)), w.heads_q if Axis.HEADS_Q in _axes(problem) else 1
    values: dict[str, int | float] = {"seen_rows": rows, "seen_words": words, **modifier_values(call._replace(problem=hiding(problem)))}
    steps: dict[str, int | float] = {"seen_batch": 0, "seen_head": rows if heads > 1 else 0, "seen_words": words}
    return TileLaunch(
        (KernelLaunch(heads * rows, values, suffix=SUFFIX),), (Buffer(_WORDS.name, heads * rows * words * WORD_BYTES),), steps
    )
