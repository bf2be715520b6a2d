"""The three launches of a backward pass by `mma.sync`: the row statistics with dQ = 0, the gradients, and dQ rounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flashgen.codegen.attention import float32, padded, reciprocal, scale_values
from flashgen.codegen.modifier import modifier_values, score_unit
from flashgen.codegen.operands import Call
from flashgen.codegen.program import Buffer, KernelLaunch, KernelText, Program, Waits
from flashgen.codegen.seen_tiles import NO_TILES, TileLaunch, tile_kernels
from flashgen.codegen.tensor_gradients import gradient_buffers, gradient_kernels, gradient_launches

STRIDED = ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")


def gradient_program(
    kernels: Iterable[KernelText],
    call: Call,
    counts: Mapping[str, int],
    blocks: int,
    block_q: int,
    waits: Waits = Waits.NOBODY,
    more: Iterable[Buffer] = (),
    seen: TileLaunch = NO_TILES,
) -> Program:
    """The program of a call.

    counts: query_tiles and key_tiles of a head, l2_group_heads and l2_group_tiles; blocks: of the gradients' kernel; block_q: queries of a
    tile; waits: for whom those blocks wait; more: buffers beside what all such programs have; seen: what comes first
    """
    problem, w, scale = call.problem, call.workload, call.scalars["scale"]
    heads = {"heads_q": w.heads_q, "heads_kv": w.heads_kv, "group": w.heads_q // w.heads_kv}
    known: dict[str, int | float] = {**heads, **counts}
    known |= {f"{name}_reciprocal": reciprocal(divisor) for name, divisor in (heads | dict(counts)).items()}
    known |= {"len_q": w.len_q, "len_kv": w.len_kv, **scale_values(score_unit(call)), "scale": float32(scale)}
    known |= {**modifier_values(call), **seen.values}
    for name in STRIDED:
        *batch, row, head, _ = call.views[name].strides
        known |= {f"{name}_batch": batch[0] if batch else 0, f"{name}_head": head, f"{name}_row": row}
    known["tokens_q"] = w.tokens_q
    tiles = (1 if problem.is_packed else w.batch) * w.heads_q * counts["query_tiles"]
    others = (*tile_kernels(problem), *gradient_kernels(problem))
    launches = (
        KernelLaunch(
            tiles if kernel.suffix else blocks,
            kernel.parameters.values_of(known),
            suffix=kernel.suffix,
            waits=Waits.NOBODY if kernel.suffix else waits,
        )
        for kernel in kernels
        if kernel not in others
    )
    rows = 4 * tiles * block_q  # bytes of one number for each
    sizes = dict.fromkeys(("row_lse", "row_delta", "row_shift"), rows)
    sizes |= {"huge_tiles": 4 * tiles, "d_q_sum": rows * padded(problem.head_dim)}
    buffers = (*(Buffer(name, size) for name, size in sizes.items()), *more, *gradient_buffers(call), *seen.buffers)
    return Program((*seen.launches, *launches, *gradient_launches(call, buffers)), buffers)
