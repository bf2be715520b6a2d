"""Parts of functions that kernels have built in, by their forms: a softcap, ALiBi, a bias and a mask in memory.

A form says nothing of numbers, lengths and tensors, which a call has: flashgen/launch/built_in.py asks whether they fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .bounds import ranges_of
from .build import apply
from .linear import LinearForm, is_exact
from .recognition import added_term, constant_beside
from .tree import (
    BATCH,
    BOOL,
    FLOAT32,
    HEAD,
    KEY,
    QUERY,
    SCORE,
    Expression,
    constant,
    depends_on,
    loads_of,
    nodes_of,
    renamed_leaf,
    rewritten,
)

_KNOWN = ("constant", "number")  # what a call knows without a look into memory
_AXES = (BATCH, HEAD, QUERY, KEY)


class SoftcapForm(NamedTuple):
    """cap * tanh(score * factor), or cap * tanh(score / divisor): a softcap if 1 / factor, or divisor, is cap. Constants and numbers."""

    node: Expression
    cap: Expression
    factor: Expression | None
    divisor: Expression | None


class AlibiForm(NamedTuple):
    """A term that comes to -slope * (query + offset - key), or to that with the absolute value of this distance.

    slope:  of fp32, the load of an element [head] or [batch, head]; or of constants, numbers and the head alone
    offset: int32, of constants and numbers
    """

    node: Expression
    slope: Expression
    offset: Expression
    is_absolute: bool


class ElementForm(NamedTuple):
    """A load of one element for each score, or the same for some. axes: 0 to 3 of each of its indices, batch, head, query or key."""

    node: Expression
    axes: tuple[int, ...]


@lru_cache(maxsize=2**10)
def softcap_form(score: Expression) -> SoftcapForm | None:
    """A softcap of the score, if the tree depends on the score in no other way."""
    for each in nodes_of(score):
        if each.operation != "mul" or each.operands[0].operation != "tanh" or each.operands[1].operation not in _KNOWN:
            continue
        (inner,), cap = each.operands[0].operands, each.operands[1]
        if inner.operation in ("mul", "div") and inner.operands[0] is SCORE and inner.operands[1].operation in _KNOWN:
            by = inner.operands[1]
            found = SoftcapForm(each, cap, *((by, None) if inner.operation == "mul" else (None, by)))
            return found if "score" not in depends_on(replaced(score, each, constant(0.0, FLOAT32))) else None
    return None


@lru_cache(maxsize=2**10)
def added_forms(score: Expression) -> tuple[AlibiForm | None, ElementForm | None]:
    """ALiBi and a bias among the terms that are added to a score which is only added to; the first of each kind."""
    alibi, bias = None, None
    if added_term(score) is not None:
        for term, sign in _terms(score):
            alibi = alibi or _alibi(term, sign)
            if bias is None and sign > 0 and term.type is FLOAT32:
                bias = _element(term)
    return alibi, bias


@lru_cache(maxsize=2**10)
def mask_form(mask: Expression) -> ElementForm | None:
    """A mask in memory among the conditions that must all hold."""
    stack = [mask]
    while stack:
        each = stack.pop()
        if each.operation == "and" and each.type is BOOL:
            stack.extend(each.operands)
        elif each.type is BOOL and (found := _element(each)) is not None:
            return found
    return None


@lru_cache(maxsize=2**10)
def replaced(tree: Expression, old: Expression, new: Expression) -> Expression:
    """The tree with another node in the place of one."""

    def change(node: Expression, operands: tuple[Expression, ...]) -> Expression:
        if node is old:
            return new
        if node.operation == "load":
            return renamed_leaf(node, {}, operands)
        return apply(node.operation, *operands) if operands else node

    return rewritten([tree], change)[0]


def _terms(score: Expression) -> Iterator[tuple[Expression, int]]:
    """What is added to the score and occurs nowhere else, with its sign: 0 in its place leaves the others."""
    uses = Counter(operand for node in nodes_of(score) for operand in node.operands)
    stack = [(score, 1)]
    while stack:
        each, sign = stack.pop()
        if uses[each] > 1:
            continue
        if each.operation == "neg":
            stack.append((each.operands[0], -sign))
        elif each.operation == "add":
            stack.extend((operand, sign) for operand in reversed(each.operands))
        elif each is not SCORE:
            yield each, sign


def _alibi(term: Expression, sign: int) -> AlibiForm | None:
    distances, factors, stack = [], [], [term]
    while stack:
        each = stack.pop()
        if each.operation == "mul":
            stack.extend(reversed(each.operands))
        elif each.operation == "neg":
            stack.append(each.operands[0])
            sign = -sign
        elif (distance := _distance(each)) is not None:
            distances.append(distance)
        else:
            factors.append(each)
    if len(distances) != 1:
        return None
    ((direction, offset, is_absolute),) = distances
    sign *= direction
    if len(factors) == 1 and factors[0].operation == "load":
        is_slope = factors[0].value.dtype == "fp32" and factors[0].operands in ((HEAD,), (BATCH, HEAD))
        return AlibiForm(term, factors[0], offset, is_absolute) if sign < 0 and is_slope else None
    slope = constant(-1.0 if sign > 0 else 1.0, FLOAT32)
    for factor in factors:
        slope = apply("mul", slope, factor)
    if loads_of(slope) or not depends_on(slope) <= {"head"}:
        return None
    return AlibiForm(term, slope, offset, is_absolute)


def _distance(tree: Expression) -> tuple[int, Expression, bool] | None:
    """(direction, offset, is absolute), if the tree is query + offset - key times the direction, 1 or -1, or an absolute value of it."""
    if tree.operation != "float32" or not tree.operands[0].type.is_integer:
        return None
    inner = tree.operands[0]
    is_absolute = inner.operation == "abs"
    whole = inner.operands[0] if is_absolute else inner
    if not is_exact(whole, ranges_of(whole)):
        return None
    form = LinearForm.of((whole, 1))
    for direction, each in ((1, form), (-1, form.negated())):
        offset = constant_beside(each, {QUERY: 1, KEY: -1})
        if offset is not None:
            return 1 if is_absolute else direction, offset, is_absolute
    return None


def _element(term: Expression) -> ElementForm | None:
    if term.operation != "load" or term.value.dtype not in ("bool", "fp32", "bf16", "fp16"):
        return None
    plain = [index.operands[0] if index.operation == "int64" else index for index in term.operands]
    axes = tuple(_AXES.index(index) for index in plain if index in _AXES)
    is_known = len(axes) == len(plain) == len(set(axes)) and _AXES.index(KEY) in axes
    return ElementForm(term, axes) if is_known else None
