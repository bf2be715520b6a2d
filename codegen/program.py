"""`Program`: the launches of one call, in order, and the buffers between them; `KernelText`: the kernels of a text that they launch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from .errors import ArgumentError, require_int
from .parameters import ParameterBlock
from .tensor_map import TensorMapShape


@dataclass(frozen=True)
class KernelText:
    """One kernel of a text. Its entry is the name of the spec and `suffix`; `struct` is the C name of its parameters."""

    parameters: ParameterBlock
    suffix: str = ""
    struct: str = "Parameters"


@dataclass(frozen=True)
class BlockResources:
    """What a block of a kernel takes: its threads, its dynamic shared memory in bytes, and the blocks that its cluster has, it included.

    A kernel with clusters says so in its text as well, `__cluster_dims__(n, 1, 1)`: then a launch needs no attribute for them. 8 blocks are
    the most that run on every GPU (CUDA programming guide, "Thread Block Clusters").
    """

    threads: int
    shared_bytes: int
    cluster: int = 1

    def __post_init__(self) -> None:
        require_int("cluster", self.cluster, 1, 8)

    def require_clusters(self, name: str, blocks: int) -> None:
        """Raises ArgumentError unless so many blocks are whole clusters."""
        if blocks % self.cluster:
            raise ArgumentError(f"{name} must be a multiple of {self.cluster}, the blocks of a cluster; got {blocks}")


class BufferKind(enum.Enum):
    """Where a buffer's memory comes from, and what is in it when the first launch begins.

    CALL: memory of the call's own, with anything in it; CALL_ZEROED: the same, zeroed; STREAM_COUNTER: one u32 or more of the stream, each
    0, and left 0 by the program, so that nobody has to clear them. A program has one such buffer at most; KEPT: what launches with
    `finds` write, and others only read, which may be kept for other calls: in place of these launches
    """

    CALL = "call"
    CALL_ZEROED = "call_zeroed"
    STREAM_COUNTER = "stream_counter"
    KEPT = "kept"


class Waits(enum.Enum):
    """Whom blocks of a launch may wait for, so that none waits for ever, however few are resident at once.

    NOBODY:  each block goes on without the others
    EARLIER: blocks of lower indices, which a GPU begins first
    BEGUN:   blocks that have begun: for work that they have claimed
    """

    NOBODY = "nobody"
    EARLIER = "earlier"
    BEGUN = "begun"


@dataclass(frozen=True)
class Buffer:
    """Memory that the launches of a program share and nobody else sees."""

    name: str
    bytes: int
    kind: BufferKind = BufferKind.CALL


class KernelLaunch(NamedTuple):  # no dataclass, as each call of a new length makes one
    """One launch with everything but the addresses.

    What a block takes is the same for every launch of a kernel: see `Family.resources`.

    grid:   blocks
    values: the kernel's parameters that are numbers, by name
    maps:   what its tensor maps say, by the name of the operand or buffer
    suffix: of the entry, after the name of the spec: empty where a text has one kernel
    waits:  for which other blocks its blocks wait
    overlaps: whether blocks may begin while what comes before in the stream is under way, the launch before or, if this is the first one,
        whatever others have put there: each of them waits for its end, by `griddepcontrol_wait`, before it reads or writes memory that
        others do, and before it ends (CUDA programming guide, "Programmatic Dependent Launch and Synchronization")
    finds: whether what it writes, buffers that are KEPT, follows from its numbers and from modifiers' tensors alone
    """

    grid: int
    values: Mapping[str, int | float]
    maps: Mapping[str, TensorMapShape] = MappingProxyType({})
    suffix: str = ""
    waits: Waits = Waits.NOBODY
    overlaps: bool = False
    finds: bool = False


@dataclass(frozen=True)
class Program:
    """See the module's docstring. A pointer among a kernel's parameters takes the address of the operand or buffer of its name, or is 0."""

    launches: tuple[KernelLaunch, ...]
    buffers: tuple[Buffer, ...] = ()

    @property
    def chains(self) -> tuple[tuple[KernelLaunch, ...], ...]:
        """The launches, in order: each of a chain overlaps the one before, and a chain begins when the one before it has ended.

        The first launch, if it overlaps, does so with what is in the stream already.
        """
        chains: list[tuple[KernelLaunch, ...]] = []
        for launch in self.launches:
            chains[-1:] = [(*chains[-1], launch)] if launch.overlaps and chains else [*chains[-1:], (launch,)]
        return tuple(chains)
