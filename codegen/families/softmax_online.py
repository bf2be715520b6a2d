"""Softmax in two passes, by a running maximum and a running sum.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3: the step that FlashAttention is built on.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged
from flashgen.codegen.softmax import SoftmaxFamily


@dataclass(frozen=True)
class SoftmaxOnlineConfig(Config):
    """What may be chosen freely.

    warps:   warps of a block, a power of two
    unroll:  columns that a lane loads before it uses them, a power of two
    """

    warps: int = tagged("w", 8)
    unroll: int = tagged("u", 4)


class SoftmaxOnline(SoftmaxFamily):
    """See the module's docstring; the algorithm is templates/kernels/softmax_online.cu.j2."""

    name = "softmax_online"
    revision = 2
    template = "kernels/softmax_online.cu.j2"
    config_type = SoftmaxOnlineConfig
    passes = 2
    tiles = (*SoftmaxFamily.tiles, "warp/running_softmax")


FAMILY = SoftmaxOnline()
