"""Tensors in this process's memory as a kernel on the CPU may touch them, and copies of them within bounds that nobody crosses unseen.

What atoms read and write is checked by sizes and strides, element by element. What a kernel stores by plain C++ nobody sees. So a launch
works on copies: pages around each cannot be touched, inputs cannot be written, and what lies beside the elements of an output must be as
it was in the end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from .fault import EmulatorFaultError

_DIMS = 4
# Bytes of address space before and after each copy, which cost no memory: more than `kGuard` of extent.cuh, so that what overflows from
# beside, such as a stack, is not taken for an access by a copy.
_GUARD = (1 << 32) + (1 << 20)
_WIDE = (
    1 << 28
)  # bytes of a span from which on only the pages of its elements can be touched: strides far out leave the rest without memory
_ALIGNED = 128
_CANARY = 0xA5
_PAGE = mmap.PAGESIZE
_NORESERVE, _FIXED = 0x4000, 0x10  # of Linux; the module mmap lacks them in Python 3.11

_Elements = np.ndarray[Any, np.dtype[Any]]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Extent(ctypes.Structure):
    """`Extent` in templates/emulator/extent.cuh."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * _DIMS),
        ("strides", ctypes.c_uint64 * _DIMS),
        ("spans", ctypes.c_uint64 * (_DIMS + 1)),
        ("dims", ctypes.c_int32),
        ("writable", ctypes.c_int32),
        ("name", ctypes.c_char * 16),
    )


@dataclass(frozen=True)
class MemoryView:
    """A view of memory: address in bytes, sizes and strides in elements; a stride may be 0. Kernels read it; write it, if `writable`."""

    name: str
    address: int
    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    writable: bool = False

    @property
    def span(self) -> int:
        """Bytes from its first element to the end of its last one."""
        if 0 in self.sizes:
            return 0
        return (sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) + 1) * self.element_bytes

    def extent(self) -> Extent:
        """Which bytes its elements take: rows of adjacent ones, and the dimensions by which rows are apart, the widest stride first."""
        apart = zip(self.strides, self.sizes, strict=True)
        dims = sorted(((stride * self.element_bytes, size) for stride, size in apart if self.span and stride and size > 1), reverse=True)
        row = self.element_bytes if self.span else 0
        while dims and dims[-1][0] == row:
            row *= dims.pop()[1]
        if len(dims) > _DIMS:
            raise ValueError(f"{self.name} has {len(dims)} strides; {_DIMS} are known")
        spans = [row + sum((size - 1) * stride for stride, size in dims[dim:]) for dim in range(len(dims) + 1)]
        found = Extent(address=self.address, dims=len(dims), writable=self.writable, name=self.name.encode())
        found.strides[: len(dims)], found.sizes[: len(dims)] = [stride for stride, _ in dims], [size for _, size in dims]
        found.spans[: len(spans)] = spans
        return found

    def elements(self) -> _Elements:
        """The view as an array of integers, on the memory itself."""
        strides = [stride * self.element_bytes for stride in self.strides]
        return np.lib.stride_tricks.as_strided(_bytes_at(self.address, self.span).view(f"u{self.element_bytes}"), self.sizes, strides)


class GuardedTensors:
    """Copies of tensors for one launch: enter for their addresses; leave, and outputs are copied back.

    Leaving raises EmulatorFaultError if something beside the elements of an output was written.
    """

    def __init__(self, tensors: Sequence[MemoryView]) -> None:
        self._originals = tensors
        self._copies: list[_Copy] = []

    def __enter__(self) -> list[MemoryView]:
        try:
            self._copies = []
            for tensor in self._originals:
                self._copies.append(_Copy(tensor))
        except BaseException:
            self._free()
            raise
        return [copy.tensor for copy in self._copies]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                written = [copy.written() for copy in self._copies]  # all checks come before the first output is given back
                for original, elements in zip(self._originals, written, strict=True):
                    if elements is not None:
                        original.elements()[...] = elements
        finally:
            self._free()

    def _free(self) -> None:
        for copy in self._copies:
            copy.free()


class _Copy:
    """One tensor's copy. Its last element ends where the pages do, but for alignment: that of the original is kept."""

    def __init__(self, original: MemoryView) -> None:
        self._wide = original.span >= _WIDE
        offset = original.address % _ALIGNED
        self._bytes = -(-(original.span + offset + _ALIGNED) // _PAGE) * _PAGE
        self._reserved = _GUARD + self._bytes + _GUARD
        self._begin = _map(None, self._reserved, 0, mmap.MAP_PRIVATE) + _GUARD
        try:
            access = 0 if self._wide else mmap.PROT_READ | mmap.PROT_WRITE
            _map(self._begin, self._bytes, access, mmap.MAP_SHARED | _FIXED)
            end = self._begin + self._bytes - original.span - offset
            self.tensor = replace(original, address=end // _ALIGNED * _ALIGNED + offset)
            self._pages = self._touchable()
            if self._wide:
                self._allow(mmap.PROT_READ | mmap.PROT_WRITE)
            if original.span:
                if original.writable:
                    for begin, end in self._pages:
                        _bytes_at(begin, end - begin)[:] = _CANARY
                self.tensor.elements()[...] = original.elements()
            if not original.writable:
                self._allow(mmap.PROT_READ)
        except BaseException:
            self.free()
            raise

    def written(self) -> _Elements | None:
        """An output's elements. Raises EmulatorFaultError if something beside them was written."""
        if not self.tensor.writable or not self.tensor.span:
            return None
        elements = self.tensor.elements().copy()
        self.tensor.elements()[...] = int.from_bytes(bytes([_CANARY] * self.tensor.element_bytes))
        changed = np.concatenate([begin + np.flatnonzero(_bytes_at(begin, end - begin) != _CANARY) for begin, end in self._pages])
        if len(changed):
            first = int(changed[0]) - self.tensor.address
            beside = first - self.tensor.span
            where = f"{beside} bytes past the end" if beside >= 0 else f"at byte {first}"
            raise EmulatorFaultError(
                "global memory", f"{len(changed)} bytes beside the elements of {self.tensor.name} were written: {where}"
            )
        return elements

    def free(self) -> None:
        _libc.munmap(self._begin - _GUARD, self._reserved)

    def _allow(self, access: int) -> None:
        for begin, end in self._pages:
            if _libc.mprotect(begin, end - begin, access):
                raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")

    def _touchable(self) -> list[tuple[int, int]]:
        """The pages of the elements, which are all unless the span is wide."""
        if not self._wide:
            return [(self._begin, self._begin + self._bytes)]
        extent = self.tensor.extent()
        starts: _Elements = np.array([self.tensor.address], np.uint64)
        for dim in range(extent.dims):
            starts = (starts[:, None] + np.arange(extent.sizes[dim], dtype=np.uint64) * np.uint64(extent.strides[dim])).ravel()
        row = extent.spans[extent.dims]
        pages = sorted({(int(p) // _PAGE * _PAGE, -(-(int(p) + row) // _PAGE) * _PAGE) for p in starts})
        merged: list[tuple[int, int]] = []
        for begin, end in pages:
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return merged


def _bytes_at(address: int, size: int) -> _Elements:
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


def _map(address: int | None, size: int, access: int, flags: int) -> int:
    found = _libc.mmap(address, size, access, flags | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)
