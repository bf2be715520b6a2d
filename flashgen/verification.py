"""`verify`: the numerics rule over awkward shapes, and the two small workloads that every tuning candidate must pass first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashgen.build.host_kernel import HostKernel, HostLimits
from flashgen.build.kernel import Kernel
from flashgen.codegen.problem import Dtype, Mask, Problem, Workload

from .host import run_on_host
from .measure import Expected, Tensors, plan_of, run_once
from .reference import Verdict

# (batch, heads_q, heads_kv, len_q, len_kv): lengths of one, off by one from tiles, more queries than keys (rows that see no
# key under a causal mask), no keys, grouped and single key/value heads, many tiles; one key that the last query of a tile alone sees, and
# one that its first query alone does not, each in a step of its own. Each has rows enough for the rule's statistics.
SHAPES = (
    (8, 16, 16, 1, 1),
    (2, 4, 2, 131, 197),
    (1, 2, 1, 130, 33),
    (1, 8, 1, 63, 65),
    (3, 2, 2, 127, 129),
    (8, 16, 2, 1, 1025),
    (1, 2, 1, 300, 0),
    (4, 8, 8, 1025, 1),
    (2, 6, 3, 255, 257),
    (1, 1, 1, 641, 642),
    (1, 1, 1, 642, 640),
    (1, 4, 4, 1000, 1531),
    (1, 2, 1, 2048, 2048),
)
SCREENING = (SHAPES[1], SHAPES[2])
LIMITS = HostLimits(seconds=600.0)  # of one launch on the CPU, which takes seconds
# Cases whose tensors are made for them: nearly equal probabilities of so many keys, whose sum has to be kept more exactly than fp32 adds
# it up; scores of which some are huge; values so large that the rule grants no noise; tensors past 2^31 elements, on the CPU alone.
LONG, HUGE, COARSE, FAR = (1, 1, 1, 16, 65536), (2, 4, 2, 131, 500), (1, 2, 1, 131, 1000), (2, 2, 1, 131, 197)
_MAGNITUDE = {Dtype.BF16: 2.0**40, Dtype.FP16: 2.0**13}  # of HUGE
_OFFSET = {Dtype.BF16: 190.0, Dtype.FP16: 1500.0}  # of COARSE: neighbours are 1 apart, and 0.3 more rounds away


@dataclass(frozen=True)
class CaseResult:
    """One workload at one logit magnitude (what q was multiplied by), with the rule's verdict."""

    workload: Workload
    magnitude: float
    verdict: Verdict


@dataclass(frozen=True)
class _Case:
    """`expected`: of groups of rows, each judged among its like: a bound that one group needs would hide what another loses."""

    workload: Workload
    magnitude: float
    tensors: Tensors
    expected: tuple[Expected, ...]

    def judge(self) -> Verdict:
        """The first group's that failed."""
        verdicts = [expected.judge(self.tensors) for expected in self.expected]
        return next((verdict for verdict in verdicts if not verdict.ok), verdicts[0])


class Screen:
    """The small workloads of one problem, whole, with references computed once for all candidates.

    In every other case tensors lie apart.
    """

    def __init__(
        self,
        problem: Problem,
        device: str,
        shapes: Sequence[tuple[int, int, int, int, int]] = SCREENING,
        magnitudes: Sequence[float] = (1.0,),
        special: Sequence[tuple[int, int, int, int, int]] = (),
    ) -> None:
        """`device`: where inputs are drawn and references computed, 'cuda:0' or 'cpu'. `special`: which of LONG, HUGE, COARSE and FAR."""
        self.special = special
        self.problem, self.device, self.shapes, self.magnitudes = problem, device, shapes, magnitudes
        self._cases: dict[int, list[_Case]] = {}

    def cases(self, group_unit: int) -> list[_Case]:
        """Of each shape with as many query heads as make its groups a multiple of that: see `Family.group_unit`."""
        if group_unit not in self._cases:
            generator = torch.Generator(self.device).manual_seed(1)
            causal, scale = self.problem.mask is Mask.CAUSAL, self.problem.head_dim**-0.5
            cases: list[_Case] = []
            for shape in self.shapes:
                workload = _workload(shape, group_unit)
                for magnitude in self.magnitudes:
                    tensors = Tensors.random(self.problem, workload, generator)
                    tensors.q.mul_(magnitude)
                    if len(cases) % 2 == 0:
                        tensors = tensors.apart()
                    cases.append(_Case(workload, magnitude, tensors, (Expected.of(tensors, causal, scale),)))
            for shape in self.special:
                tensors = Tensors.random(self.problem, workload := _workload(shape, group_unit), generator)
                tensors, magnitude, groups = _SPECIAL[shape](tensors, self.problem.dtype)
                rows = [_rows(workload, queries) for queries in groups]
                cases.append(_Case(workload, magnitude, tensors, tuple(Expected.of(tensors, causal, scale, of) for of in rows)))
            self._cases[group_unit] = cases
        return self._cases[group_unit]

    def judge(self, kernel: Kernel | HostKernel) -> list[CaseResult]:
        """Runs the kernel on every case that it can take: calls like the others go to another family.

        Raises HungKernelError or DriverError if it does not finish or faults on a GPU, HostFaultError if a check fails on the CPU.
        """
        results = []
        for case in self.cases(kernel.spec.family.group_unit(kernel.spec.config)):
            if kernel.spec.family.launch_refusals(kernel.spec.problem, case.workload, case.tensors.strides()):
                continue
            _launch(kernel, case.tensors)
            results.append(CaseResult(case.workload, case.magnitude, case.judge()))
        return results


