"""Blackwell desktop: GB10 (DGX Spark)."""

from flashgen.codegen.target import Target

TARGET = Target(
    name="sm_121a",
    capability=(12, 1),
    shared_memory_per_block=99 * 1024,
    shared_memory_per_sm=100 * 1024,
    threads_per_sm=1536,
    blocks_per_sm=24,
    mma_flops_per_cycle=1024,
    exp2_per_cycle=16,
)
