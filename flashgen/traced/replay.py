"""From what torch.compile noted of functions (recording.py) to expressions: their steps are done again, on the stand-ins of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.build import cast
from flashgen.codegen.expressions.functions import TracedFunctions
from flashgen.codegen.expressions.tree import FLOAT32, INT32, Expression, ScalarType

from .captured_number import CapturedNumber, slots_of
from .modifier import joined
from .recording import Noted, Steps
from .refusal import Restart
from .slots import Treatment
from .traced_tensor import PartialLoad, TracedTensor
from .tracing import TraceRun

TensorKind = tuple[torch.dtype, int]
"""The dtype of a captured tensor, and how many dimensions it has."""
NumberKind = tuple[str, Any]
"""Of a captured number: ("int", None), ("float", None), or ("constant", value) where it is needed as it is."""
_EXAMPLES: dict[str, Any] = {"int": 1, "float": 1.0}
_NO_ARGUMENTS: dict[str, Any] = {"slice": slice(None), "list": []}


class NeededNumbers(Exception):
    """A trace needs these captured numbers as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: set[int] = set()

    def make_constant(self, slots: set[int]) -> None:
        """See KnowsSlots."""
        self.numbers |= slots


class Replayed(NamedTuple):
    """The functions together, and which of a recording's tensors and numbers they have."""

    functions: TracedFunctions
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


def replayed(score: Steps | None, mask: Steps | None, tensors: Sequence[TensorKind], numbers: Sequence[NumberKind]) -> Replayed:
    """What the functions are together, of a recording's tensors and numbers, which are of these kinds.

    Raises ArgumentError for what cannot be traced, and NeededNumbers.
    """
    runs = {argument: _Replay(argument, tensors, numbers) for argument in ("score_mod", "mask_mod")}
    trees = [None if steps is None else run.tree(steps) for run, steps in zip(runs.values(), (score, mask), strict=True)]
    slots = {name: slot for run in runs.values() for name, slot in run.slots_of_numbers().items()}
    found = joined(*trees, tuple(map(_name, range(len(tensors)))), tuple(slots))
    of_numbers = [*slots.values()]
    own_numbers = tuple(of_numbers) if found.numbers is None else tuple(of_numbers[i] for i in found.numbers)
    return Replayed(found.modifier, tuple(range(len(tensors))) if found.tensors is None else found.tensors, own_numbers)


def _name(tensor: int) -> str:
    return f"t{tensor}"


class _Replay(TraceRun):
    """Of a function that does not run any more: no line of it can be named, and as a mode this is told of nothing."""

    def __init__(self, argument: str, tensors: Sequence[TensorKind], numbers: Sequence[NumberKind]) -> None:
        super().__init__(argument, Treatment(is_opaque=True))
        self._needed = NeededNumbers()
        self.captures.values.extend(_EXAMPLES.get(kind) for kind, _ in numbers)  # a number's slot is the one of the recording
        self._of: dict[str, list[Any]] = {
            "made": [*self._inputs()],
            "tensor": [self._tensor(_name(i), *kind) for i, kind in enumerate(tensors)],
            "number": [
                value if kind == "constant" else CapturedNumber(self._needed, ("slot", i), _EXAMPLES[kind])
                for i, (kind, value) in enumerate(numbers)
            ],
        }

    def _tensor(self, name: str, dtype: torch.dtype, dimensions: int) -> TracedTensor:
        return TracedTensor(self._loaded(PartialLoad(None, name, dtype, (1,) * dimensions, torch.device("cpu"))))

    def refuse(self, must: str, got: str) -> NoReturn:
        """See Context."""
        raise ArgumentError(f"{self._argument} must {must}; got {got}")

    def number(self, given: CapturedNumber, type: ScalarType) -> Expression:
        """See Context. A whole number stays one, as a symbol does that stands for it."""
        if type is FLOAT32 and isinstance(given, int):
            return cast(super().number(given, INT32), FLOAT32)
        return super().number(given, type)

    def tree(self, steps: Steps) -> Expression:
        """The function's. Raises as `replayed`."""
        done, result = steps
        try:
            for name, positional, named in done:
                arguments = tuple(map(self._read, positional)), {key: self._read(value) for key, value in named}
                self._of["made"].append(self.__torch_function__(SimpleNamespace(__name__=name), (), *arguments))
            return self._result(self._read(result))
        except Restart:
            raise self._needed from None

    def slots_of_numbers(self) -> dict[str, int]:
        """Of the numbers in the tree, by name. Raises NeededNumbers for one that is computed of others."""
        for formula, _ in self._numbers:
            if formula[0] != "slot":
                self._needed.make_constant(slots_of(formula))
                raise self._needed
        return {name: formula[1] for (formula, _), name in self._numbers.items()}

    def _read(self, noted: Noted) -> Any:
        kind, what = noted
        if kind == "tuple":
            return tuple(map(self._read, what))
        if kind == "other":
            return _NO_ARGUMENTS.get(what, type(what, (), {})())
        return what if kind == "constant" else self._of[kind][what]
