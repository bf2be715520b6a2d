"""What may be chosen of the persistent Hopper backward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.codegen.config import Config, tagged


@dataclass(frozen=True)
class AttentionBackwardPersistentSm90Config(Config):
    """What may be chosen freely.

    block_q:     query rows of a tile (Br in the paper), a multiple of 16. With 128 each warpgroup computes dQ of 64 of them, else dQ is
                 transposed and each has half of its columns
    stages:      tiles of Q, and of dO, that shared memory holds
    sum_stages:  parts of a tile's sum of dQ that shared memory holds on their way to be rounded
    """

    block_q: int = tagged("bq")
    stages: int = tagged("s", 2)
    sum_stages: int = tagged("ss", 8)
    split: ClassVar[bool] = False

    @property
    def transposes_d_q(self) -> bool:
        """Whether dQ is computed as K^T dS^T."""
        return self.block_q != 128
