"""A thread's plans of the backward pass: see plans.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.codegen.modifier import NO_MODIFIERS

from ..launch.asked import signature_of
from ..launch.gradients import GradientPlan
from ..selection import loaded
from . import plans


def gradient_plan_for(*arguments: Any) -> GradientPlan:
    """This thread's plan for a call of the backward pass: see `GradientPlan`."""
    q, k, v, out, lse, d_out, d_lse, causal, scale, layout, deterministic, *modified = arguments
    absent: tuple[Any, ...] = (NO_MODIFIERS, (), False)
    modifiers, tensors, of_tensors = (*modified, *absent[len(modified) :])
    of_lse = () if d_lse is None else (d_lse,)
    there, options = (q, k, v, out, lse, d_out, *of_lse, *tensors), (causal, scale, layout, deterministic, modifiers)
    known, sized = (*options, bool(of_lse), of_tensors, loaded.kernels.generation), plans.sized_plans("gradient_plans")
    plan: GradientPlan | None = sized.find(known, there)
    if plan is None:
        every: dict[tuple[Any, ...], GradientPlan] = plans._LOCAL.__dict__.setdefault("gradient_plans", {})
        key = (signature_of(there), known)
        plan = every.get(key)
    if plan is None:
        plan = GradientPlan(q, k, v, out, lse, d_out, d_lse, *options, tensors, of_tensors)

        def planned(found: Sequence[Any], _: Any) -> tuple[Any, ...]:
            first = 6 + len(of_lse)
            return plan.numbers_of(*found[:6], *(found[6:first] or (None,)), *options, found[first:], of_tensors)

        sized.learn(known, there, plan, planned)
        plans.kept(every, key, plan)
    return plan
