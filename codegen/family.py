"""What a kernel family has to say: `Family`, the discovery of families, and the prediction that its model makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from .config import Config
from .devices import Device
from .discovery import discovered
from .errors import ArgumentError, IllegalConfigError, choice_error
from .operands import Call
from .parameters import ParameterBlock
from .problem import Problem
from .program import BlockResources, KernelText, Program
from .target import Target, targets
from .workload import Workload


@dataclass(frozen=True)
class Prediction:
    """What the model expects of one config on one workload: seconds, and the resource that sets them."""

    seconds: float
    bound_by: str


@dataclass(frozen=True)
class Traffic:
    """Bytes that the SMs ask of the L2 in one call, as an algorithm's loops say: read, written, and added up there (`red`).

    Optional operands are left out. What an L1 holds between two reads of one block is counted each time.
    """

    read: int
    written: int
    reduced: int = 0


class Family(ABC):
    """One kernel template with its generator.

    A family's file in `codegen/families` defines a subclass and one instance of it named `FAMILY`.
    `atoms` and `tiles` are the names of the files that its kernels are made of, in the order in which they must come.
    `revision` is raised whenever the rendered text changes: it is part of every spec's digest, so that what was measured of
    the old text never speaks for the new one.
    `operation`: name of the one that its kernels compute.
    `automatic`: whether a kernel of the family may be taken where nobody asks for the family by name: those that are there to be read and
    compared are not.
    `correct`: whether its kernels compute what their operation says. One that does not, to show what goes wrong, is never automatic, and
    nobody can tune, generate or debug it: see `require_correct`.
    `modifiers`: names of those that its kernels can have.
    `fetches_scores`: whether its kernels bring what scores have in memory to shared memory before they need it;
    `loads_scores_ahead`: to registers.
    `changes_at_once`: whether its kernels change scores before the exponential, which has no part in that, and look at a tree mask while
    they wait for its keys.
    `preference`: where no measurement says which family is faster, the one with the highest is taken of those that can do the same; see
    `preference_for`.
    """

    name: ClassVar[str]
    revision: ClassVar[int]
    template: ClassVar[str]
    config_type: ClassVar[type[Config]]
    atoms: ClassVar[tuple[str, ...]]
    tiles: ClassVar[tuple[str, ...]]
    parameters: ClassVar[ParameterBlock]
    operation: ClassVar[str] = "forward"
    modifiers: ClassVar[tuple[str, ...]] = ()
    fetches_scores: ClassVar[bool] = False
    loads_scores_ahead: ClassVar[bool] = False
    changes_at_once: ClassVar[bool] = False
    preference: ClassVar[int] = 0
    automatic: ClassVar[bool] = True
    correct: ClassVar[bool] = True

    def __reduce__(self) -> tuple[Any, ...]:  # there is one of each: a copy would make specs differ that are the same
        return find_family, (self.name,)

    @abstractmethod
    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """All the reasons why no config of this family can compute `problem` on `target`; empty if one can."""

    @abstractmethod
    def check(self, problem: Problem, config: Any, target: Target) -> list[str]:
        """All the reasons why this combination is illegal, `refusals` included; empty if it is legal."""

    @abstractmethod
    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """The configs worth considering, legal or not, in a fixed order."""

    def adapted(self, problem: Problem, config: Any) -> Any:
        """A config that is good without what a problem adds, modifiers or packed sequences, as the problem may take it."""
        return config

    @abstractmethod
    def default(self, problem: Problem, target: Target) -> Config:
        """A legal config that compiles cleanly, for where nothing is known."""

    @abstractmethod
    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """The family's own variables for its template."""

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`atoms` and `tiles` of a problem's kernels, for a family whose problems do not all need the same."""
        return self.atoms, self.tiles

    def instructions(self, problem: Problem, config: Any) -> str:
        """PTX atoms written for this kernel, `instructions` in its template: of those that exist in too many shapes to be files."""
        return ""

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        """The kernels of a text, the one without a suffix first. One with `parameters`, where nothing else is said."""
        return (KernelText(self.parameters),)

    @abstractmethod
    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        """What a block of each kernel takes, by the kernel's suffix."""

    @abstractmethod
    def program(self, config: Any, call: Call, device: Device) -> Program:
        """The launches of a call; where blocks stay and take one piece of work after the other, `device` says how many they are.

        Asked only where `call_refusals` has nothing to say.
        """

    def call_refusals(self, call: Call, config: Any = None) -> list[str]:
        """Why no kernel of this family can take the call's sizes and strides, though the family can compute its problem.

        With a config: why no kernel of that config can. What the config adds is what `config_refusals` says, and no more.
        """
        return [] if config is None else self.config_refusals(config, call.workload)

    def config_refusals(self, config: Any, workload: Workload) -> list[str]:
        """Why no kernel of this config can take a workload, though another config may.

        The answer may depend on the group, the query heads of a key/value head, alone: one kernel is chosen for a whole bucket of
        workloads. Records, ranking and tuner, which know no call, ask here.
        """
        return []

    def preference_for(self, problem: Problem, workload: Workload) -> int:
        """`preference` among the families of a workload, for one that is made for some sizes. Asked of those that stand for a bucket."""
        return self.preference

    def group_unit(self, config: Any) -> int:
        """What the query heads of a key/value head must be a multiple of, for `config_refusals` to have nothing to say."""
        return 1

    def require_correct(self) -> None:
        """Raises ArgumentError for a family that is wrong on purpose."""
        if not self.correct:
            raise ArgumentError(f"family must be one whose results are right; got {self.name}, which is wrong on purpose")

    def require_call(self, call: Call, config: Config) -> None:
        """Raises ArgumentError with the reasons if no kernel of this config can take a call."""
        _require_none(self.call_refusals(call, config), config, call.workload)

    def require_workload(self, config: Config, workload: Workload) -> None:
        """Raises ArgumentError with the reasons if no kernel of this config can take a workload."""
        _require_none(self.config_refusals(config, workload), config, workload)

    def not_dominated(self, config: Any, workload: Workload) -> bool:
        """Whether a config that takes a workload may be the best for it; False where another does the same with less."""
        return True

    @abstractmethod
    def predict(self, problem: Problem, config: Any, workload: Workload, device: Device, registers: int | None = None) -> Prediction:
        """The model's expectation; `registers` a thread as the compiler reported them, None before a compile."""

    def traffic(self, problem: Problem, config: Any, workload: Workload, device: Device) -> Traffic | None:
        """What the loops of the algorithm move, to be held against what a GPU counts; None where nobody has written it down."""
        return None

    def legal_configs(self, problem: Problem, target: Target) -> list[Config]:
        """The configs of the space that pass `check`."""
        return [c for c in self.space(problem, target) if not self.check(problem, c, target)]

    def require_legal(self, problem: Problem, config: Config, target: Target) -> None:
        """Raises IllegalConfigError with all reasons unless the combination is legal."""
        if type(config) is not self.config_type:  # a subclass could say anything of itself in the rendered text
            raise choice_error("config", type(config).__name__, [self.config_type.__name__])
        if reasons := self.check(problem, config, target):
            raise IllegalConfigError(config.name, reasons)


