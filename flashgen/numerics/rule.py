"""The rule that judges a kernel: FlashAttention's (its tests' `check_tensor_vs_ref`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.codegen.errors import ArgumentError


@dataclass(frozen=True)
class Verdict:
    """What `judge` found. Errors and what is allowed are absolute; `message` names each bound that failed, with its numbers."""

    ok: bool
    message: str
    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float
    lse_max_error: float
    lse_max_allowed: float
    lse_rms_error: float
    lse_rms_allowed: float


def judge(out: Tensor, lse: Tensor, ref: tuple[Tensor, Tensor], pt: tuple[Tensor, Tensor], dtype: torch.dtype) -> Verdict:
    """Judges a kernel's (out, lse) by what `reference` (ref) and `plain` (pt) gave for the same inputs, or the same rows of them.

    With noise = 2 * max|(ref + 0.3 - 0.3) - ref| computed in `dtype` (fp32 for lse):
        max|x - ref| <= 2 * max|pt - ref| + noise    and    rms(x - ref) <= 1.5 * rms(pt - ref) + noise.
    Nothing may be NaN; lse is -inf exactly where ref's is, and out is exactly 0 there. Raises ArgumentError if shapes differ.
    """
    for name, given, wanted in (("out", out, ref[0]), ("lse", lse, ref[1]), ("pt out", pt[0], ref[0]), ("pt lse", pt[1], ref[1])):
        if given.shape != wanted.shape:
            raise ArgumentError(f"{name} must have the reference's shape {tuple(wanted.shape)}; got {tuple(given.shape)}")
    unseen = ref[1] == -torch.inf
    failures = []
    for name, given in (("out", out), ("lse", lse)):
        if nans := int(given.isnan().sum()):
            failures.append(f"{name} is NaN in {nans} of {given.numel()} places")
    if wrong := int((lse.isinf() != unseen).sum() + (lse == torch.inf).logical_and(unseen).sum()):
        failures.append(f"lse is infinite in the wrong places, or has the wrong sign there: {wrong} of {lse.numel()}")
    if wrong := int((out[_rows_of(unseen, out)] != 0).any(-1).sum()):
        failures.append(f"out is not 0 in {wrong} rows that see no key")
    numbers = _bounds(out, ref[0], pt[0], dtype) + _bounds(lse[~unseen], ref[1][~unseen], pt[1][~unseen], torch.float32)
    for name, (error, allowed) in zip(("out max", "out rms", "lse max", "lse rms"), numbers, strict=True):
        if not error <= allowed:  # also where either is NaN
            failures.append(f"{name} error {error:.3e} exceeds {allowed:.3e}")
    return Verdict(not failures, "; ".join(failures) or "within all bounds", *(number for pair in numbers for number in pair))


def _rows_of(unseen: Tensor, out: Tensor) -> Tensor:
    """A mask over rows in lse's shape as one over rows of out: [b, h, s] -> [b, s, h]; rows picked one by one stay as they are."""
    return unseen.transpose(1, 2) if out.ndim == 4 else unseen


def _bounds(given: Tensor, ref: Tensor, pt: Tensor, dtype: torch.dtype) -> tuple[tuple[float, float], tuple[float, float]]:
    """(error, allowed) by maximum, and by root mean square."""
    if not ref.numel():
        return (0.0, 0.0), (0.0, 0.0)
    exact = ref.double()
    error, pt_error = (given.double() - exact).abs(), (pt.double() - exact).abs()
    rounded = ref.to(dtype)
    noise = 2 * float(((rounded + 0.3 - 0.3) - rounded).double().abs().max())
    by_max = float(error.max()), 2 * float(pt_error.max()) + noise
    by_rms = float(error.square().mean().sqrt()), 1.5 * float(pt_error.square().mean().sqrt()) + noise
    return by_max, by_rms
