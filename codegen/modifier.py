"""What a modifier has to say: `Modifier`, the discovery of modifiers, and what families make of those of a problem.

A problem says which modifiers there are, so kernels are made for them; a call has their values, which no kernel is made for. Each is a
link of the chain that kernels ask: templates/tile/common/score_chain.cuh.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

from .discovery import discovered
from .errors import ArgumentError, choice_error, shown
from .gradient_kernel import GradientKernel
from .modifiers import is_modifier, kind_of, listed_names
from .operands import Axis, Call, Operand
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import Buffer
from .workload import Workload


class Modifier(ABC):
    """A file in `codegen/modifiers` defines a subclass and one instance of it named `MODIFIER`; traced functions make theirs as they come.

    name:       that of its file, and of the file of its link in `templates/tile/modifiers`
    rank:       its place in the composition, from 0: those that change scores come before those that hide keys
    link:       the C++ struct that is its link of the chain, with a function `of(parameters, len_q, len_kv)`; empty for one that acts
                behind the chain, whose file comes behind `common/lse`
    words:      what it is called in the formula in the header of a kernel, which has those with a link
    parameters: the fields that every kernel which asks the chain has for it; packed_parameters: further ones where sequences are packed
    sizes, numbers: names of its values that are sizes of a workload, and of those that are other numbers
    tensors:    names of its `operands`; learned: those of them that have gradients
    tiles:      files of tile operations that its link needs beside its own
    gradient:   the kernel that the backward pass has for gradients of `learned`; None where there are none
    sum_parameters, sum_tiles: further fields, and files of tile operations, of the other kernels of the backward pass where these sum
                gradients up
    maps_scores, adds_to_scores, has_heads: what its link does: templates/tile/common/score_changes.cuh
    bends_scores, linear_in_key: of one that adds to scores, whether that depends on them; is linear beside the diagonal: linear_terms.py
    joins_sums, drops: whether it adds to the row sums, or drops elements of P: sinks.cuh and dropout.cuh in templates/tile/modifiers
    masks_by_key: whether kernels for Hopper mask by the queries that see a key: `mask_by_key` in templates/tile/warp/score_gradients.cuh
    opens: whether its link holds those that hide keys, and shows keys that they hide: templates/tile/modifiers/prefix_len.cuh
    scattered_by: of one whose link hides keys of no range, by which of BATCH and HEADS_Q tiles are seen or not: seen_tiles.py
    in_blocks: of such a one, whether it says the same of all queries and keys of a block, as of `query // 128`
    reads_scores: whether each score has an element of its tensors: templates/tile/common/score_tensors.cuh; fetched: fetched_tensor.cuh
    widest_tile: scores in a row of a tile that Hopper's kernels have registers for beside it; for_inference: no backward pass has it
    """

    name: str
    rank: int
    link: str = ""
    words: str
    parameters: tuple[Parameter, ...]
    packed_parameters: tuple[Parameter, ...] = ()
    sizes: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    tiles: tuple[str, ...] = ()
    gradient: GradientKernel | None = None
    sum_parameters: tuple[Parameter, ...] = ()
    sum_tiles: tuple[str, ...] = ()
    maps_scores: bool = False
    adds_to_scores: bool = False
    has_heads: bool = False
    bends_scores: bool = False
    linear_in_key: bool = False
    joins_sums: bool = False
    drops: bool = False
    masks_by_key: bool = False
    opens: bool = False
    scattered_by: tuple[Axis, ...] | None = None
    in_blocks: bool = False
    reads_scores: bool = False
    fetched: bool = False
    for_inference: bool = False
    widest_tile: int = 2**31

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Its tensors, which are operands of every call that has it, behind those of the operation."""
        return ()

    def gradients(self, problem: Problem) -> tuple[Operand, ...]:
        """Outputs of the backward pass, which a call may leave out: d_<name> of those of its tensors that have gradients."""
        return ()

    def gradient_buffers(self, call: Call) -> tuple[Buffer, ...]:
        """Memory that the backward pass needs for them."""
        return ()

    def gradient_values(self, call: Call, rows: int) -> tuple[int, Mapping[str, int | float]]:
        """Of the launch of `gradient`: its blocks, and the kernel's parameters that are numbers. `rows`: see `gradient_launches`."""
        raise NotImplementedError(f"{self.name} has no gradient")

    def of_name(self, name: str) -> Modifier:
        """The modifier of a name of this kind: it itself, unless names say more than that."""
        return self

    @property
    def conditions(self) -> Mapping[str, object]:
        """What its tile file asks for beside `score_chain.conditions`."""
        return {}

    def unit(self, call: Call) -> float | None:
        """What a score that its link has changed must be multiplied by for the softmax; None where that is as it was before."""
        return None

    def sizes_to_verify(self, workload: Workload, number: int | None) -> Mapping[str, int]:
        """Its `sizes` by which kernels are verified on a workload. `number`: of the shape; None where all keys must stay."""
        return {}

    @property
    def hides_keys(self) -> bool:
        """Whether its link says which keys a query sees, by a range, and changes no scores."""
        return bool(self.link) and not (self.opens or self.maps_scores or self.adds_to_scores or self.scattered_by is not None)

    @property
    def tile_file(self) -> str:
        """Of its link."""
        return f"modifiers/{self.name}"

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """The numbers that a call gives for it, by name, as they are where a caller says nothing else."""
        return {}

    def values(self, call: Call) -> Mapping[str, int | float]:
        """What its `parameters` are in a call, by name."""
        return {}

    def call_refusals(self, call: Call) -> list[str]:
        """Why no kernel can take the call's values or sizes with this modifier."""
        return []


