"""Block masks that flashgen makes itself: `block_mask`, by one kernel of a traced mask_mod, and `BlockMask`, what callers keep.

FlexAttention's: block_masks.py, which says what becomes of both in a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.block_states import BLOCK_STATES, STATES, differs_by, states_call, states_problem, states_shape, states_spec
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.errors import ArgumentError, require_int, shown
from flashgen.codegen.expressions.blocks import SMALLEST_BLOCK
from flashgen.codegen.modifier import modifier_operands
from flashgen.codegen.modifiers.traced import LONGEST, MOST_HEADS
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import Program
from flashgen.codegen.target import find_target
from flashgen.codegen.typed import checked, require_field_types

from ..selection import loaded
from ..traced.modifier import functions_read, joined_traces, picked
from . import cpu
from .arguments import TracedArgumentError
from .asked import asked
from .gpu import CaptureError, current_stream, require_context
from .kept_tiles import keeping_tiles
from .traced_call import function_parts
from .tracers import nobody_traces
from .untraced import untraced

MaskMod = Callable[..., Any]
LARGEST_BLOCK = 2**15  # a warp counts looks at a block in an int
NOTHING, PART, ALL = range(3)  # of a block: what queries see of it


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which blocks of keys blocks of queries see: for `attention(..., block_mask=)`. `block_mask` makes one.

    states:      uint8 [batch or 1, heads or 1, blocks of queries, blocks of keys]: 0 where nothing of a block is seen, 1 for a part of it,
                 for which a call asks mask_mod, 2 for all of it
    mask_mod:    the function (batch, head, query, key) of which it was made
    block_size:  queries and keys of a block
    seq_lengths: len_q and len_kv

    Calls keep with it which tiles of their kernel it leaves, and find them again where states, or tensors that mask_mod captures, have been
    written since, as far as PyTorch counts that: it does not count what others write, as replays of a CUDA graph, or NumPy.
    """

    states: torch.Tensor
    mask_mod: Any
    block_size: Sequence[int]
    seq_lengths: Sequence[int]

    def __post_init__(self) -> None:
        """Raises ArgumentError for fields that do not go together."""
        require_field_types(self)
        if not callable(self.mask_mod):
            raise ArgumentError(f"mask_mod must be a function (batch, head, query, key); got {shown(self.mask_mod)}")
        _require_sizes(self.block_size, self.seq_lengths)
        states, blocks = self.states, self.blocks
        if states.dtype != torch.uint8 or states.ndim != 4 or tuple(states.shape[2:]) != blocks or 0 in states.shape:
            wanted = f"uint8 of the shape (batch or 1, heads or 1, {blocks[0]}, {blocks[1]})"
            raise ArgumentError(f"states must be {wanted}; got {states.dtype} of {tuple(states.shape)}")

    @property
    def blocks(self) -> tuple[int, int]:
        """How many there are, of queries and of keys: at least one."""
        (of_q, of_kv), (len_q, len_kv) = self.block_size, self.seq_lengths
        return max(1, -(-len_q // of_q)), max(1, -(-len_kv // of_kv))

    @cached_property
    def seen(self) -> MaskMod:
        """All of it as a mask_mod, for calls that have no other: they keep lists of tiles."""
        return seen_by(keeping_tiles(self.states), self.block_size, self.mask_mod)

    @cached_property
    def seen_beside(self) -> MaskMod:
        """The same for other calls."""
        return seen_by(self.states, self.block_size, self.mask_mod)

    def sparsity(self) -> float:
        """How many of a hundred blocks nobody sees. It waits for the GPU."""
        return float((self.states == NOTHING).float().mean()) * 100

    def __repr__(self) -> str:
        named = f"len_q={self.seq_lengths[0]}, len_kv={self.seq_lengths[1]}, block_size={self.block_size}"
        return f"flashgen.BlockMask(states={[*self.states.shape]}, {named}, device={str(self.states.device)!r})"


def seen_by(states: torch.Tensor, block_size: Sequence[int], mask_mod: MaskMod) -> MaskMod:
    """The function of a block mask of these states, as `BlockMask` has them. torch.compile traces this."""
    of_q, of_kv = block_size
    by_batch, by_head = states.shape[0] > 1, states.shape[1] > 1

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        state = states[batch if by_batch else 0, head if by_head else 0, query // of_q, key // of_kv]
        return (state == 2) | ((state == 1) & mask_mod(batch, head, query, key))  # ALL, PART: a number by name is looked up in each call

    return seen


def _require_sizes(block_size: Sequence[int], seq_lengths: Sequence[int]) -> None:
    if len(block_size) != 2 or any(not SMALLEST_BLOCK <= size <= LARGEST_BLOCK or size % SMALLEST_BLOCK for size in block_size):
        raise ArgumentError(f"block_size must be one or two multiples of {SMALLEST_BLOCK} up to {LARGEST_BLOCK}; got {shown(block_size)}")
    if len(seq_lengths) != 2:
        raise ArgumentError(f"seq_lengths must be len_q and len_kv; got {shown(seq_lengths)}")
    for name, length in zip(("len_q", "len_kv"), seq_lengths, strict=True):
        require_int(name, length, 0, LONGEST)


class _Traced(NamedTuple):
    """A mask_mod: the problem of its kernel, the numbers that it captures, by name, and the tensors."""

    problem: Problem
    numbers: dict[str, float]
    tensors: tuple[torch.Tensor, ...]


def block_mask(
    mask_mod: Any,
    *,
    batch: int | None = None,
    heads: int | None = None,
    len_q: int,
    len_kv: int,
    device: str | torch.device = "cuda",
    block_size: int | Sequence[int] = 128,
) -> BlockMask:
    """Finds on the device, by one kernel, which blocks of keys a mask_mod lets queries see: once for many calls of `attention`.

    mask_mod: a function (batch, head, query, key), as `attention` takes it: docs/traced-modifiers.md. What it captures counts as it is now:
       make another mask where that has changed. Blocks that are seen in part ask the function anew in each call.
    batch, heads: of the calls, where the function looks at the entry of the batch, or at query heads. None: it is the same for all
    len_q, len_kv: of the calls, whose q and k must have these lengths
    block_size: queries and keys of a block, multiples of 16 up to 32768, or one number for both. The tiles of kernels divide blocks of
       128, the usual ones.

    Raises ArgumentError for bad arguments and functions that cannot be traced, CaptureError for a first mask of a function while a CUDA
    graph is captured, and what `attention` raises for the machine's faults. Not within torch.compile, which takes a mask that is there.
    """
    if is_dynamo_compiling():
        raise TracedArgumentError(
            "block_mask must be called outside of torch.compile: make the mask before, and pass it to what is compiled"
        )
    return _made(mask_mod, batch, heads, len_q, len_kv, device, block_size)


@untraced
@checked
def _made(
    mask_mod: Any,
    batch: int | None,
    heads: int | None,
    len_q: int,
    len_kv: int,
    device: str | torch.device,
    block_size: int | Sequence[int],
) -> BlockMask:
    if not callable(mask_mod):
        raise ArgumentError(f"mask_mod must be a function (batch, head, query, key); got {shown(mask_mod)}")
    of_each = (block_size, block_size) if isinstance(block_size, int) else block_size
    seq_lengths = len_q, len_kv
    _require_sizes(of_each, seq_lengths)
    sizes = of_each[0], of_each[1]
    for name, value in (("batch", batch), ("heads", heads)):
        if value is not None:
            require_int(name, value, 1, MOST_HEADS)
    where = _device(device)
    if not nobody_traces():
        raise ArgumentError("block_mask must be called outside of PyTorch's modes and transforms, as of torch.func; got one at work")
    problem, numbers, tensors = _traced(mask_mod, where)
    for name in differs_by(problem):
        if {"batch": batch, "heads": heads}[name] is None:
            raise ArgumentError(f"{name} must be given for a mask_mod that differs by it; got None")
    call = states_call(problem, batch or 1, heads or 1, seq_lengths, sizes, numbers)
    if reasons := BLOCK_STATES.call_refusals(call):
        raise ArgumentError("; ".join(reasons))
    with torch.inference_mode(False):  # a backward pass may keep them
        states = torch.empty(states_shape(call), dtype=torch.uint8, device=where)
    (_on_gpu if where.type == "cuda" else _on_cpu)(call, states, tensors)
    mask = BlockMask(states, mask_mod, sizes, seq_lengths)
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        vars(mask)["seen"] = mask.seen_beside  # replays write the states, and nobody counts that
    return mask


def _device(device: str | torch.device) -> torch.device:
    """With its index. Raises ArgumentError for one that kernels do not run on."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device must be a CUDA device; got {shown(device)}") from error
    if where.type == "cpu" and os.environ.get("FLASHGEN_CPU") == "1":
        return where
    if where.type != "cuda":
        cure = ". FLASHGEN_CPU=1 in the environment lets kernels run on the CPU, thread for thread: right, and slow" * (where.type == "cpu")
        raise ArgumentError(f"device must be a CUDA device; got {where}{cure}")
    if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"device must be a CUDA device that PyTorch finds, one of {torch.cuda.device_count()}; got {where}")
    return where if where.index is not None else torch.device("cuda", torch.cuda.current_device())


def _traced(mask_mod: MaskMod, where: torch.device) -> _Traced:
    """Raises ArgumentError for what cannot be traced, and for captured tensors that a kernel there cannot read."""
    _, trace, tensors, numbers = functions_read(None, mask_mod)
    functions, of_tensors, of_numbers = joined_traces(None, trace)
    name, which, whole, others = function_parts(None, functions.mask, False).rest
    tensors, numbers = picked(tensors, of_tensors), picked(numbers, of_numbers)
    tensors = tuple([tensors[i] for i in which])
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ArgumentError(f"tensors that mask_mod captures must be dense (torch.strided); got {tensor.layout}")
        if tensor.device != where:
            raise ArgumentError(f"tensors that mask_mod captures must be on {where}, the device of the mask; got {tensor.device}")
        if not tensor.numel():
            raise ArgumentError(f"tensors that mask_mod captures must have elements; got the shape {tuple(tensor.shape)}")
        if tensor.is_neg() or tensor.is_conj():
            raise ArgumentError("tensors that mask_mod captures must lie in memory as they are; got a view that negates")
    given, _ = asked(name, [int(numbers[i]) for i in whole], [numbers[i] for i in others], tensors)
    return _Traced(states_problem(name), dict(given.numbers), tensors)


def _on_gpu(call: Call, states: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    index = states.device.index
    with torch.cuda.device(index):
        kernel = _kernel(call.problem, index)
        launch = kernel.bind(BLOCK_STATES.program(kernel.spec.config, call, kernel.gpu.device))
        named = zip((operand.name for operand in modifier_operands(call.problem)), tensors, strict=True)
        addresses = {STATES: states.data_ptr(), **{name: tensor.data_ptr() for name, tensor in named}}
        require_context(index)
        launch(current_stream(index), *[addresses.get(name, 0) for name in launch.names])


@cache
def _kernel(problem: Problem, index: int) -> Kernel:
    """On a GPU, which is the current one. Raises CaptureError for one that is not there yet while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "flashgen.block_mask has no kernel yet for this mask_mod, and none can be made during a CUDA graph's capture: "
            "call it once before"
        )
    on = gpu(index)
    return loaded.kernels.load(states_spec(problem, on.device.target), on)


def _on_cpu(call: Call, states: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    kernel = _emulated(call.problem)
    program = BLOCK_STATES.program(kernel.spec.config, call, device_of_target(kernel.spec.target))
    named = zip((operand.name for operand in modifier_operands(call.problem)), tensors, strict=True)
    given = {STATES: cpu.view_of(STATES, states, writable=True), **{name: cpu.view_of(name, tensor) for name, tensor in named}}
    kernel.launch(Program(program.launches), given)  # the states are no buffer of the program's own


@cache
def _emulated(problem: Problem) -> EmulatedKernel:
    return cpu.load_emulated(states_spec(problem, find_target(cpu.ARCHITECTURE)))
