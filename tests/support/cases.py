"""The inputs that kernels are judged on: what a case is, its tensors, and the launch of one kernel on it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.attention import TENSORS, attention_call
from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Family
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import Program
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload
from flashgen.numerics.forward import exact_attention, plain, sample_rows
from flashgen.numerics.oracle import TORCH_DTYPES
from flashgen.numerics.rule import Verdict
from tests.support import configs
from tests.support.judging import judge_forward

SAMPLED_ROWS = 2048
ALL_ROWS_BELOW = 2**30  # pairs; above, sampled rows are judged
_GUARD = 512  # elements before and after each tensor; a multiple of 16 bytes


class Layout(enum.Enum):
    """How a tensor of [batch, length, heads, width] lies in memory."""

    DENSE = "bshd"
    HEADS_FIRST = "bhsd"  # [batch, heads, length, width]
    LENGTH_FIRST = "sbhd"  # [length, batch, heads, width]
    PACKED = "packed"  # one of three in [batch, length, 3, heads, width]
    PADDED = "padded"  # heads and rows an odd number of 16-byte units apart
    SINGULAR = "singular"  # dense, but the strides of size-1 dimensions are far out
    FAR_ROWS = "far-rows"  # the last row lies past 2^31 elements
    FAR_HEADS = "far-heads"  # the last head does
    FAR_BATCHES = "far-batches"  # the last batch does

    def strides(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Strides in elements of (batch, length, heads, width)."""
        batch, length, heads, width = (max(1, size) for size in shape)
        dense = (length * heads * width, heads * width, width, 1)
        match self:
            case Layout.HEADS_FIRST:
                return heads * length * width, width, length * width, 1
            case Layout.LENGTH_FIRST:
                return heads * width, batch * heads * width, width, 1
            case Layout.PACKED:
                return 3 * dense[0], 3 * dense[1], width, 1
            case Layout.PADDED:
                head = width + (8 if width % 16 == 0 else 16)
                row = heads * head + (8 if heads * head % 16 == 0 else 16)
                return length * row + 24, row, head, 1
            case Layout.SINGULAR:
                return tuple(2**33 + 8 if size == 1 and dim < 3 else dense[dim] for dim, size in enumerate(shape))  # type: ignore[return-value]
            case Layout.FAR_ROWS:
                return length * _far(length), _far(length), width, 1
            case Layout.FAR_HEADS:
                return heads * _far(heads), width, _far(heads), 1
            case Layout.FAR_BATCHES:
                return _far(batch), heads * width, width, 1
            case _:
                return dense


