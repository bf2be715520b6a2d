"""Softmax of each tile of columns by itself, which is wrong: the control that shows what the rescaling of online softmax is for."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged
from flashgen.codegen.problem import Problem
from flashgen.codegen.softmax import SoftmaxFamily
from flashgen.codegen.target import Target


@dataclass(frozen=True)
class SoftmaxTilewiseConfig(Config):
    """What may be chosen freely.

    warps:   warps of a block, a power of two
    unroll:  columns that a lane loads before it uses them, a power of two
    tile:    columns that are normalised by themselves
    """

    warps: int = tagged("w", 8)
    unroll: int = tagged("u", 4)
    tile: int = tagged("t", 128)


class SoftmaxTilewise(SoftmaxFamily):
    """See the module's docstring; the algorithm is templates/kernels/softmax_tilewise.cu.j2."""

    name = "softmax_tilewise"
    revision = 2
    template = "kernels/softmax_tilewise.cu.j2"
    config_type = SoftmaxTilewiseConfig
    passes = 3
    correct = False

    def check(self, problem: Problem, config: SoftmaxTilewiseConfig, target: Target) -> list[str]:
        """See Family."""
        reasons = super().check(problem, config, target)
        if not 1 <= config.tile < 2**24:
            reasons.append(f"tile must be from 1 to {2**24 - 1}; got {config.tile} (nearest: {min(max(1, config.tile), 2**24 - 1)})")
        return reasons


FAMILY = SoftmaxTilewise()
