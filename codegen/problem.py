"""What the caller asks for: `Problem` (compile-time facts of the attention) and `Workload` (sizes known at launch)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NoReturn

from .errors import ArgumentError, choice_error, require_int
from .plain import named
from .typed import require_field_types, require_type

_MOST = 2**31 - 1  # of any size: what an int of a kernel holds


class _Choice(enum.Enum):
    """An enum whose error for another value is ours."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise choice_error(cls.__name__.lower(), value, (member.value for member in cls))


class Pass(_Choice):
    """Which pass of attention."""

    FORWARD = "forward"


class Dtype(_Choice):
    """Element type of q, k, v and out. Accumulation and softmax are always fp32."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return 2

    @classmethod
    def parse(cls, text: str) -> Dtype:
        """Accepts 'bf16', 'bfloat16', 'fp16', 'float16', 'half'."""
        require_type("dtype", text, str)
        aliases = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
        return cls(aliases.get(text, text))


class Mask(_Choice):
    """Which keys a query may see. CAUSAL is aligned bottom-right: key j is seen by query i iff j <= i + len_kv - len_q."""

    FULL = "full"
    CAUSAL = "causal"


@dataclass(frozen=True)
class Problem:
    """Compile-time facts of the attention asked for.

    `head_dim` is the width of q and k, `head_dim_v` the width of v and out (None stands for `head_dim`), in elements.
    What a family can do with a problem is the family's to say; here only what no attention kernel could mean is refused.
    """

    dtype: Dtype
    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]  # __post_init__ puts a number here
    mask: Mask = Mask.FULL
    direction: Pass = field(default=Pass.FORWARD, metadata=named("pass", first=True))

    def __post_init__(self) -> None:
        require_int("head_dim", self.head_dim, 1, _MOST)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        require_int("head_dim_v", self.head_dim_v, 1, _MOST)
        require_field_types(self)

    @property
    def name(self) -> str:
        """For people and file names, for example 'bf16_d64_causal' or 'fp16_d192x128_full'."""
        width = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        return f"{self.dtype.value}_{width}_{self.mask.value}"


@dataclass(frozen=True, order=True)
class Workload:
    """Sizes known at launch: batch, query heads, key/value heads, query length, key/value length.

    `heads_q` is a multiple of `heads_kv` (grouped-query attention). Any of the sizes may be 0.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "len_q", "len_kv"):
            require_int(name, getattr(self, name), 0, _MOST)
        if self.heads_q and (not self.heads_kv or self.heads_q % self.heads_kv):
            raise ArgumentError(f"heads_q must be a multiple of heads_kv; got heads_q {self.heads_q}, heads_kv {self.heads_kv}")

    @property
    def name(self) -> str:
        """For people, for example 'B4 H32/8 S4096' or 'B1 H32 S1x4096'."""
        heads = f"H{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        lengths = f"S{self.len_q}" + (f"x{self.len_kv}" if self.len_kv != self.len_q else "")
        return f"B{self.batch} {heads} {lengths}"

    def visible_pairs(self, mask: Mask) -> int:
        """How many (query, key) pairs of one head the mask lets through."""
        require_type("mask", mask, Mask)
        if mask is Mask.FULL or not self.len_q or not self.len_kv:
            return self.len_q * self.len_kv
        # Query i sees clamp(i + 1 + len_kv - len_q, 0, len_kv) keys: an arithmetic series over the last min(len_q, len_kv) rows.
        rows = min(self.len_q, self.len_kv)
        return rows * (2 * self.len_kv - rows + 1) // 2

    def flops(self, problem: Problem) -> float:
        """Floating-point operations by the field's convention: 2 * (head_dim + head_dim_v) a pair, half of it when causal."""
        require_type("problem", problem, Problem)
        pairs = self.batch * self.heads_q * self.len_q * self.len_kv
        return 2.0 * pairs * (problem.head_dim + problem.head_dim_v) * (0.5 if problem.mask is Mask.CAUSAL else 1.0)

    def io_bytes(self, problem: Problem) -> int:
        """Bytes of q, k, v and out, each once: what the memory must move at least."""
        require_type("problem", problem, Problem)
        rows = self.batch * (self.heads_q * self.len_q + self.heads_kv * self.len_kv)
        return rows * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
