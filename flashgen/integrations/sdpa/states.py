"""The state of random numbers that PyTorch's fused operators hand from a forward pass to its backward pass: flashgen's own, told by dtype.

A backward kernel must be of whoever ran the forward pass. The state is what tells: PyTorch's flash operators have two numbers of uint64,
efficient attention's and cuDNN's one of int64, and flashgen's have the other one of these dtypes. Copies keep that, such as
torch.autograd.graph.save_on_cpu makes, and so do compiled graphs, which hand it on without looking at it: one that
computes with it has the dtype of PyTorch's fake. The first number is the seed.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
_MOST = 2**63 - 1
OF_FLASH = (2,)  # the shape of the flash operators' state; others' have no dimensions


def state_of_forward(query: Tensor, shape: tuple[int, ...], dropout_p: float) -> Tensor:
    """On query's device, with a seed by PyTorch's generator where elements are dropped."""
    own = torch.int64 if shape else torch.uint64
    if not dropout_p:
        return query.new_empty(shape, dtype=own)
    return torch.randint(_MOST, shape, device=query.device).view(own)  # of its own, not of a table: Inductor expects aligned outputs


def is_own(state: Tensor | None) -> bool:
    """Whether flashgen has computed the forward pass that gave this state."""
    return state is not None and state.dtype == (torch.int64 if state.ndim else torch.uint64)


def seed_of_state(state: Tensor) -> Tensor:
    """int64, of no dimensions."""
    return state[0] if state.ndim else state.view(torch.int64)
