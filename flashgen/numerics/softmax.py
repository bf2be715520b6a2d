"""The oracle of softmax: in float64, and as plain PyTorch computes it, with fp32 arithmetic. All of it runs on any device.

Tensors: x and y [batch, heads, len_q, len_kv], any strides. A row of -inf has y 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .forward import sample_rows
from .oracle import Oracle, Sample


class SoftmaxOracle(Oracle):
    """See the module's docstring."""

    def exact(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle."""
        return {"y": _softmax(self._rows(tensors["x"], sample).double())}

    def plain(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle. PyTorch's own softmax of 16-bit elements computes in fp32 and rounds, too."""
        x = self._rows(tensors["x"], sample)
        return {"y": _softmax(x.float()).to(x.dtype)}

    def sample(self, problem: Problem, workload: Workload, count: int, seed: int) -> Sample:
        """See Oracle, and `sample_rows`."""
        return sample_rows(workload, count, seed, causal=False)

    def sampled(self, outputs: Mapping[str, Tensor], sample: Sample) -> dict[str, Tensor]:
        """See Oracle."""
        return {name: self._rows(tensor, sample) for name, tensor in outputs.items()}

    def rows_of(self, touched: Mapping[str, Tensor]) -> Sample:
        """See Oracle."""
        return touched["y"].any(-1).nonzero()

    def unseen(self, problem: Problem, workload: Workload, exact: Mapping[str, Tensor], sample: Sample | None) -> dict[str, Tensor]:
        """See Oracle. Those of -inf."""
        return {"y": (exact["y"] == 0).all(-1)}

    @staticmethod
    def _rows(tensor: Tensor, sample: Sample | None) -> Tensor:
        return tensor if sample is None else tensor[sample.to(tensor.device).unbind(1)]


def _softmax(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros_like(x)
    nothing = (x == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(x.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)


ORACLE = SoftmaxOracle()
