"""What is asked of the tuner (`Request`), the candidates that follow from it, and the dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.family import Family, find_family
from flashgen.codegen.plain import to_plain
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.typed import require_field_types

from ..cells import Cell
from ..selection.families import default_spec, families_for, families_not_asked
from ..selection.ranking import ranked, shortlist

MODEL_BEST = 16  # candidates a cell that are tried unless all are asked for


@dataclass(frozen=True)
class Request:
    """What to tune.

    cells: what kernels are wanted for; device: a GPU's ordinal, the name of a known device, or None for the GPU that is here (h200 if
    there is none); arch: an architecture to predict for; jobs: compile threads, 0 for all cores; budget_seconds: no new compile or workload
    is begun after it; exhaustive: all legal configs worth trying, not the model's best; family: name of the only one to try;
    settings: config fields by hand, of it or of the preferred one.
    """

    cells: Sequence[Cell]
    device: str | int | None = None
    arch: str | None = None
    jobs: int = 0
    budget_seconds: float | None = None
    exhaustive: bool = False
    family: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_field_types(self)
        require_int("jobs", self.jobs, 0, 256)
        if self.family is not None:
            find_family(self.family).require_correct()
        if not self.cells:
            raise ArgumentError("cells must hold at least one; got none")
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ArgumentError(f"budget_seconds must be > 0; got {self.budget_seconds}")

    @property
    def excluded(self) -> frozenset[str]:
        """Names of the families that are not asked for."""
        return families_not_asked(self.family)

    def default(self, cell: Cell, device: Device) -> KernelSpec:
        """What a tune is compared with: the default of the family asked for, else of the one preferred."""
        return default_spec(cell.problem, device.target, family=self.family)

    def candidates(self, cell: Cell, device: Device) -> list[KernelSpec]:
        """The specs to try in a cell: the model's best and the default, or all that are legal, or the one given by hand."""
        default = self.default(cell, device)
        among = families_for(cell.problem, device.target, self.family)
        if self.settings:
            config = default.config.replace_from_text(self.settings)
            default.family.require_workload(config, cell.workload)
            return [default, KernelSpec(default.family, cell.problem, config, device.target)]
        if self.exhaustive:
            best = ranked(cell.problem, cell.workload, device, among)
        else:
            best = shortlist(cell.problem, cell.workload, device, MODEL_BEST, among)
        specs = [KernelSpec(c.family, cell.problem, c.config, device.target) for c in best]
        return specs if default in specs else [*specs, default]


def dry_run(request: Request, device: Device) -> dict[str, Any]:
    """What a tune would try and what is refused, with all reasons, as JSON values. Compiles and runs nothing."""
    cells = [_dry_cell(request, cell, device) for cell in request.cells]
    return {"device": device.name, "device_measured": device.measured, "cells": cells}


def refused_configs(request: Request, cell: Cell, target: Target) -> Iterator[tuple[Family, Config, list[str]]]:
    """The configs of the families in question that are not legal in a cell, with all reasons."""
    for family in families_for(cell.problem, target, request.family):
        for config in family.space(cell.problem, target):
            if reasons := family.check(cell.problem, config, target) or family.config_refusals(config, cell.workload):
                yield family, config, reasons


def _dry_cell(request: Request, cell: Cell, device: Device) -> dict[str, Any]:
    refused = {config.name: reasons for _, config, reasons in refused_configs(request, cell, device.target)}
    candidates = [
        {
            "config": spec.config.to_json(),
            "kernel": spec.name,
            "predicted_seconds": spec.family.predict(spec.problem, spec.config, cell.workload, device).seconds,
        }
        for spec in request.candidates(cell, device)
    ]
    return {"problem": cell.problem.name, "workload": to_plain(cell.workload), "candidates": candidates, "refused": refused}
