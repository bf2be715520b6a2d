"""The functions of PyTorch that a traced function may call, by their names: as functions, as methods and as operators.

A handler gets the trace's Promotion and the arguments of the call, whose names are PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flashgen.codegen.expressions.build import apply, cast, less, negative
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, Expression, constant

from .promotion import Promotion, Value
from .traced_tensor import Scalar

Handler = Callable[..., Scalar]
_INF = constant(math.inf, FLOAT32)


def _of_floats(operator: str) -> Handler:
    return lambda p, input: Scalar(apply(operator, *p.floats(input)), torch.float32)


def _same_dtype(function: Callable[[Expression], Expression]) -> Handler:
    def handler(p: Promotion, input: Any) -> Scalar:
        scalar = p.scalar(input)
        if scalar.dtype is torch.bool:
            _refuse_bool(p)
        return Scalar(p.wrapped(function(scalar.node), scalar.dtype), scalar.dtype)

    return handler


def _refuse_bool(p: Promotion) -> None:
    p.refuse("use &, | and ~ on bools, or make them numbers first", "arithmetic on a bool")


def _binary(operator: str, of_bools: str = "") -> Handler:
    """Of operators that compute in the dtype of both. `of_bools`: what PyTorch does with two bools; nothing: it refuses them."""

    def handler(p: Promotion, input: Any, other: Any) -> Scalar:
        (a, b), dtype = p.together(input, other)
        if dtype is torch.bool:
            if not of_bools:
                _refuse_bool(p)
            return Scalar(apply(of_bools, a, b), dtype)
        return Scalar(p.wrapped(apply(operator, a, b), dtype), dtype)

    return handler


def _swapped(handler: Handler) -> Handler:
    return lambda p, input, other: handler(p, other, input)


def _add(p: Promotion, input: Any, other: Any, *, alpha: Any = 1) -> Scalar:
    scaled = other if type(alpha) is int and alpha == 1 else _mul(p, other, alpha)
    return _plain_add(p, input, scaled)


def _sub(p: Promotion, input: Any, other: Any, *, alpha: Any = 1) -> Scalar:
    scaled = other if type(alpha) is int and alpha == 1 else _mul(p, other, alpha)
    values = p.value(input), p.value(scaled)
    if any(isinstance(value, Scalar) and value.dtype is torch.bool for value in values):
        _refuse_bool(p)
    (a, b), dtype = p.together(*values)
    return Scalar(p.wrapped(less(a, b), dtype), dtype)


_plain_add, _mul = _binary("add", "or"), _binary("mul", "and")
_floor_divide = _binary("floor_div")


def _div(p: Promotion, input: Any, other: Any, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode == "floor":
        return _floor_divide(p, input, other)
    values = p.value(input), p.value(other)
    quotient = Scalar(apply("div", *p.floats(*values)), torch.float32)
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc" or not p.dtype_of(*values).is_floating_point:
        p.refuse("divide with rounding_mode None or 'floor'", repr(rounding_mode))
    return Scalar(apply("trunc", quotient.node), torch.float32)


def _pow(p: Promotion, input: Any, exponent: Any) -> Scalar:
    (a, b), dtype = p.together(input, exponent)
    if not dtype.is_floating_point:
        if b.operation != "constant" or dtype is torch.bool or not 0 <= b.value <= 16:
            p.refuse("raise integers to constant powers from 0 to 16, or make them floats first", "another power")
        power = constant(1, a.type)
        for _ in range(b.value):
            power = apply("mul", power, a)
        return Scalar(p.wrapped(power, dtype), dtype)
    if a.operation != "constant" and b.operation != "constant":
        p.refuse("have a constant base or exponent in pow: use torch.exp(b * torch.log(a))", "a power of two variables")
    if a.operation == "constant" and b.operation != "constant" and not a.value > 0:
        p.refuse("have a positive constant base in pow", f"{a.value}")
    return Scalar(apply("pow", a, b), dtype)


def _comparison(operator: str, swapped: bool = False) -> Handler:
    def handler(p: Promotion, input: Any, other: Any) -> Scalar:
        (a, b), dtype = p.together(input, other)
        if dtype is torch.bool and operator in ("lt", "le"):
            (a, b), _ = p.together(input, other, dtype=torch.int32)
        return Scalar(apply(operator, *((b, a) if swapped else (a, b))), torch.bool)

    return handler


def _bitwise(operator: str) -> Handler:
    def handler(p: Promotion, input: Any, other: Any) -> Scalar:
        (a, b), dtype = p.together(input, other)
        if dtype.is_floating_point:
            p.refuse("use &, | and ^ on bools and integers", "float32")
        return Scalar(apply(operator, a, b), dtype)

    return handler


def _bitwise_not(p: Promotion, input: Any) -> Scalar:
    scalar = p.scalar(input)
    if scalar.dtype.is_floating_point:
        p.refuse("use ~ on bools and integers", "float32")
    return Scalar(p.wrapped(apply("not", scalar.node), scalar.dtype), scalar.dtype)


def _shift(operator: str) -> Handler:
    def handler(p: Promotion, input: Any, other: Any) -> Scalar:
        (a, b), dtype = p.together(input, other)
        if dtype.is_floating_point or dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
            p.refuse("shift int32 or int64", f"{dtype}")
        return Scalar(apply(operator, a, b), dtype)

    return handler


def _logical(operator: str) -> Handler:
    return lambda p, input, other: Scalar(apply(operator, *p.together(input, other, dtype=torch.bool)[0]), torch.bool)


def _where(p: Promotion, condition: Any, input: Any, other: Any) -> Scalar:
    chosen = p.scalar(condition)
    if chosen.dtype is not torch.bool:
        p.refuse("have a bool as the condition of torch.where", f"{chosen.dtype}")
    (a, b), dtype = p.together(input, other)
    return Scalar(apply("where", chosen.node, a, b), dtype)


def _masked_fill(p: Promotion, input: Any, mask: Any, value: Any) -> Scalar:
    kept = p.scalar(input)
    return Scalar(apply("where", p.scalar(mask).node, p.in_dtype(p.value(value), kept.dtype), kept.node), kept.dtype)


def _clamp(p: Promotion, input: Any, min: Any = None, max: Any = None) -> Scalar:
    ends = [end for end in (min, max) if end is not None]
    values: list[Value] = [p.value(each) for each in (input, *ends)]
    dtype = p.dtype_of(*values)
    if dtype is torch.bool or not ends:
        p.refuse("clamp numbers by min, max or both", "a bool" if ends else "neither")
    node, *limits = (p.in_dtype(value, dtype) for value in values)
    for operator, end in zip(["max"] * (min is not None) + ["min"] * (max is not None), limits, strict=True):
        node = apply(operator, node, end)
    return Scalar(node, dtype)


def _classified(test: Callable[[Expression], Expression]) -> Handler:
    return lambda p, input: Scalar(test(*p.floats(input)), torch.bool)


def _cast_to(dtype: torch.dtype) -> Handler:
    def handler(p: Promotion, input: Any, *, memory_format: Any = None) -> Scalar:
        return Scalar(p.in_dtype(p.value(input), dtype), dtype)

    return handler


def _to(p: Promotion, input: Any, *args: Any, **options: Any) -> Scalar:
    scalar, dtype = p.scalar(input), options.get("dtype")
    for each in args:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, torch.Tensor):
            dtype = p.scalar(each).dtype
    return scalar if dtype is None else Scalar(p.in_dtype(scalar, dtype), dtype)


def _itself(p: Promotion, input: Any, **options: Any) -> Scalar:
    return p.scalar(input)


def _refuse_inplace(p: Promotion, inplace: bool) -> None:
    if inplace:
        p.refuse("leave inplace out of relu and silu, and use what they return", "inplace=True")


def _relu(p: Promotion, input: Any, inplace: bool = False) -> Scalar:
    _refuse_inplace(p, inplace)
    return _clamp(p, input, 0)


def _silu(p: Promotion, input: Any, inplace: bool = False) -> Scalar:
    _refuse_inplace(p, inplace)
    return _mul(p, input, HANDLERS["sigmoid"](p, input))


def _constant(p: Promotion, value: Any, dtype: torch.dtype | None) -> Scalar:
    given = p.value(value)
    dtype = dtype or p.dtype_of(given)
    return Scalar(p.in_dtype(given, dtype), dtype)


def _tensor(p: Promotion, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False) -> Scalar:
    if isinstance(data, (list, tuple)):
        p.refuse("make tensors of more than one number outside, and capture them", "a list")
    return _constant(p, data, dtype)


def _filled(value: Any, of_like: bool = False) -> Handler:
    """Of zeros, ones, and full, which is given its value. `of_like`: of a tensor's dtype, which comes first, if no other is asked for."""

    def handler(p: Promotion, *args: Any, dtype: torch.dtype | None = None, size: Any = None, fill_value: Any = value, **_: Any) -> Scalar:
        rest = list(args)
        like = p.scalar(rest.pop(0)).dtype if of_like else None
        filling = rest.pop() if fill_value is None and rest else fill_value
        shape = rest[0] if len(rest) == 1 else rest if size is None else size
        if not isinstance(shape, (tuple, list)) or len(shape):
            p.refuse("make tensors of more than one number outside, and capture them", f"shape {shape}")
        return _constant(p, filling, dtype or like or (None if value is None else torch.float32))

    return handler


