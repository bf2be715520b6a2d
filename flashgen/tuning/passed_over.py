"""The configs of a cell that a tune did not try: refused ones with their reasons, legal ones with what the model expects of them."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Family

from ..selection.families import families_for
from ..selection.ranking import Candidate, ranked
from .request import Request, refused_configs
from .result import Row


@dataclass(frozen=True)
class PassedOver:
    """What is in a cell's search space beside its candidates.

    refused: not legal, with all reasons; dominated: legal, but another config does the same with less; slower: what the model expects to be
    slower than those that were tried, the best first
    """

    refused: list[tuple[Family, Config, list[str]]]
    dominated: list[tuple[Family, Config]]
    slower: list[Candidate]


def passed_over(request: Request, row: Row, device: Device) -> PassedOver:
    """For a cell of a tune. Of one whose config was given by hand nothing: it searched no space."""
    if request.settings:
        return PassedOver([], [], [])
    cell, target = row.cell, device.target
    families = families_for(cell.problem, target, request.family)
    tried = {(each.spec.family.name, each.spec.config) for each in row.candidates}
    dominated = [
        (family, config)
        for family in families
        for config in family.legal_configs(cell.problem, target)
        if not family.config_refusals(config, cell.workload) and not family.not_dominated(config, cell.workload)
        if (family.name, config) not in tried
    ]
    slower = [each for each in ranked(cell.problem, cell.workload, device, families) if (each.family.name, each.config) not in tried]
    return PassedOver(list(refused_configs(request, cell, target)), dominated, slower)
