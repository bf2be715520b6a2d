"""Softmax in three passes: maximum, sum, division. Each reads the row anew."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged
from flashgen.codegen.softmax import SoftmaxFamily


@dataclass(frozen=True)
class SoftmaxSafeConfig(Config):
    """What may be chosen freely.

    warps:   warps of a block, a power of two
    unroll:  columns that a lane loads before it uses them, a power of two
    """

    warps: int = tagged("w", 8)
    unroll: int = tagged("u", 4)


class SoftmaxSafe(SoftmaxFamily):
    """See the module's docstring; the algorithm is templates/kernels/softmax_safe.cu.j2."""

    name = "softmax_safe"
    revision = 2
    template = "kernels/softmax_safe.cu.j2"
    config_type = SoftmaxSafeConfig
    passes = 3


FAMILY = SoftmaxSafe()
