"""The kernels of attention_forward_sm90 before the main one, which find what it has to compute, where only the device knows that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flashgen.codegen import far_keys, packed, seen_tiles
from flashgen.codegen.devices import Device
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import BlockResources, Buffer, KernelLaunch, KernelText

from .config import AttentionForwardSm90Config


def front_kernels(problem: Problem, config: AttentionForwardSm90Config) -> tuple[KernelText, ...]:
    """In their order: lists of packed sequences, tiles that masks by a function leave, keys that are not too far to count."""
    far = far_keys.far_kernels(problem) if far_keys.leaves_out_far_keys(problem, config.pack_gqa) else ()
    return (*packed.packed_kernels(problem), *seen_tiles.tile_kernels(problem, orders=True), *far)


def front_resources(problem: Problem, config: AttentionForwardSm90Config) -> Mapping[str, BlockResources]:
    """What their blocks take."""
    far = far_keys.far_resources() if far_keys.leaves_out_far_keys(problem, config.pack_gqa) else {}
    return {**seen_tiles.tile_resources(problem, orders=True), **packed.packed_resources(problem), **far}


class Front(NamedTuple):
    """Of a call: their launches, their memory, what the main kernel is told, and whether it may begin while they are under way."""

    launches: tuple[KernelLaunch, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    values: dict[str, int | float] = {}  # noqa: RUF012  # nobody changes it
    overlaps: bool = False


NOTHING = Front()


def dense_front(config: AttentionForwardSm90Config, call: Call) -> Front:
    """Of sequences that are not packed."""
    if not call.problem.modifiers:
        return NOTHING
    if far_keys.leaves_out_far_keys(call.problem, config.pack_gqa):
        launches, buffers = far_keys.far_launch(call, config.queries)
        return Front(launches, buffers, overlaps=bool(launches))
    return Front(*_seen_tiles(config, call))


def packed_front(config: AttentionForwardSm90Config, call: Call, device: Device, l2_group_heads: int) -> Front:
    """Of packed sequences."""
    first, buffers = packed.packed_launch(call, config.queries, l2_group_heads, device, overlap=True)
    tiles = _seen_tiles(config, call) if call.problem.modifiers else seen_tiles.NO_TILES
    return Front((first, *tiles.launches), (*buffers, *tiles.buffers), tiles.values, overlaps=True)


def _seen_tiles(config: AttentionForwardSm90Config, call: Call) -> seen_tiles.TileLaunch:
    return seen_tiles.tile_launch(call, seen_tiles.TileShape(config.queries, config.block_kv), orders=True)
