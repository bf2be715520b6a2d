"""Where in memory a kernel's tensors may begin, and that all of them is there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.codegen.errors import ArgumentError

ALIGNMENT = 16  # bytes: what one asynchronous copy moves


def require_aligned(addresses: Mapping[str, int]) -> None:
    """Raises ArgumentError unless these are addresses where tensors may begin, by name."""
    for name, address in addresses.items():
        if past := address % ALIGNMENT:
            raise ArgumentError(f"{name} must begin at an address that is a multiple of {ALIGNMENT} bytes; got one {past} past it")


def require_whole_storages(named: Mapping[str, torch.Tensor]) -> None:
    """Raises ArgumentError unless the storages of these hold all their elements."""
    for name, tensor in named.items():
        if tensor.numel():  # storages are resized where memory is short: for parameters that are gathered for each layer, for example
            last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            needed, there = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
            if needed > there or not tensor.data_ptr():
                raise ArgumentError(f"{name} must have a storage that holds its elements, at least {needed} bytes; got one of {there}")
