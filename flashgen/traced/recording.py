"""What torch.compile does in place of a trace: it looks into the function itself, and `Recording` notes each call of a PyTorch function.

Dynamo runs all here, on tensors without values. What was noted are constants, of which replay.py makes an expression; what the function
captures are tensors and numbers of the graph. So whatever Dynamo looks into may be captured, and its guards notice other values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import assume_constant_result
from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value
from torch.overrides import TorchFunctionMode

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.bounds import NUMBER_LIMIT

from .torch_functions import handler_of

Noted = tuple[str, Any]
"""("made", i): the i-th of the function's arguments and of what its steps made. ("tensor", i), ("number", i): what was captured.

("tuple", all in it), ("constant", value), or ("other", type) for what no function takes.
"""
Step = tuple[str, tuple[Noted, ...], tuple[tuple[str, Noted], ...]]
"""The name of a PyTorch function, and its arguments: those without and with names."""
Steps = tuple[tuple[Step, ...], Noted]
"""A function: its steps, and what it returns."""

# No tensor on this device is taken by an operator: so a stand-in that the recording has lost sight of is refused.
_NOWHERE = torch.device("meta")
_READ = ("__get__", "size", "stride", "dim", "ndimension", "numel", "nelement", "is_floating_point", "__len__", "element_size")
_IN_PLACE = [f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")]
_ARGUMENTS = {"score_mod": (torch.float32, *(torch.int32,) * 4), "mask_mod": (torch.int32,) * 4}
_LOADED_AS_FLOAT32 = (torch.bfloat16, torch.float16)


class Recording(TorchFunctionMode):
    """Of the functions of one call.

    tensors: that they capture, each once. numbers: that they capture, where these are symbols; others are constants, which Dynamo guards
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self._captured: dict[torch.Tensor, int] = {}
        self._twins: list[torch.Tensor] = []  # of the captured tensors, nowhere
        self._argument = ""
        self._made: dict[torch.Tensor, int] = {}
        self._count = 0
        self._steps: list[Step] = []

    def steps(self, function: Callable[..., Any], argument: str) -> Steps:
        """Of a function that is given as `argument`, score_mod or mask_mod."""
        self._argument, self._made, self._count, self._steps = argument, {}, 0, []
        given = [self._keep(torch.empty((), dtype=dtype, device=_NOWHERE)) for dtype in _ARGUMENTS[argument]]
        with self:
            returned = function(*given)
        return tuple(self._steps), self._noted(returned)

    def _keep(self, made: torch.Tensor) -> torch.Tensor:
        self._made[made] = self._count
        self._count += 1
        return made

    def _noted(self, value: Any) -> Noted:
        if isinstance(value, torch.Tensor):
            if value in self._made:
                return "made", self._made[value]
            if value not in self._captured:
                self._captured[value] = len(self.tensors)
                self.tensors.append(value)
                self._twins.append(torch.empty(value.shape, dtype=value.dtype, device=_NOWHERE))
            return "tensor", self._captured[value]
        if isinstance(value, tuple):
            return "tuple", tuple([self._noted(each) for each in value])
        if type(value) in (bool, int, float):
            too_large = type(value) is int and not -NUMBER_LIMIT <= value <= NUMBER_LIMIT
            if type(value) is bool or too_large or has_static_value(value):
                return "constant", guard_scalar(value)
            self.numbers.append(value)
            return "number", len(self.numbers) - 1
        if value is None or value is ... or isinstance(value, (bool, int, float, str, torch.dtype)):
            return "constant", value
        return "other", type(value).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (name, kind), named = described(func), kwargs or {}
        if kind == "reads":
            return func(*args, **named)
        if kind == "unknown":
            must = "compute with functions of torch that flashgen knows (docs/traced-modifiers.md has the list)"
            raise ArgumentError(f"{self._argument} must {must}; got torch's {name}")
        noted = tuple([self._noted(each) for each in args])
        self._steps.append((name, noted, tuple([(key, self._noted(each)) for key, each in named.items()])))
        if kind == "in place":
            self._count += 1
            return args[0]
        if name == "__getitem__":
            return self._keep(_element(*args))
        made = func(*[self._twin(each) for each in args], **{key: self._twin(each) for key, each in named.items()})
        if made.device != _NOWHERE:
            made = torch.empty(made.shape, dtype=made.dtype, device=_NOWHERE)
        return self._keep(made)

    def _twin(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value in self._made else self._twins[self._captured[value]]
        return _NOWHERE if isinstance(value, torch.device) else value


def _element(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """What has the shape of tensor[index]: an index by a tensor without dimensions would ask for its value."""
    shape = tensor.shape[len(index) if isinstance(index, tuple) else 1 :]
    dtype = torch.float32 if len(shape) == 0 and tensor.dtype in _LOADED_AS_FLOAT32 else tensor.dtype
    return torch.empty(shape, dtype=dtype, device=_NOWHERE)


@assume_constant_result  # type: ignore[untyped-decorator]
def described(function: Any) -> tuple[str, str]:
    """The name of a PyTorch function, and what it does: it reads what a tensor is, makes one, changes one in place, or is unknown."""
    name = getattr(function, "__name__", str(function))
    if getattr(function, "__module__", "") == "_operator":  # in what is exported operators are Python's
        name = name.removesuffix("_")
        name = f"{name[1:]}_" if name in _IN_PLACE else "__getitem__" if name == "getitem" else name
    if name in _READ:
        return name, "reads"
    in_place = name.endswith("_") and not name.startswith("__")
    if name != "__getitem__" and handler_of(name[:-1] if in_place else name) is None:
        return name, "unknown"
    return name, "in place" if in_place else "makes"
