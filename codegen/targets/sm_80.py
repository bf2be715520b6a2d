"""Ampere data centre: A100, A30."""

from flashgen.codegen.target import Target

TARGET = Target(
    name="sm_80",
    capability=(8, 0),
    shared_memory_per_block=163 * 1024,
    shared_memory_per_sm=164 * 1024,
    threads_per_sm=2048,
    blocks_per_sm=32,
    mma_flops_per_cycle=2048,
    exp2_per_cycle=16,
)
