"""The inputs that kernels are judged on: seeded random cases, the fixed awkward ones, and the launch of one kernel on one case."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen import reference
from flashgen.build.kernel import Kernel
from flashgen.codegen.config import Config
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Dtype, Mask, Problem, Workload
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
MAX_LENGTH = 4096
MAX_PAIRS = 2**26  # (query, key) pairs of all heads: milliseconds, the float64 reference included
MIN_ROWS = 128  # a maximum over a handful of rows is a coin flip, so short lengths get more heads
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


@dataclass(frozen=True)
class Case:
    """One input. `config_seed`: None for the family's default config, else the seed by which one of its legal ones is drawn.

    q, k and v are drawn from N(0, 1); `magnitude` multiplies q, `offset` is added to v. Outputs around an offset whose neighbours
    are 1 apart are where the rule is strictest: adding 0.3 rounds away, so it grants no noise. `layouts`: of q, k, v and out.
    """

    name: str
    problem: Problem
    workload: Workload
    scale: float
    magnitude: float = 1.0
    layouts: tuple[Layout, Layout, Layout, Layout] = (Layout.DENSE,) * 4
    seed: int = 0
    offset: float = 0.0
    config_seed: int | None = None

    def config(self, family: Family, target: Target) -> Config:
        """The config that this case asks for."""
        if self.config_seed is None:
            return family.default(self.problem, target)
        return random.Random(self.config_seed).choice(family.legal_configs(self.problem, target))

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
        shape = (self.workload.batch, self.workload.heads_q, self.workload.len_q)
        lse = Poisoned.make(shape, (shape[1] * shape[2], shape[2], 1), torch.float32, device)
        return Tensors(q.view, k.view, v.view, out, lse)

    def values(self, family: Family, tensors: Tensors) -> tuple[int | float, ...]:
        """The kernel's parameters after the pointers, in the family's order."""
        strides = []
        for tensor in (tensors.q, tensors.k, tensors.v, tensors.out.view):
            batch, row, head, _ = tensor.stride()
            strides.append((batch, head, row))
        return family.values(self.workload, strides, self.scale)

    def launch(self, kernel: Kernel, tensors: Tensors) -> None:
        """Enqueues the kernel on the current stream."""
        family = kernel.spec.family
        bound = kernel.bind(family.grid(kernel.spec.config, self.workload), self.values(family, tensors))
        pointers = (t.data_ptr() for t in (tensors.q, tensors.k, tensors.v, tensors.out.view, tensors.lse.view))
        bound(torch.cuda.current_stream().cuda_stream, *pointers)

    def judge(self, tensors: Tensors) -> reference.Verdict:
        """What the rule says of out and lse as they are now: of all rows, or of sampled ones where these are too many."""
        return self.judge_results(tensors, tensors.out.view, tensors.lse.view)

    def judge_results(self, tensors: Tensors, out: Tensor, lse: Tensor) -> reference.Verdict:
        """As `judge`, for results that lie elsewhere: out [batch, length, heads, width]."""
        w, causal = self.workload, self.problem.mask is Mask.CAUSAL
        rows = None
        if w.batch * w.heads_q * w.len_q * w.len_kv > ALL_ROWS_BELOW:
            rows = reference.sample_rows(w, SAMPLED_ROWS, self.seed, causal).to(out.device)
            out, lse = out[rows[:, 0], rows[:, 2], rows[:, 1]], lse[rows[:, 0], rows[:, 1], rows[:, 2]]
        ref = reference.reference(tensors.q, tensors.k, tensors.v, causal=causal, scale=self.scale, rows=rows)
        pt = reference.plain(tensors.q, tensors.k, tensors.v, causal=causal, scale=self.scale, rows=rows)
        return reference.judge(out, lse, ref, pt, out.dtype)

    def spec(self, family: Family, target: Target) -> KernelSpec:
        """The kernel that this case asks for."""
        return KernelSpec(family, self.problem, self.config(family, target), target)

    def default_spec(self, family: Family, target: Target) -> KernelSpec:
        """The same with the family's default config."""
        return KernelSpec(family, self.problem, family.default(self.problem, target), target)


def random_cases(count: int, seed: int, head_dims: Sequence[int] = tuple(range(8, 257, 8))) -> list[Case]:
    """`count` cases; the same for the same arguments. Every fourth has at least 1024 keys, eight tiles of 128."""
    rng = random.Random(seed)
    return [_random_case(rng, index, head_dims) for index in range(count)]


def _random_case(rng: random.Random, index: int, head_dims: Sequence[int]) -> Case:
    head_dim = rng.choice(head_dims)
    head_dim_v = rng.choice(head_dims) if rng.random() < 1 / 3 else head_dim
    problem = Problem(rng.choice(list(Dtype)), head_dim, head_dim_v, rng.choice(list(Mask)))
    workload = _random_workload(rng, least_keys=1024 if index % 4 == 0 else 1)
    scale = head_dim**-0.5 * rng.choice((1.0, 1.0, 0.5, 1.7))
    magnitude = rng.choice((1.0, 1.0, 4.0, 16.0))
    layouts = (rng.choice(ORDINARY), rng.choice(ORDINARY), rng.choice(ORDINARY), rng.choice(ORDINARY))
    config_seed = rng.getrandbits(32) if rng.random() < 2 / 3 else None
    config = "default" if config_seed is None else "any"
    name = f"{index:03d}-{problem.name}-{_short(workload)}-x{magnitude:g}-{config}"
    return Case(name, problem, workload, scale, magnitude, layouts, rng.getrandbits(32), config_seed=config_seed)


