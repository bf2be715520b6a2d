"""What texts say of terms of the distance from query to key: where they are shared, and where they are read ahead."""

from __future__ import annotations

import pytest

from flashgen.bench.relative import RELATIVE
from flashgen.codegen.modifier import modifiers_of
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.score_chain import conditions, shares_distances

TWO_LINES = "traced(score: x0 = add(query, neg(key)); add(t1:fp32[head, add(x0, 5)], add(score, t0:fp32[head, add(x0, 9)])))"


def said(*names: str, may_share: bool = True) -> tuple[bool, bool]:
    """Whether terms are shared, and whether they are read ahead."""
    problem = Problem(Dtype.BF16, 64, operation="backward", modifiers=tuple(sorted(names)))
    found = conditions(modifiers_of(problem), "backward", may_share=may_share)
    return bool(found["traced_distances"]), bool(found["ahead"])


def test_what_is_added_alone_is_read_ahead() -> None:
    assert said(RELATIVE) == said(RELATIVE, "window", "sinks") == (True, True)
    assert said() == said("alibi", "bias") == said(RELATIVE, may_share=False) == (False, False)


@pytest.mark.parametrize("others", [("softcap",), ("dropout",), ("alibi",), ("bias", "alibi"), ("boolean_mask",), ("document_ids",)])
def test_beside_other_changes_registers_do_not_do_for_it(others: tuple[str, ...]) -> None:
    assert said(RELATIVE, *others) == (True, False)


def test_nor_do_they_for_two_lines() -> None:
    assert said(TWO_LINES) == (True, False)


def test_wide_heads_forward_share_nothing() -> None:
    assert [shares_distances(Problem(Dtype.BF16, width)) for width in (64, 128, 192)] == [True, True, False]
    assert shares_distances(Problem(Dtype.BF16, 256, operation="backward"))
