"""`Problem`: the compile-time facts of what the caller asks for, with the enums in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

from .errors import ArgumentError, choice_error, require_int
from .modifiers import is_modifier, modifier_names, short_name
from .operations import operation_names
from .plain import ADDED_LATER, named
from .typed import require_field_types, require_type

_MOST = 2**31 - 1  # of any size: what an int of a kernel holds
_OF_CACHES = ("forward", "append")  # operations whose keys may lie in pages of a cache


class _Choice(enum.Enum):
    """An enum whose error for another value is ours."""

    __hash__ = object.__hash__  # there is one of each member; enum's own hash is a call of Python, and every cache of problems asks

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise choice_error(cls.__name__.lower(), value, (member.value for member in cls))


class Pass(enum.StrEnum):
    """Names of operations, for those who do not want to spell them: `Problem.operation` takes any operation's name."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise choice_error("pass", value, (member.value for member in cls))


class Dtype(_Choice):
    """Element type of an operation's tensors, for attention of q, k, v and out. Accumulation and softmax are always fp32."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return 4 if self is Dtype.FP32 else 2

    @classmethod
    def parse(cls, text: str) -> Dtype:
        """Accepts 'bf16', 'bfloat16', 'fp16', 'float16', 'half', 'fp32', 'float32', 'float'."""
        require_type("dtype", text, str)
        aliases = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
        return cls(aliases.get(text, text))


class CacheDtype(_Choice):
    """Element type of keys and values in a cache where it is not that of q: a value is the element times the descale of its head."""

    E4M3 = "e4m3"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return 1


class Mask(_Choice):
    """Which keys a query may see. CAUSAL is aligned bottom-right: key j is seen by query i iff j <= i + len_kv - len_q."""

    FULL = "full"
    CAUSAL = "causal"


class Sequences(_Choice):
    """How the sequences of a batch lie in memory.

    DENSE: all of one length, as entries of a batch axis; PACKED: of any lengths, which only the device knows, one behind the other along an
    axis of tokens; CACHED: queries as DENSE, keys and values in pages of a cache, of any lengths, which only the device knows
    """

    DENSE = "dense"
    PACKED = "packed"
    CACHED = "cached"


@dataclass(frozen=True)
class Problem:
    """Compile-time facts of what is asked for: a pass of attention, or another operation.

    `head_dim` is the width of q and k, `head_dim_v` the width of v and out (None stands for `head_dim`), in elements. Operations that have
    no such widths leave them at 0, and `mask` at FULL.
    `operation` is the name of what is computed: one of those with a file in `codegen/operations`.
    `deterministic`: whether gradients must be the same to the bit in every run. False for every other operation, whatever is given: what it
    gives always is.
    `sequences`: how they lie in memory; operations but attention have dense ones, or for `append` those of a cache.
    `batch_invariant`: whether what the forward pass gives for a sequence must be the same to the bit whatever else is in the batch, on
    every GPU of an architecture, and whether its keys are dense or in pages.
    `modifiers`: names of what changes scores, or which keys a query sees, beside the mask, sorted: those with a file in
    `codegen/modifiers`, and traced functions, whose names say what they are. Their values are known at launch.
    `dtype_kv`: of keys and values in a cache, where it is not `dtype`.
    What a family can do with a problem is the family's to say; here only what no attention kernel could mean is refused.
    """

    dtype: Dtype
    head_dim: int = 0
    head_dim_v: int = None  # type: ignore[assignment]  # __post_init__ puts a number here
    mask: Mask = Mask.FULL
    operation: str = field(default="forward", metadata=named("pass", first=True))
    deterministic: bool = field(default=False, metadata=ADDED_LATER)
    modifiers: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    sequences: Sequences = field(default=Sequences.DENSE, metadata=ADDED_LATER)
    batch_invariant: bool = field(default=False, metadata=ADDED_LATER)
    dtype_kv: CacheDtype | None = field(default=None, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        if isinstance(self.operation, Pass):
            object.__setattr__(self, "operation", self.operation.value)
        least = int(self.operation in tuple(Pass))  # of attention
        require_int("head_dim", self.head_dim, least, _MOST)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        require_int("head_dim_v", self.head_dim_v, least, _MOST)
        require_field_types(self)
        if self.operation not in operation_names():
            raise choice_error("pass", self.operation, operation_names())
        if self.modifiers:
            self._require_modifiers()
        if self.sequences is not Sequences.DENSE:
            self._require_sequences()
        if self.batch_invariant and self.operation != Pass.FORWARD.value:
            raise ArgumentError(f"batch_invariant must be False for {self.operation}, as it is of attention's forward pass alone; got True")
        if self.dtype_kv is not None and not self.is_cached:
            raise ArgumentError(f"dtype_kv must be None where sequences are not cached; got {self.dtype_kv.value}")
        if self.operation != Pass.BACKWARD.value:
            object.__setattr__(self, "deterministic", False)

    def _require_sequences(self) -> None:
        if self.is_cached and self.operation in _OF_CACHES:
            return
        if self.operation not in tuple(Pass):
            allowed = "dense or cached" if self.operation in _OF_CACHES else "dense"
            raise ArgumentError(f"sequences must be {allowed} for {self.operation}, which is not attention; got {self.sequences.value}")
        if self.is_cached:
            raise ArgumentError(f"sequences must be dense or packed for {self.operation}: caches have no gradients; got cached")

    def _require_modifiers(self) -> None:
        for name in self.modifiers:
            if not is_modifier(name):
                raise choice_error("modifiers", name, modifier_names())
        if self.operation not in tuple(Pass):
            raise ArgumentError(f"modifiers must be none for {self.operation}, which has no scores; got {', '.join(self.modifiers)}")
        object.__setattr__(self, "modifiers", tuple(sorted(set(self.modifiers))))

    @cached_property  # each call of a new length asks several times
    def is_packed(self) -> bool:
        """Whether sequences lie one behind the other along an axis of tokens."""
        return self.sequences is Sequences.PACKED

    @cached_property
    def is_cached(self) -> bool:
        """Whether keys and values lie in pages of a cache."""
        return self.sequences is Sequences.CACHED

    @property
    def kv_bytes(self) -> int:
        """Size of one element of keys and values in bytes."""
        return self.dtype.bytes if self.dtype_kv is None else self.dtype_kv.bytes

    @property
    def name(self) -> str:
        """For people and file names, for example 'bf16_d64_causal' or 'fp16_d192x128_full'; an operation but forward comes first."""
        return self.variant if self.operation == "forward" else f"{self.operation}_{self.variant}"

    @property
    def variant(self) -> str:
        """The name without the operation, for where that is known."""
        if not self.head_dim and not self.head_dim_v and self.mask is Mask.FULL:
            return self.dtype.value
        width = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        parts = (
            self.dtype.value,
            width,
            self.mask.value,
            *([] if self.sequences is Sequences.DENSE else [self.sequences.value]),
            *([] if self.dtype_kv is None else [self.dtype_kv.value]),
            *map(short_name, self.modifiers),
            *(["deterministic"] if self.deterministic else []),
            *(["invariant"] if self.batch_invariant else []),
        )
        return "_".join(parts)
