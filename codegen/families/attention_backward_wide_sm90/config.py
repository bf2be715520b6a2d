"""What may be chosen of the Hopper backward kernel for wide head dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.codegen.config import Config, tagged


@dataclass(frozen=True)
class AttentionBackwardWideSm90Config(Config):
    """What may be chosen freely.

    stages:  tiles of Q, and of dO, that shared memory holds
    """

    stages: int = tagged("s", 2)
    block_q: ClassVar[int] = 64  # query rows of a tile
    transposes_d_q: ClassVar[bool] = False
