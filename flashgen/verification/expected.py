"""`Expected`: what a kernel must compute for one set of tensors, and the verdict on what it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operation import operation_of

from ..launch.tensors import Tensors
from ..numerics.oracle import Sample, oracle_of
from ..numerics.rule import Verdict, judge


@dataclass(frozen=True)
class Expected:
    """The exact outputs and plain PyTorch's for one set of tensors: whole, or of a sample."""

    sample: Sample | None
    exact: Mapping[str, torch.Tensor]
    plain: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Tensors, scalars: Mapping[str, float] | None = None, sample: Sample | None = None) -> Expected:
        """Computed once for all candidates; `scalars`: those that are not as usual."""
        problem, oracle = tensors.problem, oracle_of(tensors.problem)
        given = {**operation_of(problem).scalars(problem, tensors.workload), **(scalars or {})}
        exact, plain = oracle.exact(problem, tensors, given, sample), oracle.plain(problem, tensors, given, sample)
        for what, found in (("exact", exact), ("plain", plain)):
            if found.keys() != tensors.outputs.keys():
                owner = f"{what} of {type(oracle).__name__}"
                raise ArgumentError(f"{owner} must give {', '.join(tensors.outputs)}; got {', '.join(found)}")
        return cls(sample, exact, plain)

    def judge(self, tensors: Tensors) -> Verdict:
        """The numerics rule on what a kernel wrote."""
        oracle, written = oracle_of(tensors.problem), tensors.outputs
        if self.sample is not None:
            written = oracle.sampled(written, self.sample)
        return judge(written, self.exact, self.plain, oracle.unseen(tensors.problem, tensors.workload, self.exact, self.sample))