@cache
def modifiers() -> dict[str, Modifier]:
    """Every modifier that has a file in `codegen/modifiers`, by name."""
    from . import modifiers as package

    found = discovered(package, "MODIFIER", Modifier)
    for file, modifier in found.items():
        if modifier.name != file:
            raise ArgumentError(f"name of the modifier in codegen/modifiers/{file}.py must be {file}; got {modifier.name}")
    return found


@cache
def modifier_named(name: str) -> Modifier:
    """The modifier of that name."""
    return modifiers()[kind_of(name)].of_name(name)


@cache
def modifiers_of(problem: Problem) -> tuple[Modifier, ...]:
    """Those of a problem, in the order of composition."""
    return tuple(sorted((modifier_named(name) for name in problem.modifiers), key=lambda modifier: (modifier.rank, modifier.name)))


@cache
def maps_scores(problem: Problem) -> bool:
    """Whether a modifier maps scores: see `Modifier`."""
    return any(modifier.maps_scores for modifier in modifiers_of(problem))


@cache
def adds_to_scores(problem: Problem) -> bool:
    """Whether a modifier adds to scores."""
    return any(modifier.adds_to_scores for modifier in modifiers_of(problem))


@cache
def opens_keys(problem: Problem) -> bool:
    """Whether a modifier shows keys that others hide."""
    return any(modifier.opens for modifier in modifiers_of(problem))


class Given(NamedTuple):
    """The modifiers of a call: their names, sorted, and their sizes and numbers by name, in the order of these names."""

    names: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()


NO_MODIFIERS = Given()


def given_modifiers(names: str = "", sizes: Sequence[int] = (), numbers: Sequence[float] = ()) -> Given:
    """What PyTorch's operators are told: names, separated by commas, and the modifiers' sizes and numbers, each one after the other.

    Raises ArgumentError for more or fewer sizes or numbers, or an unknown name.
    """
    if not names and not sizes and not numbers:
        return NO_MODIFIERS
    known, *wanted = _named(names)
    for kind, named, given in zip(("sizes", "numbers"), wanted, (sizes, numbers), strict=True):
        if len(given) != len(named):
            which = f"{names or 'no modifiers'}: {', '.join(named) or 'none'}"
            raise ArgumentError(f"{kind} must be those of {which}; got {shown(list(given))}")
    return Given(known, tuple(zip(wanted[0], sizes, strict=True)), tuple(zip(wanted[1], numbers, strict=True)))


