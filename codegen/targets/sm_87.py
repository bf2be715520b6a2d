"""Ampere embedded: Jetson Orin."""

from flashgen.codegen.target import Target

TARGET = Target(
    name="sm_87",
    capability=(8, 7),
    shared_memory_per_block=163 * 1024,
    shared_memory_per_sm=164 * 1024,
    threads_per_sm=1536,
    blocks_per_sm=16,
    mma_flops_per_cycle=1024,
    exp2_per_cycle=16,
)
