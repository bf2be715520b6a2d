"""The awkward cases: lengths at edges, rows without keys, widths, strides, large logits and values, chosen configs, huge tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.config import Config
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.selection.families import family_of
from tests.support.cases import ORDINARY, Case, Layout, short_name
from tests.support.configs import CHOSEN, CHOSEN_SM90

RISES = (40.0, 400.0, 4000.0)


def fixed_cases() -> list[Case]:
    """The awkward ones, each with an id: for the families' default configs where none is chosen."""
    cases = [*_lengths(), *_masked_rows(), *_widths(), *_strides(), *_logits(), *_values(), *_chosen_configs(), *_past_2_31()]
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
    rising: float = 0.0,
    chosen: Config | None = None,
) -> Case:
    problem, workload = Problem(dtype, *width, mask), Workload(batch, *heads, len_q, len_kv)
    name = f"{name}-{problem.name}-{short_name(workload)}" + (f"-{chosen.name}" if chosen else "")
    return Case(name, problem, workload, width[0] ** -0.5, magnitude, layouts, offset=offset, rising=rising, chosen=chosen)


def _lengths() -> Iterator[Case]:
    for mask in Mask:
        for len_q, len_kv in ((1, 1), (1, 2), (1, 777), (777, 777), (16, 1)):
            yield _case("length", len_q, len_kv, mask, heads=(16, 4), batch=16 if len_q < 100 else 1)
        # One off the usual tiles: rows 32 to 256, columns 32 to 128. Of chosen configs, whose steps are known, see below.
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
    for dtype in ELEMENTS:
        for len_kv in (1, 7, 1500):
            yield _case("large-logits", 400, len_kv, dtype=dtype, magnitude=64.0)
        yield _case("large-logits", 1500, 1500, Mask.CAUSAL, dtype=dtype, width=(128, 128), magnitude=64.0)
        # Causal, so that rows differ in their log-sum-exp: one value alone says little of the error.
        yield _case("equal-logits", 1500, 1500, Mask.CAUSAL, dtype=dtype, magnitude=0.0)
    # Keys are visited from the last to the first: a maximum that rises on the way is outgrown again and again, and scores that
    # fall on the way are the lower the earlier a causal row is, and lowest where its block begins with keys that it does not see.
    for rising in (-4000.0, -40.0, *RISES):
        for mask in Mask:
            for dtype, width in ((Dtype.BF16, (64, 64)), (Dtype.FP16, (128, 128)), (Dtype.BF16, (40, 136)), (Dtype.FP16, (136, 40))):
                yield _case(f"logits-rising-by-{rising:g}", 500, 900, mask, dtype=dtype, width=width, rising=rising)


def _values() -> Iterator[Case]:
    for dtype, offset in ((Dtype.FP16, 1500.0), (Dtype.BF16, 190.0)):
        for mask in Mask:
            yield _case("large-values", 400, 1500, mask, dtype=dtype, offset=offset)


def _chosen_configs() -> Iterator[Case]:
    """Lengths at the edges of a config's own steps and tiles, and logits that outgrow each reference."""
    for width, config in (*CHOSEN, *CHOSEN_SM90):
        packed = family_of(config).group_unit(config)
        step, tile, rows = getattr(config, "step_kv", config.block_kv), config.block_kv, config.block_q // packed
        heads, square = (max(4, 2 * packed), 2), (max(8, 2 * packed), 2)
        case = functools.partial(_case, width=width, heads=heads, chosen=config)
        edges = {edge + off for edge in (step, tile, 3 * tile - step, 3 * tile) for off in (-1, 0, 1)} | {1, 10 * tile + 1}
        for number, len_kv in enumerate(sorted(edges)):
            dtype, other = list(ELEMENTS)[number % 2], list(ELEMENTS)[1 - number % 2]
            len_q = rows + (-1, 0, 1)[number % 3]
            yield case("config-edge", len_q, len_kv, dtype=dtype)
            yield case("config-edge", len_q, len_kv, Mask.CAUSAL, dtype=other)
            yield _case("config-edge-square", len_kv, len_kv, Mask.CAUSAL, dtype=other, width=width, heads=square, batch=8, chosen=config)
        yield case("config-no-keys", rows + 1, 0, Mask.CAUSAL, dtype=Dtype.FP16)
        yield case("config-unseen", 3 * rows + 1, rows, Mask.CAUSAL, dtype=Dtype.FP16)
        for rising in RISES:
            for dtype, mask in ((Dtype.FP16, Mask.FULL), (Dtype.BF16, Mask.CAUSAL)):
                yield case(f"config-rising-by-{rising:g}", 400, 700, mask, dtype=dtype, rising=rising)


def _past_2_31() -> Iterator[Case]:
    """Tensors of 4.3 GB and more each; a few dozen GB of device memory at most, one case at a time."""
    sizes = {Layout.FAR_ROWS: (700, 2, 1), Layout.FAR_HEADS: (200, 5, 1), Layout.FAR_BATCHES: (200, 2, 5)}
    for far, (length, heads, batch) in sizes.items():
        yield _case(f"past-2^31-{far.value}", length, length, Mask.CAUSAL, heads=(heads, heads), batch=batch, layouts=(far,) * 4)
    yield _case("past-2^31-dense-queries", 2**31 // (128 * 128) + 999, 100, width=(128, 128), heads=(128, 2), batch=1)
    yield _case("past-2^31-dense-keys", 16, 2**31 // (16 * 128) + 999, width=(128, 128), heads=(16, 16), batch=1)
