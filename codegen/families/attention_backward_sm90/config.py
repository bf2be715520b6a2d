"""What may be chosen of the Hopper backward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config, tagged


@dataclass(frozen=True)
class AttentionBackwardSm90Config(Config):
    """What may be chosen freely.

    block_q:     query rows of a tile (Br in the paper), a multiple of 16. With 128 each warpgroup computes dQ of 64 of them, else dQ is
                 transposed and each has half of its columns
    stages:      tiles of Q, and of dO, that shared memory holds
    split:       begin the product of dQ before that of dV is done, so that adding up dQ hides behind more. It needs more registers
    """

    block_q: int = tagged("bq")
    stages: int = tagged("s", 2)
    split: bool = tagged("sp", False)

    @property
    def transposes_d_q(self) -> bool:
        """Whether dQ is computed as K^T dS^T."""
        return self.block_q != 128
