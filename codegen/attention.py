"""What launches of attention kernels have in common: the order in which query tiles are worked on, divisions by multiplying, the scale."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache

from .errors import ArgumentError, shown
from .family import Traffic
from .modifier import modifier_operands, modifiers_of
from .modifiers import kind_of
from .operands import Call
from .operation import operation_of
from .problem import Dtype, Mask, Problem
from .sizes import of_sizes
from .workload import Workload

MAX_L2_GROUP_HEADS = 1024
STATISTICS_BYTES = 4 + 4  # of a query's row_lse and row_delta
MIN_SCALE = 2.0**-126  # the smallest normal fp32 number
MAX_SCALE = float.fromhex("0x1.62e42ep127")  # the largest one whose product with log2(e) is one, too


TENSORS = ("q", "k", "v", "out")  # whose strides a caller may choose
ELEMENTS = {Dtype.BF16: "Bf16", Dtype.FP16: "Fp16"}  # what kernels call the types of their elements


_DENSE: Mapping[str, tuple[int, ...]] = {}


def attention_call(
    problem: Problem,
    workload: Workload,
    strides: Mapping[str, tuple[int, ...]] = _DENSE,
    scale: float | None = None,
    numbers: Iterable[tuple[str, float]] = (),
) -> Call:
    """A call of attention; `strides`: of operands that are not dense, as `Operation.call` takes them; scale: None for head_dim ** -0.5.

    numbers: of modifiers, by name
    """
    scalars = {"scale": problem.head_dim**-0.5 if scale is None else scale, **dict(numbers)}
    return operation_of(problem).call(problem, workload, strides, scalars)


def float32(value: float) -> float:
    """Rounded to fp32, as a kernel will see it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def reciprocal(divisor: int) -> int:
    """What `divide` in templates/tile/common/tile_scheduler.cuh multiplies with."""
    return 0 if divisor == 1 else -(-(2**64) // divisor)


def l2_group_heads(problem: Problem, workload: Workload, group_bytes: int) -> int:
    """Heads, over the whole batch, that share the L2 in a launch's L2 swizzle: see templates/tile/common/tile_scheduler.cuh.

    Their K and V take at most `group_bytes`. All groups are of one size, so it divides the number of heads. Without a mask query
    tiles are equally long, and one head a group reads K and V most often from the L2. Blocks that wait for others of their head
    (templates/tile/common/semaphore.cuh) lose the least time where those of other heads are between them.
    """
    if problem.mask is Mask.FULL and not problem.deterministic:
        return 1
    return heads_that_fit(problem, workload, workload.len_kv, group_bytes)


def heads_that_fit(problem: Problem, workload: Workload, keys: int, group_bytes: int, most: int = MAX_L2_GROUP_HEADS) -> int:
    """Heads of a group, at least 1 and at most so many, of which K and V of so many keys take at most `group_bytes`: a divisor of all."""
    heads = workload.batch * workload.heads_q
    bytes_of_head = keys * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    fitting = group_bytes * (workload.heads_q // workload.heads_kv) // max(1, bytes_of_head)
    return largest_divisor(heads, max(1, min(fitting, heads, most)))


@of_sizes
@lru_cache(maxsize=2**12)
def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor that is no larger than `limit`."""
    return next(n for n in range(limit, 0, -1) if number % n == 0)


def require_scale(scale: float) -> None:
    """Raises ArgumentError unless a kernel can multiply scores by `scale` in fp32, and in base 2. Works on the numbers of a tracer."""
    if not MIN_SCALE <= scale <= MAX_SCALE:
        given = shown(scale) if isinstance(scale, int) else float(scale)  # not every int has a float
        raise ArgumentError(
            f"scale must be from {MIN_SCALE:.5g} to {MAX_SCALE:.5g}, so that it is normal in fp32 and finite times log2(e); got {given}"
        )


def scale_values(scale: float) -> dict[str, float]:
    """scale_log2, ln2_hi, ln2_lo: scores times the first are base-2 logarithms, and the other two turn those back into scaled scores.

    The scale is an fp32 number, as in plain PyTorch, which multiplies fp32 scores by it: lse is that of the same scaled scores.
    Raises ArgumentError as `require_scale` does.
    """
    return dict(_scale_values(scale))


@lru_cache(maxsize=2**10)
def _scale_values(scale: float) -> tuple[tuple[str, float], ...]:
    require_scale(scale)
    scale = float32(scale)
    scale_log2 = float32(scale * math.log2(math.e))
    ln2_hi = scale / scale_log2
    return ("scale_log2", scale_log2), ("ln2_hi", ln2_hi), ("ln2_lo", ln2_hi - float32(ln2_hi))


def visits(problem: Problem, workload: Workload, block_q: int, block_kv: int, least: int = 0) -> Iterator[tuple[int, int, int]]:
    """For each query tile of a head: its queries, and the key tiles and keys that it meets: those that some of its queries see.

    least: key tiles that it meets even if none of its queries sees any
    """
    len_q, len_kv, offset = workload.len_q, workload.len_kv, workload.len_kv - workload.len_q
    right = min(workload.window_right, 0) if problem.mask is Mask.CAUSAL else workload.window_right
    chunk = workload.chunk
    for first in range(0, len_q, block_q):
        position, last = first + offset, first + offset + block_q - 1
        end_key = min(last + right, last // chunk * chunk + chunk - 1) + 1
        end = max(least, -(-min(len_kv, max(0, end_key)) // block_kv))
        begin = min(max(0, position - workload.window_left, position // chunk * chunk) // block_kv, end - least)
        yield min(block_q, len_q - first), end - begin, max(0, min(end * block_kv, len_kv) - begin * block_kv)


@lru_cache(maxsize=2**12)
def local_steps(problem: Problem, workload: Workload, block_q: int, block_kv: int) -> tuple[float, int]:
    """Key tiles that all query tiles of a head meet, where attention is local, and those of the one that meets most.

    At least one each, as kernels have for a tile that sees no key. Beyond 4096 tiles an estimate.
    """
    tiles = -(-workload.len_q // block_q)
    if tiles > 4096:
        each = workload.visible_pairs(problem.mask) / max(1, workload.len_q)
        most = -(-workload.len_kv // block_kv)
        mean = min(float(most), (each + block_q + block_kv) / block_kv)
        return tiles * max(1.0, mean), max(1, math.ceil(mean))
    met = [tiles for _, tiles, _ in visits(problem, workload, block_q, block_kv, least=1)]
    return float(sum(met)), max(met, default=1)


def tiled_traffic(problem: Problem, workload: Workload, block_q: int, block_kv: int, heads: int = 1, least: int = 0) -> Traffic:
    """Where query tiles are outside and O stays on the SM: a tile reads its queries, K and V of the keys that they see, and writes its O.

    block_q: queries of a tile, each of `heads` query heads that share K and V; least: see `visits`.
    """
    d, dv, element = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    sets = workload.batch * workload.heads_q // heads
    read = sum(heads * queries * d + keys * (d + dv) for queries, _, keys in visits(problem, workload, block_q, block_kv, least))
    return Traffic(sets * read * element, sets * heads * workload.len_q * dv * element)


def gradient_traffic(
    problem: Problem, workload: Workload, block_q: int, block_kv: int, *, flag_bytes: int = 0, readers: int = 1
) -> Traffic:
    """A backward pass by key tiles outside and query tiles inside, with kernels before and after it; what is added to dQ is `reduced`.

    First O, dO and lse are read once, row_lse, row_delta and dQ = 0 written for whole tiles. Then a key tile reads its K and V once and, of
    each query tile that sees it, of all heads that share its keys, Q, dO and whole tiles of row_lse and row_delta; it adds to the whole
    tile's dQ, and writes its dK and dV. At last dQ is read, and written in the elements' type.

    Left out: d_lse; rows of O and dO that are read again in place of those past the end; lse once more, which tells of huge rows; row_shift
    and what is computed of huge rows and of few keys (exact_rows.cuh); counters and semaphores.

    flag_bytes: that row_lse of a tile has beside its rows, to tell of huge rows
    readers: blocks among which the keys of a tile are divided, each of which reads all of Q, dO and their statistics
    """
    d, dv, element, w = problem.head_dim, problem.head_dim_v, problem.dtype.bytes, workload
    met = [(queries, tiles) for queries, tiles, _ in visits(problem, w, block_q, block_kv)]
    query_tiles, sums = max(1, len(met)), block_q * padded(d) * 4  # without queries there is a tile of zeros to write
    statistics = block_q * STATISTICS_BYTES + flag_bytes  # of a tile
    steps = sum(tiles for _, tiles in met)
    visited = readers * (sum(queries * tiles for queries, tiles in met) * (d + dv) * element + steps * statistics)
    read = w.len_q * (2 * dv * element + 4) + visited + query_tiles * sums
    written = query_tiles * (statistics + sums) + w.len_q * d * element
    heads, keys = w.batch * w.heads_q, w.batch * w.heads_kv * w.len_kv * (d + dv) * element
    return Traffic(heads * read + keys, heads * written + keys, heads * steps * sums)


def problem_reasons(
    problem: Problem,
    operation: str,
    taken: Collection[str] = (),
    packed: bool = False,
    cached: bool = False,
    invariant: bool = False,
    e4m3: bool = False,
) -> list[str]:
    """Why no kernel of attention's pass `operation` computes a problem: it is another's, or its dtype or head dims are illegal.

    Head dims must be multiples of 8, the elements that a copy of 16 bytes has, up to 256. `taken`: modifiers that the kernels have;
    packed, cached: whether they compute packed sequences, and those of caches; invariant: whether they can be `batch_invariant`;
    e4m3: whether elements of caches may be e4m3.
    """
    if problem.operation != operation:
        return [f"pass must be {operation}; got {problem.operation}"]
    reasons = []
    if problem.dtype not in ELEMENTS:
        reasons.append(f"dtype must be {' or '.join(dtype.value for dtype in ELEMENTS)}; got {problem.dtype.value}")
    for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if width % 8 or not 8 <= width <= 256:
            nearest = min(max(8, -(-width // 8) * 8), 256)
            reasons.append(f"{name} must be a multiple of 8 from 8 to 256; got {width} (nearest: {nearest})")
    if (problem.is_packed and not packed) or (problem.is_cached and not cached):
        allowed = " or ".join(["dense", *(["packed"] if packed else []), *(["cached"] if cached else [])])
        reasons.append(f"sequences must be {allowed} in these kernels; got {problem.sequences.value}")
    if problem.dtype_kv is not None and not e4m3:
        reasons.append(f"dtype_kv must be None in these kernels, as k and v have q's dtype; got {problem.dtype_kv.value}")
    if problem.batch_invariant and not invariant:
        reasons.append("batch_invariant must be False in these kernels, whose order of summation depends on sizes; got True")
    shared = Counter(operand.name for operand in modifier_operands(problem))
    if twice := [name for name, count in shared.items() if count > 1]:
        reasons.append(f"modifiers must have {', '.join(twice)} once; got {', '.join(problem.modifiers)}")
    if others := [name for name in map(kind_of, problem.modifiers) if name not in taken]:
        allowed = f"of {', '.join(taken)}" if taken else "none"
        reasons.append(f"modifiers must be {allowed} in these kernels; got {', '.join(others)}")
    if any(one.bends_scores for one in modifiers_of(problem)) and "alibi" in problem.modifiers:
        reasons.append("score_mod must only add to the score beside alibi_slopes, which come behind it; got one that does more")
    return reasons


def padded(columns: int) -> int:
    """Columns as the matrix product takes them: a multiple of 16."""
    return -(-columns // 16) * 16
