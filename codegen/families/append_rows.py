"""Appends to a cache, and rotates, with a thread for 16 bytes of the rows of some heads: there is nothing to share between threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashgen.codegen.attention import ELEMENTS, reciprocal
from flashgen.codegen.config import Config, range_reasons, tagged
from flashgen.codegen.devices import Device
from flashgen.codegen.e4m3 import e4m3_block, e4m3_reasons, e4m3_values
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, KernelLaunch, KernelText, Program
from flashgen.codegen.sizes import whole
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

MAX_CHUNKS = 2**31 - 2**16  # of all rows: a kernel counts them in an int, its last block some more
_CHUNK = 8  # elements
_SM_THREADS = 1024  # that an SM is to have before each has more heads
# By heads of a thread, measured on an H200: seconds of a launch with hardly anything to do, chunks of an SM that take no longer, because
# their threads wait for memory together, and how much of its bandwidth is used from there on.
_LAUNCH_SECONDS = {1: 2.0e-6, 2: 2.05e-6, 4: 2.25e-6, 8: 3.0e-6}
_EFFICIENCY = {1: 0.52, 2: 0.67, 4: 0.70, 8: 0.71}
_HIDDEN_CHUNKS = {1: 400, 2: 800, 4: 1200, 8: 1200}
_HEADS = tuple(_EFFICIENCY)
_OUTER = {  # parameters for the strides of an operand but its last, in the order of its axes
    **{name: (f"{name}_page", f"{name}_row", f"{name}_head") for name in ("k_cache", "v_cache")},
    **{name: (f"{name}_batch", f"{name}_row", f"{name}_head") for name in ("k_new", "v_new", "q", "q_rotated")},
}
_CACHES = "k_cache", "v_cache"
_OF_CACHES = tuple(name for cache in _CACHES for name in _OUTER[cache])
_TABLES = "rotary_cos", "rotary_sin"


@dataclass(frozen=True)
class AppendRowsConfig(Config):
    """What may be chosen freely.

    threads: of a block, a multiple of 32
    heads:   of a token, that a thread has at most, a power of two; it has fewer where threads would else not fill the GPU
    """

    threads: int = tagged("t", 128)
    heads: int = tagged("h", 1)


class AppendRows(Family):
    """See the module's docstring; the algorithm is templates/kernels/append_rows.cu.j2."""

    name = "append_rows"
    revision = 2
    operation = "append"
    template = "kernels/append_rows.cu.j2"
    config_type = AppendRowsConfig
    atoms = ("types", "index", "cvt", "cvt_f32", "mul", "griddepcontrol")
    tiles = ("common/tile_scheduler", "common/element_16bit", "common/rotary", "common/appended_rows")
    parameters = ParameterBlock(
        (
            *(Parameter("Element*", name) for name in ("k_cache", "v_cache")),
            *(Parameter("const Element*", name) for name in ("k_new", "v_new", "q")),
            Parameter("Element*", "q_rotated"),
            *(Parameter("const Element*", name) for name in _TABLES),
            *(Parameter("const float*", f"{name}_fp32") for name in _TABLES),
            *(Parameter("const int*", name) for name in ("cache_seqlens", "block_table")),
            Parameter("int*", "lengths"),
            *(Parameter("i64", name) for names in _OUTER.values() for name in names),
            Parameter("i64", "table_batch"),
            *(Parameter("u64", f"{name}_reciprocal") for name in ("groups_q", "groups_kv", "len_q", "new_keys", "page_size")),
            *(
                Parameter("int", name)
                for name in ("batch", "heads_q", "heads_kv", "groups_q", "groups_kv", "thread_heads", "len_q", "new_keys")
            ),
            *(Parameter("int", name) for name in ("pages", "page_size", "table_pages")),
            *(Parameter("int", f"{name}_threads") for name in ("key", "value", "query")),
            *(Parameter("int", name) for name in ("rotary_dim", "rotary_positions", "rotary_interleaved", "rotary_by_query")),
        )
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        if problem.operation != self.operation:
            return [f"pass must be {self.operation}; got {problem.operation}"]
        reasons = []
        if problem.dtype not in ELEMENTS:
            reasons.append(f"dtype must be {' or '.join(dtype.value for dtype in ELEMENTS)}; got {problem.dtype.value}")
        for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if width % _CHUNK or not _CHUNK <= width <= 256:
                nearest = min(max(_CHUNK, -(-width // _CHUNK) * _CHUNK), 256)
                reasons.append(f"{name} must be a multiple of {_CHUNK} from {_CHUNK} to 256; got {width} (nearest: {nearest})")
        if problem.mask is not Mask.FULL:
            reasons.append(f"mask must be full for {self.operation}, which has none; got {problem.mask.value}")
        if not problem.is_cached:
            reasons.append(f"sequences must be cached for {self.operation}; got {problem.sequences.value}")
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons + e4m3_reasons(problem, target)

    def kernels(self, problem: Problem, config: AppendRowsConfig) -> tuple[KernelText, ...]:
        """See Family."""
        return (KernelText(e4m3_block(self.parameters, problem, _CACHES)),)

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        return (self.atoms if problem.dtype_kv is None else (*self.atoms, "cvt_e4m3")), self.tiles

    def check(self, problem: Problem, config: AppendRowsConfig, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target) + range_reasons(config, (("threads", 32, 1024, 32),))
        if config.heads not in _HEADS:
            nearest = min(_HEADS, key=lambda heads: abs(heads - config.heads))
            reasons.append(f"heads must be a power of two from {_HEADS[0]} to {_HEADS[-1]}; got {config.heads} (nearest: {nearest})")
        return reasons

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family."""
        for threads, heads in itertools.product((64, 128, 256), (1, 2, 4, 8)):
            yield AppendRowsConfig(threads, heads)

    def default(self, problem: Problem, target: Target) -> Config:
        """See Family."""
        self.require_legal(problem, config := AppendRowsConfig(), target)
        return config

    def context(self, problem: Problem, config: AppendRowsConfig, target: Target) -> dict[str, object]:
        """See Family. Launches overlap from sm_90 on."""
        return {"element": ELEMENTS[problem.dtype], "overlaps": target.capability >= (9, 0)}

    def resources(self, problem: Problem, config: AppendRowsConfig) -> Mapping[str, BlockResources]:
        """See Family."""
        return {"": BlockResources(config.threads, 0)}

    def call_refusals(self, call: Call, config: Any = None) -> list[str]:
        """See Family."""
        reasons = super().call_refusals(call, config)
        if (chunks := sum(_threads(call.problem, call.workload, 1))) > MAX_CHUNKS:
            reasons.append(f"k, v and q must have at most {MAX_CHUNKS * _CHUNK} elements in all; got {chunks * _CHUNK}")
        return reasons

    def program(self, config: AppendRowsConfig, call: Call, device: Device) -> Program:
        """See Family. The first block writes lengths; the others have threads for all chunks of keys, values and queries."""
        w, scalars = call.workload, call.scalars
        if not w.batch:
            return Program(())
        heads = _heads_of_threads(call.problem, w, config, device)
        of_keys, of_values, of_queries = _threads(call.problem, w, heads)
        groups_q, groups_kv = -(-w.heads_q // heads), -(-w.heads_kv // heads)
        values: dict[str, int | float] = {  # written out: each call of a new length makes one
            "batch": w.batch,
            "heads_q": w.heads_q,
            "heads_kv": w.heads_kv,
            "groups_q": groups_q,
            "groups_kv": groups_kv,
            "thread_heads": heads,
            "len_q": w.len_q,
            "new_keys": w.new_keys,
            "pages": w.pages,
            "page_size": w.page_size,
            "table_pages": w.table_pages,
            "groups_q_reciprocal": reciprocal(groups_q or 1),
            "groups_kv_reciprocal": reciprocal(groups_kv or 1),
            "len_q_reciprocal": reciprocal(w.len_q or 1),
            "new_keys_reciprocal": reciprocal(w.new_keys or 1),
            "page_size_reciprocal": reciprocal(w.page_size or 1),
            "key_threads": of_keys,
            "value_threads": of_values,
            "query_threads": of_queries,
            "table_batch": call.views["block_table"].strides[0],
            "rotary_dim": whole(scalars["rotary_dim"]),
            "rotary_positions": whole(scalars["rotary_positions"]),
            "rotary_interleaved": whole(scalars["rotary_interleaved"]),
            "rotary_by_query": whole(scalars["rotary_by_query"]),
        }
        for tensor, (first, row, head) in _OUTER.items():
            values[first], values[row], values[head], _ = call.views[tensor].strides
        values = e4m3_values(values, call, _OF_CACHES)
        return Program((KernelLaunch(1 - (-(of_keys + of_values + of_queries) // config.threads), values),))

    def traffic(self, problem: Problem, config: AppendRowsConfig, workload: Workload, device: Device) -> Traffic:
        """See Family. Without tables of a rotation, and without pages: rows once each way, and lengths."""
        moved = _CHUNK * problem.dtype.bytes * sum(_threads(problem, workload, 1)) + 4 * workload.batch
        return Traffic(moved, moved)

    def predict(
        self, problem: Problem, config: AppendRowsConfig, workload: Workload, device: Device, registers: int | None = None
    ) -> Prediction:
        """See Family. The bucket of a workload has no new keys: there are as many as queries then."""
        if not workload.batch or not (workload.new_keys or workload.len_q):
            return Prediction(0.0, "nothing")
        w = workload if workload.new_keys else replace(workload, new_keys=workload.len_q)
        heads = _heads_of_threads(problem, w, config, device)
        chunks = max(0, sum(_threads(problem, w, 1)) - _HIDDEN_CHUNKS[heads] * device.sm_count)
        moved = 2 * chunks * _CHUNK * problem.dtype.bytes
        seconds = _LAUNCH_SECONDS[config.heads] + moved / (_EFFICIENCY[heads] * device.memory_bandwidth)
        return Prediction(seconds * (1.0 + 0.01 * abs(config.threads - 128) / 128), "memory" if moved else "latency")


def _heads_of_threads(problem: Problem, workload: Workload, config: AppendRowsConfig, device: Device) -> int:
    """Of a token, that a thread has: one, until there are more threads than the SMs are to have."""
    heads = 1
    while heads < config.heads and sum(_threads(problem, workload, heads)) > _SM_THREADS * device.sm_count:
        heads *= 2
    return heads


def _threads(problem: Problem, workload: Workload, heads: int) -> tuple[int, int, int]:
    """That keys, values and queries have, each for a chunk of the rows of so many heads."""
    w = workload
    appended, queries = w.batch * w.new_keys * -(-w.heads_kv // heads), w.batch * w.len_q * -(-w.heads_q // heads)
    of_keys, of_values = problem.head_dim // _CHUNK, problem.head_dim_v // _CHUNK
    return appended * of_keys, appended * of_values, queries * of_keys


FAMILY = AppendRows()
