"""Running the tuner's candidates on the GPU: poisoned outputs, a time limit on first launches, the numerics rule, interleaved timing.

The protocol of timing is that of `timing.py`.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch

from flashgen.build.driver import DriverError
from flashgen.build.kernel import Kernel
from flashgen.codegen.family import Strides
from flashgen.codegen.problem import Mask, Problem, Workload

from . import reference
from .arguments import LAYOUTS, TORCH_DTYPES, strides_of
from .ops import Plan
from .records import Timing
from .spread import ROUNDS, Spread
from .timing import Timer, input_sets, interleaved

ROUND_SECONDS = 4e-3  # of GPU time for one candidate in one round
FIRST_LAUNCH_LIMIT = 20.0  # seconds
SAMPLED_ROWS = 256
_FAR = 2**31  # elements: an offset of 32 bits does not reach the next row
_NORESERVE = 0x4000  # of Linux; the module mmap lacks it in Python 3.11


class HungKernelError(DriverError):
    """A kernel did not finish in time. The GPU's context is lost to it: the process must end."""


@dataclass(frozen=True)
class Tensors:
    """One set of inputs and outputs in layout bshd, with outputs poisoned by NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def random(cls, problem: Problem, workload: Workload, generator: torch.Generator) -> Tensors:
        """Inputs from N(0, 1), on the generator's device."""
        dtype, on = TORCH_DTYPES[problem.dtype], generator.device

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device=on, generator=generator)

        w = workload
        out = torch.empty(w.batch, w.len_q, w.heads_q, problem.head_dim_v, dtype=dtype, device=on)
        lse = torch.empty(w.batch, w.heads_q, w.len_q, dtype=torch.float32, device=on)
        q = normal(w.batch, w.len_q, w.heads_q, problem.head_dim)
        k = normal(w.batch, w.len_kv, w.heads_kv, problem.head_dim)
        tensors = cls(q, k, normal(w.batch, w.len_kv, w.heads_kv, problem.head_dim_v), out, lse)
        tensors.poison()
        return tensors

    def apart(self) -> Tensors:
        """The same values, where no stride of a tensor is one of another: a kernel that takes one for the other is wrong.

        What lies between rows is NaN. Plans of launches on a GPU know dense outputs alone, so that out is dense there.
        """
        batch, length, head = 0, 1, 2
        out = _laid_apart(self.out, (head, batch, length), 32) if self.out.device.type == "cpu" else self.out
        return Tensors(
            _laid_apart(self.q, (batch, length, head), 8),
            _laid_apart(self.k, (batch, head, length), 16),
            _laid_apart(self.v, (length, batch, head), 24),
            out,
            self.lse,
        )

    def far(self) -> Tensors:
        """The same values on the CPU, where no row, head or batch is within 2^31 elements of the next: an offset of 32 bits is wrong."""
        order, tensors = (1, 0, 2), (self.q, self.k, self.v, self.out)
        q, k, v, out = (_laid_apart(tensor, order, _FAR + 8 * units) for units, tensor in enumerate(tensors, 1))
        return Tensors(q, k, v, out, self.lse)

    def strides(self) -> list[Strides]:
        """Of q, k, v and out."""
        return [strides_of(tensor, *LAYOUTS["bshd"]) for tensor in (self.q, self.k, self.v, self.out)]

    def poison(self) -> None:
        """Fills the outputs with NaN: what a kernel does not write shows."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)


def _laid_apart(tensor: torch.Tensor, order: tuple[int, int, int], gap: int) -> torch.Tensor:
    """A copy whose dimensions lie in memory in this `order`, outermost first, each with so many elements between its entries."""
    strides, step = [0, 0, 0, 1], tensor.shape[3]
    for dim in reversed(order):
        strides[dim] = step + gap
        step = strides[dim] * max(1, tensor.shape[dim])
    if gap < _FAR:
        memory = torch.full((gap + step,), math.nan, dtype=tensor.dtype, device=tensor.device)
    else:
        memory = torch.frombuffer(untouched((gap + step) * tensor.element_size()), dtype=tensor.dtype)
    return memory.as_strided(tuple(tensor.shape), tuple(strides), gap).copy_(tensor)


def untouched(size: int) -> mmap.mmap:
    """So many bytes of address space, of which only pages that somebody writes take memory."""
    space = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    space.madvise(mmap.MADV_NOHUGEPAGE)  # each row would take 2 MiB
    return space


@dataclass(frozen=True)
class Expected:
    """The reference and plain PyTorch for one set of tensors: whole, or for the sampled `rows` [n, 3]."""

    rows: torch.Tensor | None
    ref: tuple[torch.Tensor, torch.Tensor]
    plain: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, tensors: Tensors, causal: bool, scale: float, rows: torch.Tensor | None = None) -> Expected:
        """Computed once for all candidates."""
        q, k, v = tensors.q, tensors.k, tensors.v
        return cls(
            rows,
            reference.reference(q, k, v, causal=causal, scale=scale, rows=rows),
            reference.plain(q, k, v, causal=causal, scale=scale, rows=rows),
        )

    def judge(self, tensors: Tensors) -> reference.Verdict:
        """The numerics rule on what a kernel wrote."""
        out, lse = tensors.out, tensors.lse
        if self.rows is not None:
            batch, head, row = self.rows.unbind(1)
            out, lse = out[batch, row, head], lse[batch, head, row]
        return reference.judge(out, lse, self.ref, self.plain, tensors.q.dtype)


def plan_of(kernel: Kernel, tensors: Tensors, scale: float | None = None) -> Plan:
    """The bound launch of `kernel` on these tensors' shapes."""
    return Plan(tensors.q, tensors.k, tensors.v, kernel.spec.problem.mask is Mask.CAUSAL, scale, "bshd", kernel)