def _random_workload(rng: random.Random, least_keys: int) -> Workload:
    def length(least: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(MAX_LENGTH))))

    len_kv = length(least_keys)
    len_q = len_kv if rng.random() < 1 / 3 else length(1)
    group = rng.choice((1, 1, 2, 4, 8))
    heads_kv = rng.choice((1, 2, 3, 4))
    if rng.random() < 1 / 8:  # multi-query attention, with a ratio that is no power of two
        heads_kv, group = 1, rng.choice((3, 5, 6, 7))
    batch = rng.choice((1, 2, 3))
    batch = max(batch, -(-MIN_ROWS // (heads_kv * group * len_q)))
    while batch * heads_kv * group * len_q * len_kv > MAX_PAIRS:
        if batch > 1:
            batch -= 1
        elif heads_kv > 1:
            heads_kv -= 1
        else:
            group //= 2
    return Workload(batch, heads_kv * group, heads_kv, len_q, len_kv)


def _short(workload: Workload) -> str:
    """The workload's name as a part of a test's id."""
    return workload.name.replace(" ", "").replace("/", ".")


def fixed_cases() -> list[Case]:
    """The awkward ones, each with an id, for the families' default configs."""
    cases = [*_lengths(), *_masked_rows(), *_widths(), *_strides(), *_logits(), *_values(), *_past_2_31()]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def _case(
    name: str,
    len_q: int,
    len_kv: int,
    mask: Mask = Mask.FULL,
    *,
    dtype: Dtype = Dtype.BF16,
    width: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    magnitude: float = 1.0,
    layouts: tuple[Layout, Layout, Layout, Layout] = (Layout.DENSE,) * 4,
    offset: float = 0.0,
) -> Case:
    problem, workload = Problem(dtype, *width, mask), Workload(batch, *heads, len_q, len_kv)
    return Case(f"{name}-{problem.name}-{_short(workload)}", problem, workload, width[0] ** -0.5, magnitude, layouts, offset=offset)


def _lengths() -> Iterator[Case]:
    for mask in Mask:
        for len_q, len_kv in ((1, 1), (1, 2), (1, 777), (777, 777), (16, 1)):
            yield _case("length", len_q, len_kv, mask, heads=(16, 4), batch=16 if len_q < 100 else 1)
        # One off the tiles of any config: rows 32 to 256, columns 32 to 128.
        for edge_q, edge_kv in ((32, 32), (64, 48), (128, 64), (256, 96), (128, 128), (64, 640)):
            for off in (-1, 0, 1):
                yield _case(f"tile-edge{off:+d}", edge_q + off, edge_kv + off, mask)
                yield _case(f"tile-edge{off:+d}-crossed", edge_q + off, edge_kv - off, mask, dtype=Dtype.FP16, width=(128, 128))
        yield _case("no-keys", 200, 0, mask)
    yield _case("one-query-many-keys", 1, 4096, Mask.CAUSAL, heads=(32, 8), batch=4)


def _masked_rows() -> Iterator[Case]:
    for len_q, len_kv in ((300, 100), (129, 1), (1000, 64), (257, 256), (128, 64), (129, 65), (4000, 2000)):
        yield _case("more-queries-than-keys", len_q, len_kv, Mask.CAUSAL)
        yield _case("more-queries-than-keys", len_q, len_kv, Mask.CAUSAL, dtype=Dtype.FP16, width=(128, 40))


def _widths() -> Iterator[Case]:
    for width in ((8, 8), (24, 24), (72, 72), (96, 96), (192, 128), (40, 256), (256, 8), (256, 256)):
        for mask in Mask:
            yield _case("width", 333, 555, mask, width=width, layouts=(Layout.PADDED,) * 4)


def _strides() -> Iterator[Case]:
    for layout in ORDINARY:
        yield _case(f"layout-{layout.value}", 190, 210, Mask.CAUSAL, layouts=(layout,) * 4)
    singular = (Layout.SINGULAR,) * 4
    yield _case("size-1-strides", 500, 500, batch=1, heads=(1, 1), layouts=singular)
    yield _case("size-1-strides", 1, 500, batch=1, heads=(128, 128), layouts=singular)
    yield _case("size-1-strides", 500, 1, batch=2, heads=(2, 1), layouts=singular)


def _logits() -> Iterator[Case]:
    for dtype in Dtype:
        for len_kv in (1, 7, 1500):
            yield _case("large-logits", 400, len_kv, dtype=dtype, magnitude=64.0)
        yield _case("large-logits", 1500, 1500, Mask.CAUSAL, dtype=dtype, width=(128, 128), magnitude=64.0)
        # Causal, so that rows differ in their log-sum-exp: one value alone says little of the error.
        yield _case("equal-logits", 1500, 1500, Mask.CAUSAL, dtype=dtype, magnitude=0.0)


def _values() -> Iterator[Case]:
    for dtype, offset in ((Dtype.FP16, 1500.0), (Dtype.BF16, 190.0)):
        for mask in Mask:
            yield _case("large-values", 400, 1500, mask, dtype=dtype, offset=offset)


def _past_2_31() -> Iterator[Case]:
    """Tensors of 4.3 GB and more each; a few dozen GB of device memory at most, one case at a time."""
    sizes = {Layout.FAR_ROWS: (700, 2, 1), Layout.FAR_HEADS: (200, 5, 1), Layout.FAR_BATCHES: (200, 2, 5)}
    for far, (length, heads, batch) in sizes.items():
        yield _case(f"past-2^31-{far.value}", length, length, Mask.CAUSAL, heads=(heads, heads), batch=batch, layouts=(far,) * 4)
    yield _case("past-2^31-dense-queries", 2**31 // (128 * 128) + 999, 100, width=(128, 128), heads=(128, 2), batch=1)
    yield _case("past-2^31-dense-keys", 16, 2**31 // (16 * 128) + 999, width=(128, 128), heads=(16, 16), batch=1)
