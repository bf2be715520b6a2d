"""The rule that judges what a kernel wrote, whatever its operation: FlashAttention's (its tests' `check_tensor_vs_ref`).

A kernel may err at most twice as much as plain PyTorch in the same element type, plus the rounding of that type. No tolerance is picked by
hand. Results are told apart by the names of the operation's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.codegen.errors import ArgumentError


class Bound(NamedTuple):
    """An error and what is allowed, both absolute."""

    error: float
    allowed: float


class Bounds(NamedTuple):
    """The bounds of one output: on the largest error, and on the root mean square of all."""

    max: Bound
    rms: Bound


@dataclass(frozen=True)
class Verdict:
    """What `judge` found. `bounds`: by output; `message` names each output and bound that failed, with its numbers."""

    ok: bool
    message: str
    bounds: Mapping[str, Bounds]

    @property
    def max_error(self) -> float:
        """The largest error of the operation's first output."""
        return next(iter(self.bounds.values())).max.error

    @property
    def max_allowed(self) -> float:
        """What is allowed of it."""
        return next(iter(self.bounds.values())).max.allowed


def judge(
    given: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    unseen: Mapping[str, Tensor] | None = None,
    elements: Mapping[str, torch.dtype] | None = None,
) -> Verdict:
    """Judges a kernel's results by the exact ones and by plain PyTorch's, for the same inputs or the same parts of them.

    With noise = 2 * max|(exact + 0.3 - 0.3) - exact| computed in the output's element type (`elements`, else that of `plain`):
        max|x - exact| <= 2 * max|plain - exact| + noise    and    rms(x - exact) <= 1.5 * rms(plain - exact) + noise.
    Nothing may be NaN, and infinite exactly where `exact` is (or plain PyTorch overflows). `unseen`: for some outputs the rows, a mask
    over all dimensions but the last, that see no key and must be exactly 0. Raises ArgumentError if names or shapes differ.
    """
    given, plain = ({name: _computable(tensor) for name, tensor in found.items()} for found in (given, plain))
    for what, found in (("given", given), ("plain", plain)):
        if found.keys() != exact.keys():
            raise ArgumentError(f"{what} must hold {', '.join(exact)}; got {', '.join(found)}")
        for name, tensor in found.items():
            if tensor.shape != exact[name].shape:
                owner = name if what == "given" else f"{what} {name}"
                raise ArgumentError(f"{owner} must have the reference's shape {tuple(exact[name].shape)}; got {tuple(tensor.shape)}")
    failures, bounds = [], {}
    for name, tensor in given.items():
        if nans := int(tensor.isnan().sum()):
            failures.append(f"{name} is NaN in {nans} of {tensor.numel()} places")
    for name, tensor in given.items():
        infinite = exact[name].isinf()
        if wrong := int((infinite & (tensor != exact[name]) | tensor.isinf() & ~infinite & ~plain[name].isinf()).sum()):
            failures.append(f"{name} is infinite in the wrong places, or has the wrong sign there: {wrong} of {tensor.numel()}")
    for name, rows in (unseen or {}).items():
        if wrong := int((given[name][rows] != 0).any(-1).sum()):
            failures.append(f"{name} is not 0 in {wrong} rows that see no key")
    for name, tensor in given.items():
        wanted, theirs, infinite = exact[name], plain[name], exact[name].isinf()
        if infinite.any():
            tensor, wanted, theirs = (each[~infinite] for each in (tensor, wanted, theirs))
        element = elements[name] if elements is not None else plain[name].dtype
        bounds[name] = _bounds(tensor, wanted, theirs, element)
    for name, both in bounds.items():
        for kind, (error, allowed) in both._asdict().items():
            if not error <= allowed:  # also where either is NaN
                failures.append(f"{name} {kind} error {error:.3e} exceeds {allowed:.3e}")
    return Verdict(not failures, "; ".join(failures) or "within all bounds", bounds)


def _computable(tensor: Tensor) -> Tensor:
    """e4m3 numbers, with which PyTorch does not compute, as those of another type."""
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor


def _bounds(given: Tensor, exact: Tensor, plain: Tensor, element: torch.dtype) -> Bounds:
    if not exact.numel():
        return Bounds(Bound(0.0, 0.0), Bound(0.0, 0.0))
    exact = exact.double()
    error, plain_error = (given.double() - exact).abs(), (plain.double() - exact).abs()
    rounded = exact.to(element)
    noise = 2 * float(((rounded + 0.3 - 0.3) - rounded).double().abs().max())
    return Bounds(
        Bound(float(error.max()), 2 * float(plain_error.max()) + noise),
        Bound(float(error.square().mean().sqrt()), 1.5 * float(plain_error.square().mean().sqrt()) + noise),
    )
