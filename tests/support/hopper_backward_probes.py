"""Probes of the atoms that the backward pass brings on sm_90a: products with a transposed operand, transposed stores, plain bulk copies."""

from __future__ import annotations

from functools import partial

import numpy as np

from flashgen.codegen import wgmma
from tests.support.hopper_probes import DEPTH, FILL, OPERAND_SETS, bits, hopper, operand_set, panels, products_agree
from tests.support.probes import Probe, Words

TRANS_A_SHAPES = (("Bf16", 64), ("Fp16", 80))
TRANS_AB_SHAPES = (("Bf16", 32), ("Fp16", 128))
TRANS_B_SHAPES = (("Fp16", 16), ("Bf16", 64), ("Bf16", 80))  # of 1 and 2 panels


def trans_operands(atom: str, element: str, columns: int) -> Words:
    """Tiles of a and b with a row for each index of the shared dimension of the operand that is transposed."""
    sets = []
    for index in range(OPERAND_SETS):
        a, b = operand_set(index, element, columns, DEPTH)
        sets += [panels(a if atom == "wgmma_ss_trans_b" else a.T), panels(b.T if atom == "wgmma_ss_trans_a" else b)]
    return np.concatenate(sets).view(np.uint32)


_ROWS = f"step * 16 * 128, {DEPTH} * 128"
DESCRIPTORS = {
    "wgmma_ss_trans_a": (_ROWS, "step * 32"),
    "wgmma_ss_trans_b": ("step * 32", _ROWS),
    "wgmma_ss_trans_ab": (_ROWS, _ROWS),
}
TRANS = f"""
    const u32* given = in + block_index() * WORDS;
    {FILL}
    float d[COLUMNS / 8][4];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < {DEPTH // 16}; ++step) {{
        const u64 a = matrix_descriptor(shared_memory(), DESCRIPTOR_A), b = matrix_descriptor(shared_memory() + 8192, DESCRIPTOR_B);
        ATOM<ELEMENT, COLUMNS>(d, a, b, step > 0);
    }}
    wgmma_commit_group();
    wgmma_wait_group<0>();
    launder(d);
    for (int i = 0; i < COLUMNS / 2; ++i) out[i] = __float_as_uint(d[i / 4][i % 4]);
"""


def products(atom: str, element: str, columns: int) -> Probe:
    of_a, of_b = DESCRIPTORS[atom]
    words = 2048 + (columns if atom == "wgmma_ss_trans_a" else -(-columns // 64) * DEPTH) * 32
    text = TRANS.replace("ATOM", atom).replace("DESCRIPTOR_A", of_a).replace("DESCRIPTOR_B", of_b)
    text = text.replace("ELEMENT", element).replace("COLUMNS", str(columns)).replace("WORDS", str(words))
    given = partial(trans_operands, atom, element, columns)
    instructions = getattr(wgmma, atom)(element, columns)
    name = f"{atom}-{element}-{columns}"
    return hopper(name, text, given, columns // 2, threads=128, blocks=OPERAND_SETS, agree=products_agree, instructions=instructions)


STMATRIX_TRANS = """
    const SharedAddress place = shared_memory();
    stmatrix_x4_trans(place + t * 13 % 64 * 16, in[t * 4], in[t * 4 + 1], in[t * 4 + 2], in[t * 4 + 3]);
    barrier_sync();
    const uint4 row = load_shared_v4(place + t * 16);
    out[0] = row.x; out[1] = row.y; out[2] = row.z; out[3] = row.w;
"""
# Two copies at one mbarrier, of 16 bytes and of all that comes after them.
BULK = """
    const SharedAddress place = shared_memory(), barrier = place + 1024;
    if (t == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 256);
        fence_proxy_async_global();
        cp_async_bulk_load(place + 512, in, 16, barrier);
        cp_async_bulk_load(place + 16, in + 4, 240, barrier);
    }
    barrier_sync();
    while (!mbarrier_try_wait_parity(barrier, 0)) {
    }
    out[0] = load_shared(t < 4 ? place + 512 + t * 4 : place + t * 4);
"""
# Two copies out of a ring of two groups, of which the first one is there before its source is written again.
BULK_STORES = """
    const SharedAddress place = shared_memory();
    store_shared(place + t * 4, in[t]);
    fence_proxy_async();
    barrier_sync();
    if (t == 0) {
        cp_async_bulk_store(out, place, 16);
        cp_async_bulk_commit_group();
        cp_async_bulk_store(out + 4, place + 16, 240);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<1>();
        store_shared(place, 77);
        cp_async_bulk_wait_group<0>();
    }
"""
# How many lanes are elected, and whether they are the same the second time. PTX leaves open which one it is.
ELECT = """
    const bool elected = elect_sync();
    u32 count = elected;
    for (int distance = 1; distance < 32; distance *= 2) count += shfl_sync_bfly(count, distance);
    out[0] = count, out[1] = elected == elect_sync();
"""
PROBES = [
    hopper("elect", ELECT, lambda: bits(64), 2),
    hopper("stmatrix-trans", STMATRIX_TRANS, lambda: bits(256), 4),
    hopper("bulk-copy", BULK, lambda: bits(64)),
    hopper("bulk-stores", BULK_STORES, lambda: bits(64)),
    hopper("griddepcontrol", "griddepcontrol_launch_dependents(); griddepcontrol_wait(); out[0] = in[t];", lambda: bits(64)),
    *(products("wgmma_ss_trans_a", *shape) for shape in TRANS_A_SHAPES),
    *(products("wgmma_ss_trans_b", *shape) for shape in TRANS_B_SHAPES),
    *(products("wgmma_ss_trans_ab", *shape) for shape in TRANS_AB_SHAPES),
]
