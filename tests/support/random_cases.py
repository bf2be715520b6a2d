"""Seeded random cases: lengths, widths, dtypes, grouped heads, layouts, scales, logits and configs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload
from tests.support.cases import ORDINARY, Case, short_name

MAX_LENGTH = 4096
MAX_PAIRS = 2**26  # (query, key) pairs of all heads: milliseconds, the float64 reference included
MIN_ROWS = 128  # a maximum over a handful of rows is a coin flip, so short lengths get more heads


def random_cases(count: int, seed: int, head_dims: Sequence[int] = tuple(range(8, 257, 8))) -> list[Case]:
    """`count` cases; the same for the same arguments. Every fourth has at least 1024 keys, eight tiles of 128."""
    rng = random.Random(seed)
    return [_random_case(rng, index, head_dims) for index in range(count)]


def _random_case(rng: random.Random, index: int, head_dims: Sequence[int]) -> Case:
    head_dim = rng.choice(head_dims)
    head_dim_v = rng.choice(head_dims) if rng.random() < 1 / 3 else head_dim
    problem = Problem(rng.choice(list(ELEMENTS)), head_dim, head_dim_v, rng.choice(list(Mask)))
    workload = _random_workload(rng, least_keys=1024 if index % 4 == 0 else 1)
    scale = head_dim**-0.5 * rng.choice((1.0, 1.0, 0.5, 1.7))
    magnitude = rng.choice((1.0, 1.0, 4.0, 16.0))
    layouts = (rng.choice(ORDINARY), rng.choice(ORDINARY), rng.choice(ORDINARY), rng.choice(ORDINARY))
    rising = rng.choice((0.0, 0.0, 0.0, -300.0, 30.0, 300.0)) if workload.len_kv >= 32 else 0.0
    config_seed = rng.getrandbits(32) if rng.random() < 2 / 3 else None
    config = "default" if config_seed is None else "drawn"
    name = f"{index:03d}-{problem.name}-{short_name(workload)}-x{magnitude:g}-rising{rising:g}-{config}"
    return Case(name, problem, workload, scale, magnitude, layouts, rng.getrandbits(32), rising=rising, config_seed=config_seed)


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
