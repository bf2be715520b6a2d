"""`SizedPlan`: what the plans of all operators have in common. What runs a call takes the numbers that its sizes decide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_Plan = TypeVar("_Plan", bound="SizedPlan")


class SizedPlan:
    """Everything about a call that its signature decides.

    run: runs a call of the signature: see each operator's plan
    bound: what is launched; None where there is nothing to compute
    numbers: all that sizes decide: shapes and strides of outputs, and what each launch needs
    before, met, before_differentiable: what knows the next call of this signature at once, whether it has run a call, and the first of
        these for calls with gradients: see operators/plans.py
    """

    __slots__ = ("_run", "before", "before_differentiable", "bound", "met", "numbers", "run")

    def __init__(self, run: Callable[..., Any], numbers: Any, bound: Any) -> None:
        """run: takes numbers first."""
        self._set(run, numbers, bound, True)

    def with_numbers(self: _Plan, numbers: Any) -> _Plan:
        """The plan of a call that differs from this plan's in `numbers` alone."""
        other = object.__new__(type(self))
        other._set(self._run, numbers, self.bound, False)
        return other

    def _set(self, run: Callable[..., Any], numbers: Any, bound: Any, met: bool) -> None:
        self._run, self.numbers, self.bound, self.met = run, numbers, bound, met
        self.before: Any = None
        self.before_differentiable: Any = None
        self.run: Callable[..., Any] = partial(run, numbers)
