"""The block sizes that FlashAttention's first paper takes, to be read beside those of the kernels. See `paper_block_sizes`."""

from __future__ import annotations

from .problem import Problem
from .target import Target


def paper_block_sizes(problem: Problem, target: Target) -> tuple[int, int]:
    """Queries and keys of a block (B_r and B_c) by line 1 of algorithms 1 and 4 (Dao et al. 2022, appendices B.2 and B.4).

    B_c = ceil(M / 4d) and B_r = min(B_c, d), where M is the elements that a block's shared memory holds. K, V, Q and O of a step then take
    all of it, and nothing is left for S: kernels here keep S in registers, and have fewer keys.
    """
    elements = target.shared_memory_per_block // problem.dtype.bytes
    keys = -(-elements // (4 * problem.head_dim))
    return min(keys, problem.head_dim), keys
