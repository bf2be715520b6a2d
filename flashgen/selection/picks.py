"""Which record speaks for a workload, and what the model picks where none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from flashgen.codegen.devices import Device, devices_like
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import automatic_families
from flashgen.codegen.problem import Mask, Problem, Sequences
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import OPEN, Workload, equal_lengths

from ..records import sources
from ..records.choice import Choice, Known, bucket
from ..records.record import BENCHMARK_VERSION
from .families import default_spec, families_not_asked
from .ranking import shortlist

USUAL_WINDOW = 1024  # keys before a query's own
USUAL_CHUNK = 8192  # keys
_MODEL_TRIES, _FURTHER_TRIES = 3, 5  # before the default config and behind it


@dataclass(frozen=True)
class Pick:
    """A record that speaks for a workload: whose it is, and its choice."""

    whose: str
    choice: Choice

    @property
    def name(self) -> str:
        """For people."""
        toolchain = "" if self.choice.same_toolchain else " of another driver or compiler"
        plain = "" if (problem := self.choice.problem) is None else " without modifiers" if problem.modifiers else " of dense sequences"
        device = f" of {self.choice.device_name}" if self.choice.device_name else ""
        return f"{self.whose} record{device}{toolchain}{plain} for {self.choice.record.key.workload.name}"


def picks(
    problem: Problem,
    workload: Workload,
    device: Device,
    toolchain: tuple[str, str],
    excluded: frozenset[str] = frozenset(),
    any_length: bool = False,
) -> Iterator[Pick]:
    """The records that speak for a workload on a device, the best first; `toolchain` is the versions of driver and compiler.

    `any_length`: those that speak for the lengths of its bucket without a record of their own.
    In this order: the user's own of that very workload, his own for its bucket, then so of those that come with the package, then so the
    configs of older ones of either, then of those that come with the package for devices like this one; where there are modifiers, or
    sequences are not dense, at last the configs of the plain kernel's records.
    All but the exact ones are chosen for the bucket, so no choice depends on what was called before.
    """
    met: list[tuple[str, Known]] = []
    for whose, source in (("own", sources.own_records), ("shipped", sources.shipped_records)):
        known = source().known(problem, device, BENCHMARK_VERSION, excluded)
        met.append((whose, known))
        yield from (Pick(whose, choice) for choice in known.choices(workload, toolchain, any_length))
    for whose, known in met:
        yield from (Pick(whose, choice) for choice in known.choices(workload, toolchain, any_length, older=True))
    for other, known in _of_like_devices(problem, device, excluded):
        for older in (False, True):
            for choice in known.choices(workload, toolchain, any_length, older):
                yield Pick("shipped", replace(choice, older=True, device_name=other.name))
    if problem.modifiers or problem.sequences is not Sequences.DENSE:
        yield from _of_plain_kernels(problem, workload, device, toolchain, excluded)


def _of_like_devices(problem: Problem, device: Device, excluded: frozenset[str]) -> Iterator[tuple[Device, Known]]:
    """What the records that come with the package say of each."""
    for other in devices_like(device):
        yield other, sources.shipped_records().known(problem, other, BENCHMARK_VERSION, excluded)


def _of_plain_kernels(
    problem: Problem, workload: Workload, device: Device, toolchain: tuple[str, str], excluded: frozenset[str]
) -> Iterator[Pick]:
    """The configs that are best without the problem's modifiers and for dense sequences of the mean lengths, if legal with them.

    Local attention is most like a causal mask.
    """
    mask = Mask.CAUSAL if workload.is_local else problem.mask
    plain = replace(problem, mask=mask, modifiers=(), sequences=Sequences.DENSE, dtype_kv=None)
    sizes = replace(equal_lengths(workload), window_left=OPEN, window_right=OPEN, chunk=OPEN)
    unable = {family.name for family in automatic_families(problem) if family.refusals(problem, device.target)}
    for pick in picks(plain, sizes, device, toolchain, excluded | unable, any_length=True):
        choice = replace(pick.choice, older=True, problem=problem)
        with suppress(ArgumentError):
            choice.spec(device.target)
            yield Pick(pick.whose, choice)


def recorded_workloads(problem: Problem, device: Device, excluded: frozenset[str] = frozenset()) -> frozenset[Workload]:
    """The workloads for which `picks` may give a record of that very workload: all others of a bucket get the same picks."""
    known = [source().known(problem, device, BENCHMARK_VERSION, excluded) for source in (sources.own_records, sources.shipped_records)]
    known += [of_other for _, of_other in _of_like_devices(problem, device, excluded)]
    return frozenset().union(*(some.workloads for some in known))


def model_picks(
    problem: Problem, workload: Workload, device: Device, excluded: frozenset[str] = frozenset(), family: str | None = None
) -> Iterator[KernelSpec]:
    """What the model takes for a workload's bucket, the best first, then the default, then a few more: many modifiers may make that spill.

    All are of the family asked for or preferred: the models of two families need not err in the same direction. They are the same for all
    windows and chunks: another one must not need another kernel.
    """
    sizes = bucket(workload)
    if workload.has_window:
        sizes = replace(sizes, window_left=USUAL_WINDOW, window_right=0)
    if workload.chunk != OPEN:
        sizes = replace(sizes, chunk=USUAL_CHUNK)
    default = default_spec(problem, device.target, excluded, family, sizes)
    candidates = shortlist(problem, sizes, device, _MODEL_TRIES + _FURTHER_TRIES, [default.family])
    specs = [KernelSpec(candidate.family, problem, candidate.config, device.target) for candidate in candidates]
    yield from specs[:_MODEL_TRIES]
    yield default
    yield from specs[_MODEL_TRIES:]


def picked_spec(problem: Problem, workload: Workload, device: Device, toolchain: tuple[str, str], family: str | None) -> KernelSpec:
    """The kernel for a workload of the family asked for by name, or for None of an automatic one: by a record, else by the model.

    Raises ArgumentError, with the reasons, if none of them can compute the problem.
    """
    excluded = families_not_asked(family)
    for pick in picks(problem, workload, device, toolchain, excluded):
        return pick.choice.spec(device.target)
    return next(model_picks(problem, workload, device, excluded, family))
