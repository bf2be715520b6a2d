"""Dropout: each element of P is 0 with a probability of p, and is divided by 1 - p otherwise (Srivastava et al. 2014).

It comes last: the softmax, its row sums and lse are as they are without it. Which elements are dropped follows from a seed in memory, the
entry of the batch, the head, the query and the key: `random_bits` in flashgen/numerics/modifiers/dropout.py has it in PyTorch. A
probability is met to 2^-16.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Call, Element, Operand
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

DROPOUT_P, SEED = "dropout_p", "dropout_seed"
USUAL_P = 0.1  # of Vaswani et al. 2017
_STEPS = 2**16  # of a probability
_NEGATIVE = 0x7C00  # fp16 numbers below 0, of which the first is -infinity; there are as many above -0 and 0
_LESS_THAN_INFINITY = 2 * _NEGATIVE + 1


class Dropout(Modifier):
    """See the module's docstring."""

    name = "dropout"
    rank = 40
    words = "dropout"
    parameters = (
        *(Parameter("const int*", SEED), Parameter("int", "dropout_heads")),
        *(Parameter("int", "dropout_limits"), Parameter("int", "dropout_inverted"), Parameter("float", "dropout_scale")),
    )
    numbers = (DROPOUT_P,)
    tensors = (SEED,)
    drops = True

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. One number."""
        return (Operand(SEED, (), Element.I64),)

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Modifier."""
        return {DROPOUT_P: USUAL_P}

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier."""
        p = call.scalars[DROPOUT_P]
        limit, inverted = limit_of(p)
        both = limit << 16 | limit
        return {
            "dropout_heads": call.workload.heads_q,
            "dropout_limits": both - (both >> 31 << 32),  # as an int
            "dropout_inverted": -inverted,
            "dropout_scale": keep_scale(p),
        }


def limit_of(p: float) -> tuple[int, bool]:
    """By which 16 random bits, taken for an fp16 number, say that an element is dropped: the bits of a number which theirs is less than.

    If True stands beside it, they say that it is kept.
    """
    count = round(p * _STEPS)  # of all 2^16 patterns that are to be less
    inverted = count > _LESS_THAN_INFINITY
    count = _STEPS - count if inverted else count
    if count <= _NEGATIVE:
        return 0x8000 | _NEGATIVE - count, inverted
    return max(0, count - _NEGATIVE - 1), inverted


def keep_scale(p: float) -> float:
    """What elements that are kept are multiplied by."""
    return 1 / (1 - p) if p < 1 else 0.0


def checked_dropout(p: object) -> float:
    """The probability as a number. Raises ArgumentError for what is none from 0 to 1."""
    number = p if isinstance(p, int | float) else float(p) if isinstance(p, Real) else None
    if isinstance(p, bool) or number is None or not 0 <= number <= 1:
        raise ArgumentError(f"dropout_p must be a number from 0 to 1; got {shown(p)}")
    return float(number)


MODIFIER = Dropout()