def _far(size: int) -> int:
    """The least stride, a multiple of 8, by which the last of `size` lies past 2^31 elements."""
    return (2**31 // max(1, size - 1) // 8 + 1) * 8


ORDINARY = (Layout.DENSE, Layout.HEADS_FIRST, Layout.LENGTH_FIRST, Layout.PACKED, Layout.PADDED)


@dataclass(frozen=True)
class Poisoned:
    """A tensor as a view of a buffer that is NaN everywhere else."""

    view: Tensor
    buffer: Tensor

    @classmethod
    def make(cls, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str) -> Poisoned:
        """All NaN, the view included."""
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0
        extent = -(-extent // 8) * 8
        buffer = torch.full((extent + 2 * _GUARD,), torch.nan, dtype=dtype, device=device)
        return cls(buffer.as_strided(tuple(shape), tuple(strides), _GUARD), buffer)

    def written_outside(self) -> int:
        """How many elements of the buffer beside the view are no longer NaN."""
        return int((~self.buffer.isnan()).sum()) - int((~self.view.isnan()).sum())


@dataclass(frozen=True)
class Tensors:
    """q, k, v and what the kernel writes, each within its poisoned buffer."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Poisoned
    lse: Poisoned

    def addresses(self) -> list[int]:
        """Of all five, in the order in which a launch takes them."""
        return [t.data_ptr() for t in (self.q, self.k, self.v, self.out.view, self.lse.view)]


@dataclass(frozen=True)
class Case:
    """One input. Its config: the family's default one, else one that is drawn with `config_seed`, else the one `chosen`.

    q, k and v are drawn from N(0, 1); `magnitude` multiplies q, `offset` is added to v. Outputs around an offset whose neighbours
    are 1 apart are where the rule is strictest: adding 0.3 rounds away, so it grants no noise. `layouts`: of q, k, v and out.
    `rising`: by how much scaled scores rise, evenly, from 0 at the last key to the first one; they fall if it is negative.
    """

    name: str
    problem: Problem
    workload: Workload
    scale: float
    magnitude: float = 1.0
    layouts: tuple[Layout, Layout, Layout, Layout] = (Layout.DENSE,) * 4
    seed: int = 0
    offset: float = 0.0
    rising: float = 0.0
    config_seed: int | None = None
    chosen: Config | None = None

    def config(self, family: Family, target: Target) -> Config:
        """The config that this case asks for."""
        if self.chosen is not None:
            return self.chosen
        if self.config_seed is None:
            return family.default(self.problem, target)
        return configs.draw(family, self.problem, target, self.config_seed, [self.workload])

    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k, v and out."""
        w, p = self.workload, self.problem
        queries, keys = (w.batch, w.len_q, w.heads_q), (w.batch, w.len_kv, w.heads_kv)
        return (*queries, p.head_dim), (*keys, p.head_dim), (*keys, p.head_dim_v), (*queries, p.head_dim_v)

    def make(self, device: str) -> Tensors:
        """The tensors; out and lse hold NaN. The same on each call with the same device type."""
        dtype = TORCH_DTYPES[self.problem.dtype]
        generator = torch.Generator(device).manual_seed(self.seed)
        q, k, v, out = (Poisoned.make(s, layout.strides(s), dtype, device) for s, layout in zip(self.shapes(), self.layouts, strict=True))
        for tensor in (q.view, k.view, v.view):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=dtype, device=device))
        q.view.mul_(self.magnitude)
        v.view.add_(self.offset)
        if self.rising:
            self._let_scores_rise(q.view, k.view)
        shape = (self.workload.batch, self.workload.heads_q, self.workload.len_q)
        lse = Poisoned.make(shape, (shape[1] * shape[2], shape[2], 1), torch.float32, device)
        return Tensors(q.view, k.view, v.view, out, lse)

    def _let_scores_rise(self, q: Tensor, k: Tensor) -> None:
        """Gives the last column of q and k to it: the same for all queries, falling to 0 along the keys.

        The last, because what is summed up before is small then: sums of large numbers round more than the rule means to judge.
        """
        root = math.sqrt(abs(self.rising) / self.scale)
        q[..., -1] = root
        k[..., -1] = torch.linspace(math.copysign(root, self.rising), 0.0, k.shape[1], device=k.device)[:, None]

    def call(self) -> Call:
        """What is known of it at launch but addresses."""
        found = (layout.strides(shape) for shape, layout in zip(self.shapes(), self.layouts, strict=True))
        return attention_call(self.problem, self.workload, dict(zip(TENSORS, found, strict=True)), self.scale)

    def refusals(self, family: Family, target: Target) -> list[str]:
        """Why no kernel of the family can take this case."""
        return family.refusals(self.problem, target) or family.call_refusals(self.call())

    def program(self, family: Family, config: Config, device: Device) -> Program:
        """What is to be launched."""
        return family.program(config, self.call(), device)

    def launch(self, kernel: Kernel, tensors: Tensors) -> None:
        """Enqueues the kernel on the current stream."""
        program = self.program(kernel.spec.family, kernel.spec.config, kernel.gpu.device)
        buffers = [torch.zeros(buffer.bytes, dtype=torch.uint8, device=tensors.q.device) for buffer in program.buffers]
        bound = kernel.bind(program)
        bound(torch.cuda.current_stream().cuda_stream, *tensors.addresses(), *(buffer.data_ptr() for buffer in buffers))

    def judge(self, tensors: Tensors) -> Verdict:
        """What the rule says of out and lse as they are now: of all rows, or of sampled ones where these are too many."""
        return self.judge_results(tensors, tensors.out.view, tensors.lse.view)

    def rejections(self, tensors: Tensors) -> list[str]:
        """Why the results are rejected: by the rule, or because memory beside them was written."""
        verdict = self.judge(tensors)
        outside = {"out": tensors.out.written_outside(), "lse": tensors.lse.written_outside()}
        return [
            *([] if verdict.ok else [verdict.message]),
            *(f"{count} elements written outside {name}" for name, count in outside.items() if count),
        ]

    def judge_results(self, tensors: Tensors, out: Tensor, lse: Tensor) -> Verdict:
        """As `judge`, for results that lie elsewhere: out [batch, length, heads, width]."""
        w, causal = self.workload, self.problem.mask is Mask.CAUSAL
        rows = None
        if w.batch * w.heads_q * w.len_q * w.len_kv > ALL_ROWS_BELOW:
            rows = sample_rows(w, SAMPLED_ROWS, self.seed, causal).to(out.device)
            out, lse = out[rows[:, 0], rows[:, 2], rows[:, 1]], lse[rows[:, 0], rows[:, 1], rows[:, 2]]
        ref = exact_attention(tensors.q, tensors.k, tensors.v, causal=causal, scale=self.scale, rows=rows)
        pt = plain(tensors.q, tensors.k, tensors.v, causal=causal, scale=self.scale, rows=rows)
        return judge_forward(out, lse, ref, pt, out.dtype)

    def spec(self, family: Family, target: Target) -> KernelSpec:
        """The kernel that this case asks for."""
        return KernelSpec(family, self.problem, self.config(family, target), target)

    def default_spec(self, family: Family, target: Target) -> KernelSpec:
        """The same with the family's default config."""
        return KernelSpec(family, self.problem, family.default(self.problem, target), target)


def short_name(workload: Workload) -> str:
    """The workload's name as a part of a test's id."""
    return workload.name.replace(" ", "").replace("/", ".")
