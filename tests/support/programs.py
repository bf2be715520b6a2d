"""Programs of attention families for tests: what would be launched for a workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.codegen.attention import attention_call
from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device, find_device
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import Program
from flashgen.codegen.workload import Workload

H200 = find_device("h200")


def program_of(
    family: Family,
    problem: Problem,
    config: Config,
    workload: Workload,
    device: Device = H200,
    strides: Mapping[str, tuple[int, ...]] | None = None,
    scale: float = 0.125,
) -> Program:
    """For dense tensors, or for these strides of operands, by name."""
    return family.program(config, attention_call(problem, workload, strides or {}, scale), device)


def values_of(*arguments: Any, **options: Any) -> dict[str, Any]:
    """The parameters of a program with one launch, as `program_of` makes it."""
    (launch,) = program_of(*arguments, **options).launches
    return dict(launch.values)