def _require_none(reasons: list[str], config: Config, workload: Workload) -> None:
    if reasons:
        raise ArgumentError(f"config {config.name} cannot take {workload.name}: {'; '.join(reasons)}")


@cache
def families() -> dict[str, Family]:
    """Every family that has a file in `codegen/families`, by name."""
    from . import families as package

    found = discovered(package, "FAMILY", Family)  # type: ignore[type-abstract]
    return {family.name: family for family in found.values()}


def automatic_families(problem: Problem) -> tuple[Family, ...]:
    """The automatic families of a problem's operation. Raises ArgumentError if it has none: the message lists those that go by name."""
    of_operation = [family for family in families().values() if family.operation == problem.operation]
    if automatic := tuple(family for family in of_operation if family.automatic):
        return automatic
    if of_operation:
        raise ArgumentError(f"family must be given for {problem.operation}: one of {', '.join(family.name for family in of_operation)}")
    raise ArgumentError(f"pass must be one that a family computes; got {problem.operation}, which none does")


def require_possible(problem: Problem) -> None:
    """Raises ArgumentError, with the reasons that hold everywhere, if no family can compute `problem` on any target."""
    if reasons := _refusals_everywhere(problem):
        raise ArgumentError("; ".join(reasons))


@cache
def _refusals_everywhere(problem: Problem) -> tuple[str, ...]:
    """Of families that have all the reasons of another one, and more, none is told: they are for other problems."""
    of_families: list[list[str]] = []
    for family in automatic_families(problem):
        refusals = [family.refusals(problem, target) for target in targets().values()]
        if not all(refusals):
            return ()
        of_families.append([reason for reason in refusals[0] if all(reason in others for others in refusals)])
    nearest = [reasons for reasons in of_families if not any({*others} < {*reasons} for others in of_families if others)]
    return tuple(dict.fromkeys(reason for reasons in nearest for reason in reasons))


def find_family(name: str) -> Family:
    """The family of that name. Raises ArgumentError that lists the known ones."""
    if name not in families():
        raise choice_error("family", name, families())
    return families()[name]
