"""Plain PyTorch in place of kernels on the CPU: for tests of what calls make of their arguments, whatever computes them."""

from __future__ import annotations

import pytest
import torch

from flashgen.launch import cpu as launch_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.oracle import oracle_of
from flashgen.operators import cpu


def plain_in_place_of_kernels(monkeypatch: pytest.MonkeyPatch, operation: str | None = None) -> list[Tensors]:
    """From here on calls take CPU tensors, and compile nothing. The list gets what calls give kernels, or those of one operation."""
    given: list[Tensors] = []

    def run(kernel: object, tensors: Tensors, scalars: dict[str, float]) -> None:
        with torch.autocast("cpu", enabled=False):  # of which kernels know nothing
            found = oracle_of(tensors.problem).plain(tensors.problem, tensors, tensors.call(scalars).scalars)
        for name, tensor in tensors.outputs.items():
            tensor.copy_(found[name])
        if operation in (None, tensors.problem.operation):
            given.append(tensors)

    monkeypatch.setattr(launch_cpu, "run_on_cpu", run)
    monkeypatch.setattr(cpu, "_default_kernel", lambda *_: None)
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    return given