@lru_cache(maxsize=2**10)
def _named(names: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The names in a text, sorted, and those of all their sizes and numbers. Raises ArgumentError for an unknown name."""
    known = tuple(sorted(listed_names(names))) if names else ()
    for name in known:
        if not is_modifier(name):
            raise choice_error("modifiers", name, modifiers())
    if len(set(known)) < len(known):
        raise ArgumentError(f"modifiers must name each once; got {names}")
    each = [modifier_named(name) for name in known]
    return known, tuple(size for one in each for size in one.sizes), tuple(number for one in each for number in one.numbers)


def with_modifiers(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The parameters of a kernel that asks the chain: with those of the problem's modifiers."""
    return _with_modifiers(block, problem.modifiers, problem.is_packed, collects_gradients(problem)) if problem.modifiers else block


@cache
def _with_modifiers(block: ParameterBlock, names: tuple[str, ...], packed: bool, collects: bool) -> ParameterBlock:
    kinds = ("parameters", *["packed_parameters"] * packed, *["sum_parameters"] * collects)
    return block.with_fields(*(field for name in names for kind in kinds for field in getattr(modifier_named(name), kind)))


def modified_example(problem: Problem, workload: Workload) -> tuple[Problem, Workload]:
    """An example of an operation: see `Operation.examples`."""
    return problem, with_sizes_to_verify(problem, workload, 1)


def with_sizes_to_verify(problem: Problem, workload: Workload, number: int | None) -> Workload:
    """The workload with `Modifier.sizes_to_verify` of the problem's modifiers."""
    sizes = {name: size for modifier in modifiers_of(problem) for name, size in modifier.sizes_to_verify(workload, number).items()}
    return replace(workload, **sizes) if sizes else workload


def modifier_scalars(problem: Problem, workload: Workload) -> dict[str, float]:
    """`Modifier.scalars` of all of a problem's."""
    return {name: value for modifier in modifiers_of(problem) for name, value in modifier.scalars(problem, workload).items()}


def modifier_operands(problem: Problem) -> tuple[Operand, ...]:
    """`Modifier.operands` of all of a problem's, in the order of their names."""
    return tuple(operand for name in problem.modifiers for operand in modifier_named(name).operands(problem))


def modifier_gradients(problem: Problem) -> tuple[Operand, ...]:
    """`Modifier.gradients` of all of a problem's, in the order of their names."""
    return tuple(operand for name in problem.modifiers for operand in modifier_named(name).gradients(problem))


@cache
def drops(problem: Problem) -> bool:
    """Whether a modifier drops elements of P."""
    return any(one.drops for one in modifiers_of(problem))


@cache
def reads_scores(problem: Problem) -> bool:
    """Whether a modifier has a tensor of which each score has an element."""
    return any(one.reads_scores for one in modifiers_of(problem))


@cache
def widest_tile(problem: Problem) -> int:
    """`Modifier.widest_tile` of all of a problem's."""
    return min((one.widest_tile for one in modifiers_of(problem)), default=2**31)


@cache
def collects_gradients(problem: Problem) -> bool:
    """Whether the main kernel sums up gradients of a modifier's tensors."""
    return problem.operation == "backward" and any(one.sum_parameters for one in modifiers_of(problem))


def modifier_values(call: Call) -> dict[str, int | float]:
    """`Modifier.values` of all of a call's."""
    if not call.problem.modifiers:
        return {}
    return {name: value for modifier in modifiers_of(call.problem) for name, value in modifier.values(call).items()}


def score_unit(call: Call) -> float:
    """What scores must be multiplied by for the softmax, as the modifiers leave them."""
    unit = call.scalars["scale"]
    if call.problem.modifiers:
        for modifier in modifiers_of(call.problem):
            own = modifier.unit(call)
            unit = unit if own is None else own
    return unit


def modifier_refusals(call: Call) -> list[str]:
    """`Modifier.call_refusals` of all of a call's."""
    own = call.problem.modifiers
    return [reason for modifier in modifiers_of(call.problem) for reason in modifier.call_refusals(call)] if own else []
