"""Blackwell embedded: Jetson Thor. The rate is mma.sync's."""

from flashgen.codegen.target import Target

TARGET = Target(
    name="sm_110a",
    capability=(11, 0),
    shared_memory_per_block=227 * 1024,
    shared_memory_per_sm=228 * 1024,
    threads_per_sm=1536,
    blocks_per_sm=24,
    mma_flops_per_cycle=2048,
    exp2_per_cycle=16,
)
