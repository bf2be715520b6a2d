"""What may be chosen of the kernels of standard attention."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged


@dataclass(frozen=True)
class StandardAttentionConfig(Config):
    """What may be chosen freely.

    block_q:        query rows of a block of both products, 16 or 32 for each of its warps
    block_kv:       keys of a tile of both products, a multiple of 16
    warps:          warps of a block of both products; each owns block_q / warps rows
    stages:         tiles that shared memory holds: stages - 1 tiles are loaded ahead
    blocks_per_sm:  blocks of a product that must fit on one SM at once: caps the registers
    softmax_warps:  warps of a block of the softmax, a power of two; they share one long row, or take several short ones
    row_scores:     scores of a row that a thread of the softmax holds in registers, a multiple of 4. A row that has more than
                    softmax_warps * 32 * row_scores scores is read three times
    """

    block_q: int = tagged("bq", 128)
    block_kv: int = tagged("bk", 64)
    warps: int = tagged("w", 4)
    stages: int = tagged("s", 2)
    blocks_per_sm: int = tagged("bps", 1)
    softmax_warps: int = tagged("sw", 8)
    row_scores: int = tagged("rs", 32)
