"""Runs a function once on stand-ins, and takes down what it computes: `trace`."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from flashgen.codegen.errors import ArgumentError, choice_error, shown
from flashgen.codegen.expressions.blocks import SMALLEST_BLOCK, divisors_of_positions
from flashgen.codegen.expressions.bounds import NUMBER_LIMIT, ranges_of
from flashgen.codegen.expressions.build import apply, less, negative
from flashgen.codegen.expressions.linear import is_exact
from flashgen.codegen.expressions.tree import (
    FLOAT32,
    INPUTS,
    INT32,
    LOADED_AS,
    MAX_RANK,
    Expression,
    ScalarType,
    constant,
    input_node,
    load_node,
    number_node,
)

from .captured_number import CapturedNumber, Formula, is_captured, parts_of, slots_of, value_of
from .captures import Captures
from .promotion import Promotion
from .refusal import Restart, refuse
from .slots import Slot, Treatment
from .torch_functions import handler_of
from .traced_tensor import STORED, PartialLoad, Scalar, TracedTensor

ARGUMENTS = {"score_mod": tuple(INPUTS), "mask_mod": tuple(INPUTS)[1:]}
"""What functions are called with, by the name of the argument of flashgen.attention that they are given as."""
_MOST_TRACES = 200
_CURES = {
    "bool": "branch on a tensor in Python, by if, and, or, not, min or a chain of comparisons: use torch.where, &, |, ~ or torch.minimum",
    "index": "use a tensor as a Python integer, as range or a list's index do: capture a tensor and index it, or use a captured number",
    "iter": "loop over a tensor: loop over a range of captured numbers, and index",
    "array": "give tensors to NumPy: use the functions of torch",
    "item": "read a tensor's value by item() or tolist(): compute with the tensor itself",
}
_SUMS = {operator.neg: "neg", operator.add: "add", operator.sub: "add"}
_log = logging.getLogger("flashgen")
_CURES |= dict.fromkeys(
    ("int", "float", "complex"), "make a Python number of a tensor, as math and int() do: use torch's functions, or .to(dtype)"
)
_CURES |= {"tolist": _CURES["item"], "numpy": _CURES["array"], "len": _CURES["iter"], "contains": _CURES["bool"], "unbind": _CURES["iter"]}


@dataclass(frozen=True)
class Trace:
    """What a function computes, and what it was read from.

    tree:    of provisional names
    slots:   see captures
    tensors: the slots of captured tensors, by name; numbers: formulas of captured numbers, by name
    is_open: it holds for this call alone. `met`: tensors that have no slot, which only open traces have
    """

    tree: Expression
    slots: tuple[Slot, ...]
    values: tuple[Any, ...]
    tensors: Mapping[str, int]
    numbers: Mapping[str, Formula]
    is_open: bool
    met: Mapping[str, torch.Tensor]


def trace(function: Callable[..., Any], argument: str) -> Trace:
    """The trace of a function, given as `argument`, a key of ARGUMENTS.

    Raises ArgumentError for what cannot be traced; its message says which line does it, and what to do instead.
    """
    if argument not in ARGUMENTS:
        raise choice_error("argument", argument, ARGUMENTS)
    if not callable(function):
        raise ArgumentError(f"{argument} must be a function of ({', '.join(ARGUMENTS[argument])}); got {shown(function)}")
    treatment = Treatment()
    for _ in range(_MOST_TRACES):
        run = TraceRun(argument, treatment)
        try:
            done = run.trace(function)
            if not run.captures.wants_restart:
                return done
        except Restart:
            continue
        except Exception as error:
            if treatment.is_opaque or run.captures.has_effects:
                raise
            # Stand-ins of captured values may be to blame: they are given up one after the other.
            _log.debug("%s is traced again with fewer stand-ins: %r", argument, error)
            treatment = replace(treatment, all_constants=True, is_opaque=treatment.all_constants)
    raise ArgumentError(f"{argument} must read the same captured values whenever it is called; got {shown(function)}, which does not")


class TraceRun(TorchFunctionMode):
    """One run of a function. As a mode it is told of each call of a PyTorch function."""

    def __init__(self, argument: str, treatment: Treatment) -> None:
        super().__init__()
        self._argument = argument
        self.captures = Captures(treatment, self, self.refuse)
        self._promotion = Promotion(self)
        self._numbers: dict[tuple[Formula, ScalarType], str] = {}
        self._tensors: dict[str, int] = {}
        self._met: dict[str, torch.Tensor] = {}

    def trace(self, function: Callable[..., Any]) -> Trace:
        """Calls the function."""
        self._check_signature(function)
        stand_in = self.captures.root(function)
        given = self._inputs()
        with self:
            returned = stand_in(*given)
            tree = self._result(returned)
        self.captures.require_unchanged()
        slots, values = tuple(self.captures.slots), tuple(self.captures.values)
        numbers = {name: formula for (formula, _), name in self._numbers.items()}
        return Trace(tree, slots, values, self._tensors, numbers, self.captures.is_open, self._met)

    def _inputs(self) -> list[TracedTensor]:
        types = {FLOAT32: torch.float32, INT32: torch.int32}
        return [TracedTensor(Scalar(input_node(name), types[INPUTS[name]])) for name in ARGUMENTS[self._argument]]

    def refuse(self, must: str, got: str) -> NoReturn:
        """See Context."""
        refuse(self._argument, must, got)

    def number(self, given: CapturedNumber, type: ScalarType) -> Expression:
        """See Context. An integer that is too large for a number is a constant from the next trace on."""
        formula, value = parts_of(given)
        if type is INT32:
            written = self._written(formula)
            if written is not None and is_exact(written, ranges_of(written)):
                return written
        if formula[0] is operator.neg and type is FLOAT32:
            return negative(self._leaf(formula[1], -value, type))
        return self._leaf(formula, value, type)

    def _written(self, formula: Formula) -> Expression | None:
        """A sum of integers as an expression: so `-n` and `n + 1` are no other numbers, and `q - k >= -n` is `k - q <= n`."""
        head, *rest = formula
        if head == "slot":
            value = self.captures.values[rest[0]]
            return self._leaf(formula, value, INT32) if type(value) is int else None
        if head == "constant":
            return constant(rest[0], INT32) if type(rest[0]) is int and abs(rest[0]) <= NUMBER_LIMIT else None
        parts = [self._written(each) for each in rest]
        if head in _SUMS and None not in parts:
            return apply(_SUMS[head], *parts) if head is not operator.sub else less(*parts)  # type: ignore[arg-type]
        return None

    def _leaf(self, formula: Formula, value: Any, type: ScalarType) -> Expression:
        if type is INT32 and not -NUMBER_LIMIT <= value <= NUMBER_LIMIT:
            self.captures.make_constant(slots_of(formula))
            raise Restart
        name = self._numbers.setdefault((formula, type), f"{self._argument}.n{len(self._numbers)}")
        return number_node(name, type)

    def tensor(self, tensor: torch.Tensor, slot: int) -> TracedTensor:
        """See TensorStandIns."""
        name = f"{self._argument}.t{slot}"
        self._tensors[name] = slot
        return TracedTensor(self._loaded(PartialLoad(slot, name, tensor.dtype, tuple(tensor.shape), tensor.device)))

    def captured(self, tensor: torch.Tensor) -> Scalar | PartialLoad:
        """See Context. The tensor has no slot: so whoever handed it out must be asked again on each call."""
        self.captures.is_open = True
        name = next((name for name, each in self._met.items() if each is tensor), f"{self._argument}.m{len(self._met)}")
        self._met[name] = tensor
        return self._loaded(PartialLoad(None, name, tensor.dtype, tuple(tensor.shape), tensor.device))

    def _loaded(self, partial: PartialLoad) -> Scalar | PartialLoad:
        """A captured tensor with all its indices is a scalar."""
        if len(partial.indices) < len(partial.shape) or partial.dtype not in STORED:
            return partial
        divisors = divisors_of_positions(partial.indices)
        for (formula, _), name in self._numbers.items():
            if name in divisors and value_of(formula, self.captures.values) % SMALLEST_BLOCK == 0:
                self.captures.make_constant(slots_of(formula))  # of a table of blocks: kernels know how large these are
                raise Restart
        dtype = torch.float32 if LOADED_AS[STORED[partial.dtype]] is FLOAT32 else partial.dtype
        return Scalar(load_node(partial.name, STORED[partial.dtype], partial.indices), dtype)

    def _check_signature(self, function: Callable[..., Any]) -> None:
        wanted = ARGUMENTS[self._argument]
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*wanted)
        except TypeError:
            raise ArgumentError(f"{self._argument} must take ({', '.join(wanted)}); got a function of {signature}") from None

    def _result(self, returned: Any) -> Expression:
        made = "a float32 score" if self._argument == "score_mod" else "a bool: whether the query sees the key"
        if self._argument == "mask_mod" and type(returned) is bool:
            return constant(returned, ScalarType.BOOL)
        if not isinstance(returned, torch.Tensor):
            kind = "a Python number" if is_captured(returned) else shown(returned)
            raise ArgumentError(f"{self._argument} must return {made}; got {kind}")
        traced = returned.traced if type(returned) is TracedTensor else self.captured(returned)
        wanted = torch.float32 if self._argument == "score_mod" else torch.bool
        if not isinstance(traced, Scalar) or traced.dtype is not wanted:
            dtype = str(traced.dtype).removeprefix("torch.")
            rank = 0 if isinstance(traced, Scalar) else len(traced.shape) - len(traced.indices)
            raise ArgumentError(f"{self._argument} must return {made}; got a tensor of {rank} dimensions and dtype {dtype}")
        return traced.node

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            return self._attribute(func.__self__.__name__, *args)
        plain = name.strip("_")
        if name == "__getitem__":
            return TracedTensor(self._indexed(*args))
        if plain in ("size", "dim", "ndimension", "numel", "is_floating_point", "len") and isinstance(args[0], torch.Tensor):
            return self._about(plain, *args, **kwargs)
        if (name.startswith("__") and plain in _CURES) or name in ("item", "tolist", "numpy", "unbind"):
            self.refuse(f"not {_CURES[plain]}", f"a call of {name}")
        if name == "__repr__" or name == "__format__":
            return "a tensor of a traced function"
        in_place = not name.startswith("__") and name.endswith("_")
        handler = handler_of(name[:-1] if in_place else name)
        if handler is None or kwargs.get("out") is not None:
            self.refuse(
                "compute with functions of torch that flashgen knows (docs/traced-modifiers.md has the list)", f"torch's {name or func}"
            )
        try:
            made: Scalar = handler(self._promotion, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # not of this call, but of one below
            self.refuse(f"call {name} with arguments that flashgen knows", str(error))
        return self._changed(args[0], made) if in_place else TracedTensor(made)

    def _changed(self, tensor: Any, made: Scalar) -> TracedTensor:
        if type(tensor) is not TracedTensor or not isinstance(tensor.traced, Scalar) or tensor.traced.node.operation == "load":
            self.refuse("not change tensors that it captures", "an operation in place")
        before = tensor.traced.dtype
        tensor.traced = Scalar(self._promotion.in_dtype(made, before), before)
        return tensor

    def _indexed(self, tensor: Any, index: Any) -> Scalar | PartialLoad:
        traced = tensor.traced if type(tensor) is TracedTensor else self.captured(tensor)
        if isinstance(traced, Scalar):
            if index == ():
                return traced
            self.refuse("not index a tensor without dimensions", "such an index")
        if traced.dtype not in STORED:
            allowed = ", ".join(STORED.values())
            self.refuse(f"capture tensors of {allowed}", f"one of {str(traced.dtype).removeprefix('torch.')}")
        given = index if isinstance(index, tuple) else (index,)
        found = replace(traced, indices=(*traced.indices, *map(self._index, given)))
        if len(traced.shape) > MAX_RANK:
            self.refuse(f"capture tensors of at most {MAX_RANK} dimensions", f"one of {len(traced.shape)}")
        if len(found.indices) > len(traced.shape):
            self.refuse(f"have at most {len(traced.shape)} indices for this tensor", f"{len(found.indices)}")
        return self._loaded(found)

    def _index(self, index: Any) -> Expression:
        if isinstance(index, (slice, list)) or index is None or index is ...:
            self.refuse("index captured tensors by integers", f"{index!r}")
        value = self._promotion.value(index)
        if not isinstance(value, Scalar):
            if isinstance(value, (bool, float)):
                self.refuse("index captured tensors by integers", f"{value!r}")
            return self._promotion.in_dtype(value, torch.int32)
        if value.dtype in (torch.bool, torch.uint8) or value.dtype.is_floating_point:
            dtype = str(value.dtype).removeprefix("torch.")
            self.refuse(f"index captured tensors by integers, such as {dtype}.to(torch.int32) gives", f"an index of {dtype}")
        return value.node

    def _attribute(self, name: str, tensor: torch.Tensor) -> Any:
        if name in ("dtype", "device", "ndim", "layout"):
            with torch._C.DisableTorchFunctionSubclass():
                return getattr(tensor, name)
        if name == "shape":
            return self._about("size", tensor)
        self.refuse("compute with functions of torch that flashgen knows (docs/traced-modifiers.md has the list)", f"the attribute {name}")

    def _about(self, name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        traced = tensor.traced if type(tensor) is TracedTensor else None
        if isinstance(traced, PartialLoad) and name in ("size", "numel", "len") and traced.tensor is not None:
            self.captures.needs_shape(traced.tensor)
        if traced is None and name in ("size", "numel", "len"):
            self.captured(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return len(tensor) if name == "len" else getattr(tensor, name)(*args, **kwargs)
