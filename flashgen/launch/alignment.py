"""Where in memory a kernel's tensors may begin."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.codegen.errors import ArgumentError

ALIGNMENT = 16  # bytes: what one asynchronous copy moves


def require_aligned(addresses: Mapping[str, int | torch.SymInt]) -> None:
    """Raises ArgumentError unless these are addresses where tensors may begin, by name. Of symbols it says nothing."""
    for name, address in addresses.items():
        if isinstance(address, int) and (past := address % ALIGNMENT):
            raise ArgumentError(f"{name} must begin at an address that is a multiple of {ALIGNMENT} bytes; got one {past} past it")
