"""The rule on the results of the forward pass, given in the order in which the functions of `numerics/forward.py` return them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.numerics.forward import rows_without_keys
from flashgen.numerics.rule import Verdict, judge


def judge_forward(out: Tensor, lse: Tensor, ref: tuple[Tensor, Tensor], pt: tuple[Tensor, Tensor], dtype: torch.dtype) -> Verdict:
    """`judge` with `dtype` as the element type of out."""
    exact = {"out": ref[0], "lse": ref[1]}
    plain = {"out": pt[0], "lse": pt[1]}
    return judge({"out": out, "lse": lse}, exact, plain, rows_without_keys(exact), {"out": dtype, "lse": torch.float32})