def _like(value: Any) -> Handler:
    def handler(p: Promotion, input: Any, fill_value: Any = value, *, dtype: torch.dtype | None = None, **options: Any) -> Scalar:
        return _constant(p, fill_value, dtype or p.scalar(input).dtype)

    return handler


_UNARY = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf")
HANDLERS: dict[str, Handler] = {
    **{name: _of_floats(name) for name in _UNARY},
    **{"special_expit": _of_floats("sigmoid"), "special_erf": _of_floats("erf"), "special_exp2": _of_floats("exp2")},
    **{"special_expm1": _of_floats("expm1"), "special_log1p": _of_floats("log1p")},
    **{name: _same_dtype(lambda x, name=name: apply(name, x) if x.type is FLOAT32 else x) for name in ("floor", "ceil", "round", "trunc")},  # type: ignore[misc]
    **{"neg": _same_dtype(negative), "abs": _same_dtype(lambda x: apply("abs", x)), "sign": _same_dtype(lambda x: apply("sign", x))},
    **{
        "positive": _itself,
        "clone": _itself,
        "detach": _itself,
        "contiguous": _itself,
        "square": _same_dtype(lambda x: apply("mul", x, x)),
    },
    "reciprocal": lambda p, input: Scalar(apply("div", constant(1.0, FLOAT32), *p.floats(input)), torch.float32),
    **{"add": _add, "sub": _sub, "rsub": _swapped(_sub), "mul": _mul, "div": _div, "rdiv": _swapped(_div), "floor_divide": _floor_divide},
    **{"rfloordiv": _swapped(_floor_divide), "remainder": _binary("mod"), "rmod": _swapped(_binary("mod"))},
    **{"pow": _pow, "rpow": _swapped(_pow), "maximum": _binary("max", "or"), "minimum": _binary("min", "and")},
    **{"eq": _comparison("eq"), "ne": _comparison("ne"), "lt": _comparison("lt"), "le": _comparison("le")},
    **{"gt": _comparison("lt", True), "ge": _comparison("le", True)},
    **{f"bitwise_{name}": _bitwise(name) for name in ("and", "or", "xor")},
    **{"bitwise_not": _bitwise_not, "bitwise_left_shift": _shift("shift_left"), "bitwise_right_shift": _shift("shift_right")},
    **{"rlshift": _swapped(_shift("shift_left")), "rrshift": _swapped(_shift("shift_right"))},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor")},
    "logical_not": lambda p, input: Scalar(apply("not", cast(p.scalar(input).node, BOOL)), torch.bool),
    **{"where": _where, "masked_fill": _masked_fill, "clamp": _clamp, "relu": _relu, "silu": _silu},
    **{"clamp_min": lambda p, input, min: _clamp(p, input, min), "clamp_max": lambda p, input, max: _clamp(p, input, None, max)},
    "isnan": _classified(lambda x: apply("ne", x, x)),
    "isinf": _classified(lambda x: apply("eq", apply("abs", x), _INF)),
    "isfinite": _classified(lambda x: apply("lt", apply("abs", x), _INF)),
    **{"float": _cast_to(torch.float32), "int": _cast_to(torch.int32), "long": _cast_to(torch.int64), "bool": _cast_to(torch.bool)},
    **{"short": _cast_to(torch.int16), "char": _cast_to(torch.int8), "byte": _cast_to(torch.uint8)},
    **{"to": _to, "type": _to, "type_as": _to},
    **{"tensor": _tensor, "scalar_tensor": _tensor, "as_tensor": lambda p, data, **options: _to(p, data, **options)},
    **{"zeros": _filled(0), "ones": _filled(1), "full": _filled(None)},
    **{"new_zeros": _filled(0, True), "new_ones": _filled(1, True), "new_full": _filled(None, True)},
    "new_tensor": lambda p, input, data, dtype=None, **options: _constant(p, data, dtype or p.scalar(input).dtype),
    **{"zeros_like": _like(0), "ones_like": _like(1), "full_like": _like(None)},
}
_ALIASES = {
    **{"divide": "div", "true_divide": "div", "truediv": "div", "rtruediv": "rdiv", "multiply": "mul", "subtract": "sub"},
    **{"negative": "neg", "absolute": "abs", "clip": "clamp", "floordiv": "floor_divide", "mod": "remainder"},
    **{"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not"},
    **{"rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor", "radd": "add", "rmul": "mul"},
    **{"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "sgn": "sign", "fix": "trunc"},
}


def handler_of(name: str) -> Handler | None:
    """The handler of a function, a method or an operator (`__add__`) of PyTorch by its name; None for one that is not understood."""
    if name == "rand":  # torch.rand, not __rand__
        return None
    plain = name.removeprefix("__").removesuffix("__") if name.startswith("__") else name
    return HANDLERS.get(_ALIASES.get(plain, plain))
