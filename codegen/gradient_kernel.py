"""What the kernel for gradients of a modifier's tensors is: tensor_gradients.py launches those of a problem."""

from __future__ import annotations

from dataclasses import dataclass

from .parameters import ParameterBlock


@dataclass(frozen=True)
class GradientKernel:
    """A kernel for gradients of a modifier's tensors.

    function:   what computes them, in the file of the modifier: a template of the block's threads, given the kernel's parameters
    title:      what the text says above it
    threads:    of a block
    """

    parameters: ParameterBlock
    suffix: str
    struct: str
    function: str
    title: str
    threads: int
