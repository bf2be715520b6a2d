"""Blackwell consumer and workstation: RTX 50, RTX PRO. GeForce parts run fp32 accumulation at half this rate."""

from flashgen.codegen.target import Target

TARGET = Target(
    name="sm_120a",
    capability=(12, 0),
    shared_memory_per_block=99 * 1024,
    shared_memory_per_sm=100 * 1024,
    threads_per_sm=1536,
    blocks_per_sm=24,
    mma_flops_per_cycle=1024,
    exp2_per_cycle=16,
)
