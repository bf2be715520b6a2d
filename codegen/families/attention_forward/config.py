"""What may be chosen of the generic forward kernel."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged


class QueryPlace(enum.Enum):
    """Where a block keeps its query tile while it walks over the keys."""

    SHARED = "shared"
    REGISTERS = "registers"


class FirstProduct(enum.Enum):
    """Which of its two products a step issues first for each chunk of keys: S = Q K^T of the next step, or O += P V of this one."""

    QK = "qk"
    PV = "pv"


@dataclass(frozen=True)
class AttentionForwardConfig(Config):
    """What may be chosen freely.

    block_q:        query rows of a block (Br in the paper); a multiple of 16 * warps, 16 or 32 rows a warp
    block_kv:       key rows of a tile (Bc in the paper), a multiple of step_kv: what is loaded at once
    step_kv:        keys of a step, a multiple of 16: their scores are computed while those of the step before are used
    warps:          warps of a block; each owns block_q / warps rows
    stages:         tiles of K, and of V, that shared memory holds: stages - 1 tiles are loaded ahead
    query:          where Q is read from: shared memory at each use, or registers that hold it
    first_product:  the product that a step issues first: Q K^T of the next keys, or P V of these. Alike in principle; but near the limit
                    of the registers the compiler spills with the one and not with the other
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    """

    block_q: int = tagged("bq")
    block_kv: int = tagged("bk")
    step_kv: int = tagged("sk")
    warps: int = tagged("w")
    stages: int = tagged("s")
    query: QueryPlace = tagged("q")
    first_product: FirstProduct = tagged("f", FirstProduct.QK)
    blocks_per_sm: int = tagged("bps", 1)
