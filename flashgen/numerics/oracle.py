"""What an oracle is: it draws an operation's inputs, and knows what its outputs must be. One file an operation, found by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from flashgen.codegen.discovery import defined
from flashgen.codegen.modifier import modifier_operands
from flashgen.codegen.operands import Element, Operand, Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.workload import Workload

from .caches import drawn_cache
from .link import drawn_operands
from .sequences import drawn_sequences

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}

_FIXED = {
    **{Element.F32: torch.float32, Element.BF16: torch.bfloat16, Element.F16: torch.float16, Element.BOOL: torch.bool},
    **{Element.I64: torch.int64, Element.I32: torch.int32, Element.I16: torch.int16, Element.I8: torch.int8, Element.U8: torch.uint8},
    Element.E4M3: torch.float8_e4m3fn,
}  # whatever the problem's

Sample = Tensor
"""Which rows of a workload are judged where all of them are too many: int64 [n, 3] of (batch, query head, query).

Of packed sequences (0, query head, token).
"""


class Oracle(ABC):
    """`flashgen/numerics/<operation>.py` defines a subclass and one instance of it named `ORACLE`.

    Tensors go by the operands' names, in their axes, with any strides; scalars by theirs.
    """

    def inputs(self, problem: Problem, workload: Workload, generator: torch.Generator) -> dict[str, Tensor]:
        """What a kernel reads, from N(0, 1), dense, on the generator's device: before `derive`. Of modifiers as `Link.drawn` has it.

        Boundaries of packed sequences as `drawn_sequences` has them, and what says where keys are in a cache as `drawn_cache` has it.
        """
        of_sequences = drawn_sequences(problem, workload, generator) | drawn_cache(problem, workload, generator)
        of_modifiers = modifier_operands(problem)
        read = (operand for operand in operation_of(problem).operands(problem) if operand.role is not Role.OUT)
        drawn = {
            operand.name: _drawn(operand.sizes(problem, workload), torch_dtype(operand, problem), generator)
            for operand in read
            if operand not in of_modifiers and operand.name not in of_sequences
        }
        of_links = drawn_operands(problem, workload, generator)
        return {**drawn, **of_sequences, **{one.name: of_links[one.name].to(torch_dtype(one, problem)) for one in of_modifiers}}

    def derive(self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:  # noqa: B027  # most have none
        """Fills in place the inputs that follow from the others. Whoever changes an input asks for this again."""

    @abstractmethod
    def exact(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """The outputs in float64: whole, or of a sample."""

    @abstractmethod
    def plain(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """The outputs as plain PyTorch computes them in the problem's element type, with its rounding: what the rule doubles."""

    @abstractmethod
    def sample(self, problem: Problem, workload: Workload, count: int, seed: int) -> Sample:
        """`count` rows of a workload, those among them where kernels err first, on the CPU."""

    @abstractmethod
    def sampled(self, outputs: Mapping[str, Tensor], sample: Sample) -> dict[str, Tensor]:
        """Of each output what a sample is of, in the shapes that `exact` has for it."""

    @abstractmethod
    def rows_of(self, touched: Mapping[str, Tensor]) -> Sample:
        """The rows of which an output has an element that is touched; `touched`: masks of the shapes of the outputs."""

    def unseen(self, problem: Problem, workload: Workload, exact: Mapping[str, Tensor], sample: Sample | None) -> dict[str, Tensor]:
        """For some outputs the rows that see no key: see `rule.judge`. `exact`: whole, or of a sample."""
        return {}


def _drawn(sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    drawn_as = torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype  # PyTorch draws no e4m3 numbers
    return torch.randn(sizes, dtype=drawn_as, device=generator.device, generator=generator).to(dtype)


def torch_dtype(operand: Operand, problem: Problem) -> torch.dtype:
    """The element type of an operand."""
    return _FIXED.get(operand.element) or TORCH_DTYPES[problem.dtype]


def oracle_of(problem: Problem) -> Oracle:
    """The oracle of a problem's operation."""
    from flashgen import numerics

    return defined(numerics, operation_of(problem).name, "ORACLE", Oracle)  # type: ignore[type-abstract]
