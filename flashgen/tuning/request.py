"""What is asked of the tuner (`Request`), the candidates that follow from it, and the dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.family import families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.typed import require_field_types
from flashgen.codegen.workload import Workload

from ..cells import MAX_SEQLEN, MODEL_DIM, SEQLENS, TOKENS, Cell
from ..selection.families import default_spec, families_for
from ..selection.ranking import ranked, shortlist

MODEL_BEST = 16  # candidates a cell that are tried unless all are asked for


@dataclass(frozen=True)
class Request:
    """What to tune.

    head_dim_v: None for head_dim; causal: None for both masks; seqlens: lengths of q; seqlen_kv: length of k and v, None for that of q;
    batch: None for 16384 tokens in all, of the longer ones;
    heads: None for 2048 / head_dim; kv_heads: None for as many; device: a GPU's ordinal, the name of a known device, or None for the
    GPU that is here (h200 if there is none); arch: an architecture to predict for; jobs: compile threads, 0 for all cores;
    budget_seconds: no new compile or workload is begun after it; exhaustive: all legal configs worth trying, not the model's best;
    family: name of the only one to try; settings: config fields by hand, of it or of the preferred one.
    """

    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bf16"
    causal: bool | None = None
    seqlens: Sequence[int] = SEQLENS
    seqlen_kv: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    device: str | int | None = None
    arch: str | None = None
    jobs: int = 0
    budget_seconds: float | None = None
    exhaustive: bool = False
    family: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_field_types(self)
        require_int("head_dim", self.head_dim, 1)
        require_int("jobs", self.jobs, 0, 256)
        for name in ("batch", "heads", "kv_heads"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        if not self.seqlens:
            raise ArgumentError("seqlen must be given at least once; got none")
        for seqlen in self.seqlens:
            require_int("seqlen", seqlen, 1, MAX_SEQLEN)
        if self.seqlen_kv is not None:
            require_int("seqlen_kv", self.seqlen_kv, 1, MAX_SEQLEN)
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ArgumentError(f"budget_seconds must be > 0; got {self.budget_seconds}")

    def cells(self) -> list[Cell]:
        """The (problem, workload) pairs asked for."""
        masks = list(Mask) if self.causal is None else [Mask.CAUSAL if self.causal else Mask.FULL]
        heads = self.heads or max(1, MODEL_DIM // self.head_dim)
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        problems = [Problem(Dtype.parse(self.dtype), self.head_dim, head_dim_v, mask) for mask in masks]
        lengths = [(seqlen, self.seqlen_kv or seqlen) for seqlen in dict.fromkeys(self.seqlens)]
        return [
            Cell(problem, Workload(self.batch or max(1, TOKENS // max(len_q, len_kv)), heads, self.kv_heads or heads, len_q, len_kv))
            for problem in problems
            for len_q, len_kv in lengths
        ]

    @property
    def excluded(self) -> frozenset[str]:
        """Names of the families that are not asked for."""
        return frozenset(families()) - {self.family} if self.family else frozenset()

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
    cells = [_dry_cell(request, cell, device) for cell in request.cells()]
    return {"device": device.name, "device_measured": device.measured, "cells": cells}


def _dry_cell(request: Request, cell: Cell, device: Device) -> dict[str, Any]:
    target = device.target
    refused = {}
    for family in families_for(cell.problem, target, request.family):
        for config in family.space(cell.problem, target):
            if reasons := family.check(cell.problem, config, target) or family.config_refusals(config, cell.workload):
                refused[config.name] = reasons
    candidates = [
        {
            "config": spec.config.to_json(),
            "kernel": spec.name,
            "predicted_seconds": spec.family.predict(spec.problem, spec.config, cell.workload, device).seconds,
        }
        for spec in request.candidates(cell, device)
    ]
    return {"problem": cell.problem.name, "workload": asdict(cell.workload), "candidates": candidates, "refused": refused}
