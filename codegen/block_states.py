"""What makes a block mask: a kernel that tells of each block of queries and keys how much of it a mask_mod lets queries see.

It comes about as kernels of attention do, as a family's, but computes no operation: nobody selects, tunes or records it. Its problem is one
of attention whose only modifier is the mask_mod; the element type and the head dim mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .config import Config, range_reasons, tagged
from .devices import Device
from .family import Family, Prediction
from .modifier import modifier_refusals, modifier_values, modifiers_of, with_modifiers
from .operands import Axis, Call
from .parameters import Parameter, ParameterBlock
from .problem import Dtype, Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText, Program
from .spec import KernelSpec
from .target import Target
from .workload import Workload

STATES = "block_states"
_MOST = 2**31 - 1  # blocks, of all batches and heads
_AXES = {"batch": Axis.BATCH, "heads": Axis.HEADS_Q}


@dataclass(frozen=True)
class BlockStatesConfig(Config):
    """What may be chosen freely.

    warps: of a block of threads; each looks at a block of queries and keys
    """

    warps: int = tagged("w", 8)


class BlockStates(Family):
    """See the module's docstring; the algorithm is templates/kernels/block_states.cu.j2."""

    name = "block_states"
    revision = 1
    template = "kernels/block_states.cu.j2"
    config_type = BlockStatesConfig
    automatic = False
    modifiers = ("traced",)
    atoms = (
        *("types", "register", "index", "shared_memory", "barrier"),
        *("cvt", "set_f16", "cvt_f32", "ex2", "rcp", "mul", "shfl_sync", "vote_sync"),
    )
    tiles = ("common/shared_regions", "common/score_chain", "common/block_states")
    parameters = ParameterBlock(
        (
            Parameter("unsigned char*", STATES),
            *(Parameter("int", name) for name in ("len_q", "len_kv", "block_q", "block_kv")),
            *(Parameter("int", name) for name in ("mask_blocks", "mask_heads", "mask_rows", "mask_columns")),
        )
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = []
        if len(problem.modifiers) != 1 or modifiers_of(problem)[0].scattered_by is None:
            reasons.append(f"modifiers must be a mask_mod alone; got {', '.join(problem.modifiers) or 'none'}")
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: BlockStatesConfig, target: Target) -> list[str]:
        """See Family."""
        return self.refusals(problem, target) + range_reasons(config, (("warps", 1, 32, 1),))

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family. There is nothing to choose from."""
        yield BlockStatesConfig()

    def default(self, problem: Problem, target: Target) -> Config:
        """See Family."""
        return BlockStatesConfig()

    def context(self, problem: Problem, config: BlockStatesConfig, target: Target) -> dict[str, object]:
        """See Family."""
        return {"causal": False}

    def kernels(self, problem: Problem, config: BlockStatesConfig) -> tuple[KernelText, ...]:
        """See Family."""
        return (KernelText(with_modifiers(self.parameters, problem)),)

    def resources(self, problem: Problem, config: BlockStatesConfig) -> Mapping[str, BlockResources]:
        """See Family."""
        return {"": BlockResources(config.warps * 32, 0)}

    def call_refusals(self, call: Call, config: Config | None = None) -> list[str]:
        """See Family."""
        (batches, heads, rows, columns) = states_shape(call)
        reasons = modifier_refusals(call)
        if (count := batches * heads * rows * columns) > _MOST:
            reasons.append(f"block_size must make at most {_MOST} blocks, over batch and heads; got {count}")
        return reasons

    def program(self, config: Any, call: Call, device: Device) -> Program:
        """See Family."""
        w, (batches, heads, rows, columns) = call.workload, states_shape(call)
        count = batches * heads * rows * columns
        values: dict[str, int | float] = {"len_q": w.len_q, "len_kv": w.len_kv}
        values |= {name: int(call.scalars[name]) for name in ("block_q", "block_kv")}
        values |= {"mask_blocks": count, "mask_heads": heads, "mask_rows": rows, "mask_columns": columns, **modifier_values(call)}
        return Program((KernelLaunch(-(-count // config.warps), values),), (Buffer(STATES, count),))

    def predict(
        self, problem: Problem, config: BlockStatesConfig, workload: Workload, device: Device, registers: int | None = None
    ) -> Prediction:
        """See Family. Nobody asks."""
        raise NotImplementedError(f"{self.name} computes no operation: there is no model of it")


BLOCK_STATES = BlockStates()


@cache
def states_problem(modifier: str) -> Problem:
    """The problem of a mask_mod, by the name of its modifier."""
    return Problem(Dtype.BF16, 8, modifiers=(modifier,))


def states_spec(problem: Problem, target: Target) -> KernelSpec:
    """The kernel of a mask_mod."""
    return KernelSpec(BLOCK_STATES, problem, BLOCK_STATES.default(problem, target), target)


def states_call(
    problem: Problem, batch: int, heads: int, lengths: tuple[int, int], block_size: tuple[int, int], numbers: Mapping[str, float]
) -> Call:
    """A call of the kernel. numbers: that the mask_mod captures, by the names that its modifier has for them."""
    of_q, of_kv = block_size
    return Call(problem, Workload(batch, heads, heads, *lengths), {}, {**numbers, "scale": 1.0, "block_q": of_q, "block_kv": of_kv})


def states_shape(call: Call) -> tuple[int, int, int, int]:
    """Of batches, heads, blocks of queries, blocks of keys: 1 of what the mask_mod does not look at, and of what there is none of."""
    w, axes = call.workload, modifiers_of(call.problem)[0].scattered_by or ()
    batches, heads = w.batch if Axis.BATCH in axes else 1, w.heads_q if Axis.HEADS_Q in axes else 1
    rows, columns = -(-w.len_q // int(call.scalars["block_q"])), -(-w.len_kv // int(call.scalars["block_kv"]))
    return batches, heads, max(1, rows), max(1, columns)


def differs_by(problem: Problem) -> tuple[str, ...]:
    """By which of batch and heads the mask_mod differs."""
    axes = modifiers_of(problem)[0].scattered_by or ()
    return tuple(name for name, axis in _AXES.items() if axis in axes)
