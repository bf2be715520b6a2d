"""Hopper: H100, H200, GH200. The rate is mma.sync's, measured: 6 cycles for m16n8k16 on each of 4 schedulers."""

from flashgen.codegen.target import Target

TARGET = Target(
    name="sm_90a",
    capability=(9, 0),
    shared_memory_per_block=227 * 1024,
    shared_memory_per_sm=228 * 1024,
    threads_per_sm=2048,
    blocks_per_sm=32,
    mma_flops_per_cycle=2731,
    exp2_per_cycle=16,
    wgmma_flops_per_cycle=4096,
)
