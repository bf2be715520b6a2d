"""Timing kernels: rotating inputs of one workload, candidates interleaved by the protocol of protocol.py."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch

from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.operation import operation_of
from flashgen.codegen.operations.forward import BLOCK_TABLE, CACHE_LEFTPAD, CACHE_SEQLENS
from flashgen.codegen.problem import Pass, Problem
from flashgen.codegen.workload import Workload

from ..launch.bound import BoundCall, addresses_of
from ..launch.tensors import Tensors
from ..numerics.oracle import oracle_of
from ..records.store import Timing
from ..verification.expected import Expected
from .protocol import Timer, input_sets, interleaved, with_finals
from .spread import ROUNDS, Spread

ROUND_SECONDS = 4e-3  # of GPU time for one candidate in one round
SAMPLED_ROWS = 256


class Bench:
    """One workload's rotating inputs, its reference, and the timing of candidates on them."""

    def __init__(self, problem: Problem, workload: Workload, device: int, seed: int = 0) -> None:
        """Allocates and fills the inputs: at least twice the L2, at most 8 sets."""
        generator = torch.Generator(torch.device("cuda", device)).manual_seed(seed)
        self.problem, self.workload, self.seed = problem, workload, seed
        first = usual_inputs(problem, workload, generator)
        count = input_sets(operation_of(problem).io_bytes(problem, workload), torch.cuda.get_device_properties(device).L2_cache_size)
        self.sets = [first, *(usual_inputs(problem, workload, generator) for _ in range(count - 1))]

    def expected(self) -> Expected:
        """What a sample of the first set's outputs must be."""
        sample = oracle_of(self.problem).sample(self.problem, self.workload, SAMPLED_ROWS, self.seed)
        return Expected.of(self.sets[0], sample=sample.to(next(iter(self.sets[0].values())).device))

    def time(
        self, kernels: Mapping[str, Kernel], rounds: int = ROUNDS, round_seconds: float = ROUND_SECONDS
    ) -> Iterator[tuple[str, Timing]]:
        """Times all kernels interleaved, and the fastest again; yields a timing for each, by its key, once the last round is done."""
        timers = {key: self._timer(kernel, round_seconds, False) for key, kernel in kernels.items()}
        for key, seconds in with_finals(timers, rounds, self.seed).items():
            spread = Spread.of(seconds)
            yield key, Timing(spread.median, spread.low, spread.high, len(seconds))

    def seconds(
        self, kernels: Mapping[str, Kernel], rounds: int, round_seconds: float = ROUND_SECONDS, with_all: Container[str] = ()
    ) -> dict[str, list[float]]:
        """The same, with the seconds of every round: for ratios, which are taken within a round.

        `with_all`: keys that write optional outputs, too.
        """
        timers = {key: self._timer(kernel, round_seconds, key in with_all) for key, kernel in kernels.items()}
        return interleaved(timers, rounds, self.seed)

    def _timer(self, kernel: Kernel, round_seconds: float, with_all: bool) -> Timer:
        bound, operands = BoundCall(kernel, self.sets[0].call()), self.sets[0].operands
        # Most calls do not want them; but where keys are in several pages, only the table says in which.
        unwanted = () if with_all else [operand.name for operand in operands if operand.optional and operand.name != BLOCK_TABLE]
        addresses = [addresses_of(kernel.operands, tensors, unwanted) for tensors in self.sets]
        stream = torch.cuda.current_stream

        def launch(i: int) -> None:
            bound(stream().cuda_stream, *addresses[i])

        return Timer(launch, len(addresses), round_seconds)


def usual_inputs(problem: Problem, workload: Workload, generator: torch.Generator) -> Tensors:
    """What is drawn to be verified, but where attention finds keys in a cache, sequences have all keys that they may have.

    By these the FLOPs and bytes of a workload are counted.
    """
    drawn = Tensors.random(problem, workload, generator)
    if not problem.is_cached or problem.operation != Pass.FORWARD.value:
        return drawn
    drawn[CACHE_SEQLENS].fill_(workload.len_kv)
    return Tensors(problem, workload, {name: tensor for name, tensor in drawn.items() if name != CACHE_LEFTPAD})
