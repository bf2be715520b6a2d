"""`traced_call` within torch.compile, which looks into no trace: what functions do is recorded there (traced/recording.py).

Dynamo runs `recorded_call`. What constants decide is decided out of its sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import assume_constant_result
from torch.fx.experimental.symbolic_shapes import guard_scalar

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.expressions.tree import Expression

from ..traced.modifier import functions_given
from ..traced.recording import Recording, Steps
from ..traced.replay import NeededNumbers, NumberKind, TensorKind, replayed
from .traced_call import ModFunction, TracedCall, function_parts

_End = tuple[str, int] | None  # ("constant", value) or ("number", which of the recording's)


class _Told(NamedTuple):
    """What a recording comes to. error: why it cannot be traced. needed: numbers without whose values nothing can be told.

    left, right: of the window of the mask_mod. tensors, whole, numbers: which of the recording's the modifier has
    """

    error: str = ""
    needed: tuple[int, ...] = ()
    name: str = ""
    left: _End = None
    right: _End = None
    tensors: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


def recorded_call(
    score_mod: Any, mask_mod: ModFunction | None, top_left: int | None, takes_window: bool, device: torch.device | None = None
) -> TracedCall:
    """See `traced_call`. Symbols that stand for captured whole numbers stay symbols; of other numbers Dynamo guards the values.

    device: where kernels read captured tensors
    """
    score_mod, mask_mod = functions_given(score_mod, mask_mod)
    recording, takes_window = Recording(), takes_window and top_left is not None
    score, mask = (
        None if function is None else recording.steps(function, argument)
        for function, argument in ((score_mod, "score_mod"), (mask_mod, "mask_mod"))
    )
    numbers = recording.numbers
    of_tensors = tuple([(tensor.dtype, tensor.dim()) for tensor in recording.tensors])
    of_numbers: list[NumberKind] = [("float" if isinstance(number, float) else "int", None) for number in numbers]
    told = _Told(*_told(score, mask, of_tensors, tuple(of_numbers), takes_window))
    while told.needed:
        for i in told.needed:
            of_numbers[i] = ("constant", guard_scalar(numbers[i]))
        told = _Told(*_told(score, mask, of_tensors, tuple(of_numbers), takes_window))
    if told.error:
        raise ArgumentError(told.error)
    window = None
    if top_left is not None and (told.left is not None or told.right is not None):
        left, right = _value(told.left, numbers), _value(told.right, numbers)
        window = (None if left is None else left - top_left, None if right is None else right + top_left)
    whole = [numbers[i] for i in told.whole]
    others = [float(guard_scalar(numbers[i])) for i in told.numbers]
    return TracedCall(
        window, None, None, None, None, told.name, whole, others, [_moved(recording.tensors[i], device) for i in told.tensors]
    )


def _moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """A tensor without dimensions goes with those of any device, as in PyTorch, where functions make such constants on the CPU."""
    return tensor if device is None or tensor.dim() or tensor.device.type != "cpu" or tensor.device == device else tensor.to(device)


@assume_constant_result  # type: ignore[untyped-decorator]
def _told(
    score: Steps | None, mask: Steps | None, tensors: Sequence[TensorKind], numbers: Sequence[NumberKind], takes_window: bool
) -> tuple[Any, ...]:
    """A `_Told` in Dynamo's types. An error is no exception, which Dynamo would take for one of its own."""
    try:
        functions, of_tensors, of_numbers = replayed(score, mask, tensors, numbers)
        parts = function_parts(functions.score, functions.mask, takes_window)
    except ArgumentError as error:
        unknown = tuple(i for i, (kind, _) in enumerate(numbers) if kind != "constant")  # which may be to blame
        return tuple(_Told(needed=unknown)) if unknown else tuple(_Told(error=str(error)))
    except NeededNumbers as needed:
        return tuple(_Told(needed=tuple(sorted(needed.numbers))))
    left, right = (_end(end, of_numbers) for end in (parts.left, parts.right))
    rest = parts.rest
    whole, others = (tuple(of_numbers[i] for i in which) for which in (rest.whole, rest.numbers))
    return tuple(_Told("", (), rest.name, left, right, tuple(of_tensors[i] for i in rest.tensors), whole, others))


def _end(end: Expression | None, numbers: Sequence[int]) -> _End:
    if end is None:
        return None
    return ("constant", int(end.value)) if end.operation == "constant" else ("number", numbers[int(end.value[1:])])


def _value(end: _End, numbers: Sequence[int]) -> int | None:
    if end is None:
        return None
    kind, value = end
    return value if kind == "constant" else numbers[value]
