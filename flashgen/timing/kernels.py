"""Timing kernels: rotating inputs of one workload, candidates interleaved by the protocol of protocol.py."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch

from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

from ..launch.once import plan_of
from ..launch.tensors import Tensors
from ..numerics.forward import sample_rows
from ..records.store import Timing
from ..verification.expected import Expected
from .protocol import Timer, input_sets, interleaved
from .spread import ROUNDS, Spread

ROUND_SECONDS = 4e-3  # of GPU time for one candidate in one round
SAMPLED_ROWS = 256


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
        rows = sample_rows(self.workload, SAMPLED_ROWS, self.seed, causal).to(self.sets[0].q.device)
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
