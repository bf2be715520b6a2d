"""`TensorMapShape`: what a tensor map says, all but the address.

A tensor map is the 128-byte description of a tensor by which the copy engine of sm_90 and newer finds a box of its elements.
Rules and words are those of cuTensorMapEncodeTiled (CUDA driver API, "Tensor Map Object Management":
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html; PTX ISA, "Tensors":
https://docs.nvidia.com/cuda/parallel-thread-execution/#tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ArgumentError, choice_error, require_int
from .problem import Dtype
from .sizes import NUMBERS

MIN_RANK, MAX_RANK = 2, 5  # the binding of the driver's function takes no empty list of strides
MAX_SIZE = 2**32
MAX_BOX = 256
STRIDE_UNIT, STRIDE_END = 16, 2**40
SWIZZLES = (0, 32, 64, 128)
L2_PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True)
class TensorMapShape:
    """One tensor as a kernel copies it. Raises ArgumentError for what the driver would refuse.

    sizes:          elements in each dimension, innermost first; two to five dimensions
    strides:        bytes between neighbours in each dimension but the innermost, whose elements are adjacent: multiples of 16
    box:            elements that one copy takes in each dimension
    swizzle_bytes:  span within which a copy permutes 16-byte chunks of shared memory, no less than the box's inner row; 0 for none
    l2_promotion:   bytes by which the L2 is filled at least: more than a box's inner row fetches what other boxes will ask for
    """

    dtype: Dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128
    l2_promotion: int = 256

    @property
    def fields(self) -> tuple[Dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]:
        """All of them, in order."""
        return self.dtype, self.sizes, self.strides, self.box, self.swizzle_bytes, self.l2_promotion

    def __post_init__(self) -> None:
        if not _is_allowed(*self.fields):
            self._refuse()

    def _refuse(self) -> None:
        """Raises ArgumentError that names the first rule broken."""
        rank = len(self.sizes)
        if not MIN_RANK <= rank <= MAX_RANK:
            raise ArgumentError(f"sizes must be of {MIN_RANK} to {MAX_RANK} dimensions; got {rank}")
        for name, given, count in (("strides", self.strides, rank - 1), ("box", self.box, rank)):
            if len(given) != count:
                raise ArgumentError(f"{name} must have {count} entries for {rank} sizes; got {len(given)}")
        for dim, size in enumerate(self.sizes):
            require_int(f"sizes[{dim}]", size, 1, MAX_SIZE)
        for dim, stride in enumerate(self.strides):
            require_int(f"strides[{dim}]", stride, 0, STRIDE_END - 1)
            if stride % STRIDE_UNIT:
                raise ArgumentError(f"strides[{dim}] must be a multiple of {STRIDE_UNIT} bytes; got {stride}")
        for dim, extent in enumerate(self.box):
            require_int(f"box[{dim}]", extent, 1, MAX_BOX)
        if self.swizzle_bytes not in SWIZZLES:
            raise choice_error("swizzle_bytes", self.swizzle_bytes, SWIZZLES)
        if self.l2_promotion not in L2_PROMOTIONS:
            raise choice_error("l2_promotion", self.l2_promotion, L2_PROMOTIONS)
        row = self.box[0] * self.dtype.bytes
        if row % 16:
            raise ArgumentError(f"box[0] must be a multiple of 16 bytes; got {self.box[0]} elements, {row} bytes")
        if self.swizzle_bytes and row > self.swizzle_bytes:
            raise ArgumentError(f"box[0] must fit swizzle_bytes {self.swizzle_bytes}; got {self.box[0]} elements, {row} bytes")


def _is_allowed(
    dtype: Dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle_bytes: int, l2_promotion: int
) -> bool:
    """The rules of `TensorMapShape` in short, as nearly all keep them."""
    rank, row = len(sizes), dtype.bytes * box[0] if box else 0
    return (
        MIN_RANK <= rank <= MAX_RANK
        and len(strides) == rank - 1
        and len(box) == rank
        and {*map(type, sizes), *map(type, strides), *map(type, box)} <= NUMBERS
        and min(sizes) >= 1
        and max(sizes) <= MAX_SIZE
        and min(strides) >= 0
        and max(strides) < STRIDE_END
        and not sum([stride % STRIDE_UNIT for stride in strides])
        and min(box) >= 1
        and max(box) <= MAX_BOX
        and swizzle_bytes in SWIZZLES
        and l2_promotion in L2_PROMOTIONS
        and not row % 16
        and (not swizzle_bytes or row <= swizzle_bytes)
    )


def tensor_map_shape(
    dtype: Dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], l2_promotion: int = 256
) -> TensorMapShape:
    """The shape with a swizzle of 128 bytes."""
    return TensorMapShape(dtype, sizes, strides, box, l2_promotion=l2_promotion)