def run_once(plan: Plan, tensors: Tensors) -> None:
    """One launch on poisoned outputs, waited for. Raises HungKernelError after the time limit, DriverError on a fault."""
    tensors.poison()
    plan.into(tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse)
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + FIRST_LAUNCH_LIMIT
    try:
        while not done.query():
            if time.monotonic() > deadline:
                raise HungKernelError(f"kernel did not finish in {FIRST_LAUNCH_LIMIT:g} s")
            time.sleep(50e-6)
    except RuntimeError as error:  # torch.AcceleratorError by version
        raise DriverError(f"kernel failed: {str(error).splitlines()[0]}") from error


class Bench:
    """One workload's rotating inputs, its reference, and the timing of candidates on them."""

    def __init__(self, problem: Problem, workload: Workload, device: int, seed: int = 0) -> None:
        """Allocates and fills the inputs: at least twice the L2, at most 8 sets."""
        generator = torch.Generator(torch.device("cuda", device)).manual_seed(seed)
        self.problem, self.workload, self.seed = problem, workload, seed
        first = Tensors.random(problem, workload, generator)
        count = input_sets(workload.io_bytes(problem), torch.cuda.get_device_properties(device).L2_cache_size)
        self.sets = [first, *(Tensors.random(problem, workload, generator) for _ in range(count - 1))]

    def expected(self) -> Expected:
        """The reference on sampled rows of the first set."""
        causal = self.problem.mask is Mask.CAUSAL
        rows = reference.sample_rows(self.workload, SAMPLED_ROWS, self.seed, causal).to(self.sets[0].q.device)
        return Expected.of(self.sets[0], causal, self.problem.head_dim**-0.5, rows)

    def time(
        self, kernels: Mapping[str, Kernel], rounds: int = ROUNDS, round_seconds: float = ROUND_SECONDS
    ) -> Iterator[tuple[str, Timing]]:
        """Times all kernels interleaved and yields a timing for each, by its key, once the last round is done."""
        for key, seconds in self.seconds(kernels, rounds, round_seconds).items():
            spread = Spread.of(seconds)
            yield key, Timing(spread.median, spread.low, spread.high, len(seconds))

    def seconds(
        self, kernels: Mapping[str, Kernel], rounds: int, round_seconds: float = ROUND_SECONDS, with_lse: Container[str] = ()
    ) -> dict[str, list[float]]:
        """The same, with the seconds of every round: for ratios, which are taken within a round. `with_lse`: keys that write lse."""
        timers = {key: self._timer(kernel, round_seconds, key in with_lse) for key, kernel in kernels.items()}
        return interleaved(timers, rounds, self.seed)

    def _timer(self, kernel: Kernel, round_seconds: float, with_lse: bool) -> Timer:
        plan, sets = plan_of(kernel, self.sets[0]), self.sets

        def launch(i: int) -> None:
            t = sets[i]
            plan.into(t.q, t.k, t.v, t.out, t.lse if with_lse else None)  # most calls do not want it

        return Timer(launch, len(sets), round_seconds)
