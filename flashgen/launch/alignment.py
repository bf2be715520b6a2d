"""Where in memory a kernel's tensors may begin."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.errors import ArgumentError

ALIGNMENT = 16  # bytes: what one asynchronous copy moves


def require_aligned(addresses: Mapping[str, int]) -> None:
    """Raises ArgumentError unless these are addresses where tensors may begin, by name."""
    for name, address in addresses.items():
        if past := address % ALIGNMENT:
            raise ArgumentError(f"{name} must begin at an address that is a multiple of {ALIGNMENT} bytes; got one {past} past it")