def _workload(shape: tuple[int, int, int, int, int], group_unit: int) -> Workload:
    batch, heads_q, heads_kv, *lengths = shape
    return Workload(batch, heads_kv * math.lcm(heads_q // heads_kv, group_unit), heads_kv, *lengths)


def _rows(workload: Workload, queries: Sequence[int]) -> torch.Tensor:
    """These queries of all heads, as `Expected.rows`."""
    return torch.cartesian_prod(torch.arange(workload.batch), torch.arange(workload.heads_q), torch.tensor(queries))


_Special = tuple[Tensors, float, list[Sequence[int]]]  # the tensors, what q was multiplied by, and groups of queries, each judged by itself


def _nearly_equal(tensors: Tensors, _dtype: Dtype) -> _Special:
    """Gives a row's keys one score, but for those that it sees first, which a kernel takes for the maximum: they are a little higher.

    The additions of one number round to the same side again and again. Which side depends on the row: each has other scores. They are
    such that log-sum-exps are small, where fp32 grants little noise.
    """
    (_, len_q, _, head_dim), len_kv = tensors.q.shape, tensors.k.shape[1]
    tensors.q.copy_((1 + torch.arange(len_q) / 128)[None, :, None, None])
    tensors.k.fill_(-math.log(len_kv) * head_dim**-0.5)
    tensors.k[:, -2 * len_q :] *= 0.95
    return tensors, 1.0, [range(len_q)]


def _huge(tensors: Tensors, dtype: Dtype) -> _Special:
    """Gives every third row scores that have to be shifted before they are scaled, next to rows of ordinary ones.

    All scores are sums of whole numbers, which are exact in any order: two of them are the same, or so far apart that one has all the
    probability. Those of the second batch are below 0. Of the first key/value head, keys that come last have ordinary scores in all rows.
    """
    q, k, magnitude = tensors.q, tensors.k, _MAGNITUDE[dtype]
    q.round_()
    k.round_()
    q[1].abs_()
    k[1].abs_().neg_()
    q[:, ::3] *= magnitude
    k[:, : k.shape[1] // 3, 0] /= magnitude
    queries = range(q.shape[1])
    return tensors, magnitude, [queries[::3], [query for query in queries if query % 3]]


def _coarse(tensors: Tensors, dtype: Dtype) -> _Special:
    """Moves values to where the rule is strictest: it grants the rounding of the output alone."""
    tensors.v.add_(_OFFSET[dtype])
    return tensors, 1.0, [range(tensors.q.shape[1])]


def _far(tensors: Tensors, _dtype: Dtype) -> _Special:
    return tensors.far(), 1.0, [range(tensors.q.shape[1])]


_SPECIAL = {LONG: _nearly_equal, HUGE: _huge, COARSE: _coarse, FAR: _far}


def _launch(kernel: Kernel | HostKernel, tensors: Tensors) -> None:
    if isinstance(kernel, Kernel):
        run_once(plan_of(kernel, tensors), tensors)
    else:
        run_on_host(kernel, tensors, limits=LIMITS)


def run(kernel: Kernel | HostKernel) -> list[CaseResult]:
    """The numerics rule over all awkward shapes, at ordinary and at large logits, and over the special cases."""
    return whole_screen(kernel.spec.problem, f"cuda:{kernel.gpu.ordinal}" if isinstance(kernel, Kernel) else "cpu").judge(kernel)


def whole_screen(problem: Problem, device: str) -> Screen:
    """All that `run` puts to a kernel."""
    special = (LONG, HUGE, COARSE, FAR) if device == "cpu" else (LONG, HUGE, COARSE)
    return Screen(problem, device, SHAPES, magnitudes=(1.0, 16.0), special=special)
