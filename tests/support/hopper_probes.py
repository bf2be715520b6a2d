"""Probes of the atoms that sm_90a brings: mbarriers, tensor copies, products of a warpgroup, and what goes with them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from flashgen.codegen import wgmma
from flashgen.codegen.packed import MAP_ROWS, packed_map
from flashgen.codegen.problem import Dtype
from flashgen.codegen.tensor_map import TensorMapShape
from tests.support.probes import Probe, Words

ARCH = "sm_90a"
hopper = partial(Probe, arch=ARCH)
DTYPES = {"Bf16": torch.bfloat16, "Fp16": torch.float16}

# Sets of operands that a probe of products multiplies, a block each: distinct a times ones on a diagonal of b, the other way round, and
# normal numbers.
OPERAND_SETS = 3
SS_SHAPES = (("Bf16", 8), ("Fp16", 64), ("Bf16", 104), ("Fp16", 256))
RS_SHAPES = (("Fp16", 8), ("Bf16", 64), ("Bf16", 80), ("Fp16", 176), ("Bf16", 256))  # of 1 to 4 panels
DEPTH = 64  # of the products from shared memory: a panel; of those from registers it is half of that
A_ROWS, FIRST_ROW = 128, 64  # a is the lower half of a tile


def distinct(count: int, element: str) -> np.ndarray:
    """Bits of so many different numbers from 1 on, up to 4096 of them."""
    one = {"Bf16": 0x3F80, "Fp16": 0x3C00}[element]
    return (one + np.arange(count)).astype(np.uint16)


def numbers(bits: np.ndarray, element: str) -> np.ndarray:
    """Elements as numbers."""
    values: np.ndarray = torch.from_numpy(bits.view(np.int16)).view(DTYPES[element]).double().numpy()
    return values


def operand_set(index: int, element: str, columns: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of a [64, depth] and b [depth, columns]."""
    one = distinct(1, element)[0]
    a, b = np.zeros((64, depth), np.uint16), np.zeros((depth, columns), np.uint16)
    if index == 0:
        a[:] = distinct(a.size, element).reshape(a.shape)
        b[np.arange(depth), np.arange(depth) % columns] = one
    elif index == 1:
        a[np.arange(64), np.arange(64) % depth] = one
        b[:] = distinct(4096, element)[np.arange(b.size) % 4096].reshape(b.shape)
    else:
        generator = torch.Generator().manual_seed(columns)
        for matrix in (a, b):
            drawn = torch.randn(matrix.shape, generator=generator).to(DTYPES[element])
            matrix[:] = drawn.view(torch.int16).numpy().view(np.uint16)
    return a, b


def panels(matrix: np.ndarray) -> np.ndarray:
    """A matrix as tiles hold it: panels of 64 columns, chunk c of row r at c xor r % 8. Columns that are missing become zeros."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // 64) * 64), matrix.dtype)
    padded[:, :columns] = matrix
    chunks = padded.reshape(rows, -1, 8, 8).transpose(1, 0, 2, 3).copy()  # panel, row, chunk, element
    for row in range(rows):
        chunks[:, row] = chunks[:, row, np.arange(8) ^ row % 8]
    return chunks.reshape(-1)


def fragment_place(thread: int, index: int) -> tuple[int, int]:
    """Row and column of a warpgroup's accumulator d[index / 4][index % 4]. PTX ISA, "Register Fragments for wgmma"."""
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (index % 4 // 2), 8 * (index // 4) + 2 * (lane % 4) + index % 2


def ss_operands(element: str, columns: int) -> Words:
    sets = []
    for index in range(OPERAND_SETS):
        a, b = operand_set(index, element, columns, DEPTH)
        tile = np.full((A_ROWS, DEPTH), 0x7FFF, np.uint16)  # NaN where the product has no business
        tile[FIRST_ROW:] = a
        sets.append(np.concatenate([panels(tile), panels(b.T)]))
    return np.concatenate(sets).view(np.uint32)


def rs_operands(element: str, columns: int) -> Words:
    sets = []
    for index in range(OPERAND_SETS):
        a, b = operand_set(index, element, columns, DEPTH // 2)
        registers = np.empty((128, 2, 4, 2), np.uint16)  # thread, step, register, half
        for thread in range(128):
            for place in range(8):
                row, column = fragment_place(thread, place)
                for step in range(2):
                    registers[thread, step, place // 2, place % 2] = a[row, step * 16 + column]
        sets.append(np.concatenate([registers.reshape(-1), panels(b)]))
    return np.concatenate(sets).view(np.uint32)


# Words of `given` go to shared memory, where the asynchronous proxy sees them.
FILL = """
    for (int i = thread_index(); i < WORDS; i += 128) store_shared(shared_memory() + i * 4, given[i]);
    fence_proxy_async();
    barrier_sync();
"""
SS = f"""
    const u32* given = in + block_index() * WORDS;
    {FILL}
    float d[COLUMNS / 8][4];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < {DEPTH // 16}; ++step) {{
        const u64 a = matrix_descriptor(shared_memory(), {FIRST_ROW} * 128 + step * 32);
        const u64 b = matrix_descriptor(shared_memory() + {A_ROWS} * 128, step * 32);
        wgmma_ss<ELEMENT, COLUMNS>(d, a, b, step > 0);
    }}
    wgmma_commit_group();
    wgmma_wait_group<0>();
    launder(d);
    for (int i = 0; i < COLUMNS / 2; ++i) out[i] = __float_as_uint(d[i / 4][i % 4]);
"""
# Two products, each in a group of its own.
RS = f"""
    const u32 *own = in + block_index() * (WORDS + 1024) + thread_index() * 8, *given = in + block_index() * (WORDS + 1024) + 1024;
    {FILL}
    float d[COLUMNS / 8][4];
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[i / 4][i % 4] = __uint_as_float(0xff800000u);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = own[i];
    launder(d);
    launder(a);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {{
        wgmma_rs<ELEMENT, COLUMNS>(d, a[step], matrix_descriptor(shared_memory(), step * 16 * 128, {DEPTH // 2} * 128), step > 0);
        wgmma_commit_group();
    }}
    wgmma_wait_group<1>();
    wgmma_wait_group<0>();
    launder(d);
    for (int i = 0; i < COLUMNS / 2; ++i) out[i] = __float_as_uint(d[i / 4][i % 4]);
"""


def products_agree(emulated: Words, other: Words) -> bool:
    """Sums of 64 products of normal elements, within the rounding of fp32 in any order; distinct numbers are farther apart."""
    a, b = emulated.view(np.float32).astype(np.float64), other.view(np.float32).astype(np.float64)
    return bool((np.abs(a - b) <= 2.0**-15 * np.maximum(1, np.abs(b))).all())


def products() -> list[Probe]:
    made = []
    for atom, body, shapes, operands, instruction in (
        ("wgmma_ss", SS, SS_SHAPES, ss_operands, wgmma.wgmma_ss),
        ("wgmma_rs", RS, RS_SHAPES, rs_operands, wgmma.wgmma_rs),
    ):
        for element, columns in shapes:
            words = (A_ROWS + columns) * 32 if atom == "wgmma_ss" else -(-columns // 64) * DEPTH // 2 * 32
            text = body.replace("ELEMENT", element).replace("COLUMNS", str(columns)).replace("WORDS", str(words))
            given = partial(operands, element, columns)
            made.append(
                hopper(
                    f"{atom}-{element}-{columns}",
                    text,
                    given,
                    columns // 2,
                    threads=128,
                    blocks=OPERAND_SETS,
                    agree=products_agree,
                    instructions=instruction(element, columns),
                )
            )
    return made


MBARRIER = """
    const SharedAddress place = shared_memory(), barrier = place + 1024;
    if (t == 0) {
        mbarrier_init(barrier, 64);
        fence_mbarrier_init();
    }
    barrier_sync();
    out[0] = mbarrier_try_wait_parity(barrier, 1);
    for (u32 phase = 0; phase < 3; ++phase) {
        store_shared(place + t * 4, in[t] + phase);
        mbarrier_arrive(barrier);
        while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
        }
        out[1 + phase] = load_shared(place + (t ^ 37) * 4);
        barrier_sync();
    }
"""

# Two warps give, two take: by barrier 1, where the givers do not wait, then all by barrier 15.
NAMED_BARRIER = """
    const SharedAddress place = shared_memory();
    u32 taken = 0;
    for (int round = 0; round < 2; ++round) {
        if (warp_index() < 2) {
            store_shared(place + (round * 64 + t) * 4, in[t] + round);
            bar_arrive(1, 128);
        } else {
            bar_sync(1, 128);
            taken += load_shared(place + (round * 64 + (t & 63 ^ 33)) * 4);
        }
        bar_sync(15, 128);
    }
    out[0] = taken;
"""

# Two warps give, two take, and all wait, each two at an instruction of their own.
UNALIGNED_BARRIER = """
    const SharedAddress place = shared_memory();
    u32 taken = 0;
    if (warp_index() % 4 < 2) {
        store_shared(place + t * 4, in[t]);
        barrier_sync_unaligned(2, 128);
    } else {
        barrier_sync_unaligned(2, 128);
        taken = load_shared(place + (t & 63 ^ 5) * 4);
    }
    out[0] = taken;
"""

SETMAXNREG = """
    if (warp_index() < 4) setmaxnreg_dec<24>();
    else setmaxnreg_inc<240>();
    out[0] = in[t];
"""

STMATRIX = """
    const SharedAddress place = shared_memory();
    stmatrix_x4(place + t * 13 % 64 * 16, in[t * 4], in[t * 4 + 1], in[t * 4 + 2], in[t * 4 + 3]);
    barrier_sync();
    const uint4 row = load_shared_v4(place + t * 16);
    out[0] = row.x; out[1] = row.y; out[2] = row.z; out[3] = row.w;
"""

BOX_ROWS = 16
# (column, row, head, batch): within the tensor, across its end in each direction, before its begin, and wholly outside.
LOADED = ((0, 3, 1, 0), (64, 8, 2, 1), (-8, -3, 0, 1), (0, 4, 3, 0), (128, 0, 0, 0))
SOURCE = TensorMapShape(Dtype.BF16, (104, 20, 3, 2), (3 * 208, 208, 20 * 3 * 208), (64, BOX_ROWS, 1, 1))
# Within the tensor, across its ends, and wholly outside; never before its begin.
STORED = ((0, 0, 0, 0), (64, 3, 1, 0), (24, 2, 0, 1), (0, 10, 1, 1), (128, 0, 0, 1), (0, 14, 0, 0))
TARGET = TensorMapShape(Dtype.BF16, (72, 14, 2, 2), (144, 14 * 144, 2 * 14 * 144), (64, BOX_ROWS, 1, 1))
LOAD = """
    const SharedAddress place = shared_memory(), barrier = place + 5 * 2048;
    prefetch_tensormap(p.in_map);
    prefetch_global_l2(in + t);
    if (t == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    barrier_sync();
    if (t == 0) {
        cp_async_bulk_prefetch_tensor(p.in_map, 64, 8, 2, 1);
        mbarrier_arrive_expect_tx(barrier, 5 * 2048);
        LOADS
    }
    while (!mbarrier_try_wait_parity(barrier, 0)) {
    }
    for (int i = 0; i < 40; ++i) out[i] = load_shared(place + (t * 40 + i) * 4);
""".replace(
    "LOADS",
    " ".join(
        f"cp_async_bulk_tensor_load{'_evict_first' if i % 2 else ''}(place + {i} * 2048, p.in_map, barrier, {c}, {r}, {h}, {b});"
        for i, (c, r, h, b) in enumerate(LOADED)
    ),
)
# Two boxes of shared memory in turn, each stored from twice, a group each. Later boxes overwrite earlier ones nowhere.
STORE = """
    const SharedAddress place = shared_memory();
    auto fill = [&](int index) {
        for (int i = 0; i < 2; ++i) {
            const u32* from = in + ((index * 2 + i) * 64 + t) * 4;
            store_shared_v4(place + index % 2 * 2048 + (i * 64 + t) * 16, {from[0], from[1], from[2], from[3]});
        }
        fence_proxy_async();
        barrier_sync();
    };
    STORES
    if (t == 0) cp_async_bulk_wait_group_read<0>();
""".replace(
    "STORES",
    " ".join(
        f"if (t == 0) cp_async_bulk_wait_group_read<1>(); barrier_sync(); fill({i}); if (t == 0) {{ "
        f"cp_async_bulk_tensor_store(p.out_map, place + {i % 2} * 2048, {c}, {r}, {h}, {b}); cp_async_bulk_commit_group(); }}"
        for i, (c, r, h, b) in enumerate(STORED)
    ),
)

# Rows of packed sequences: boxes of (column, first row of the sequence, its length, row within it, head) are loaded, and then stored at
# others. Across the end of a sequence, behind it, and of one without rows.
PACKED = packed_map(Dtype.BF16, 72, 2, (144, 72), (64, BOX_ROWS))
PACKED_ROWS = 32
LOADED_ROWS = ((0, 0, 5, 0, 0), (64, 5, 20, 0, 1), (0, 5, 20, 16, 1), (0, 25, 0, 0, 0), (0, 25, 7, 3, 1))
STORED_ROWS = ((0, 3, 2, 0, 1), (64, 10, 16, 0, 0), (0, 26, 6, 2, 0), (0, 9, 0, 0, 0), (0, 10, 16, 12, 1))


def coordinates_of(column: int, first: int, length: int, row: int, head: int) -> str:
    """Of a box in PACKED."""
    return f"{column}, {MAP_ROWS - length + row}, {head}, {first + length}, {MAP_ROWS}"


PACKED_COPIES = """
    const SharedAddress place = shared_memory(), barrier = place + 5 * 2048;
    if (t == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 5 * 2048);
        LOADS
        while (!mbarrier_try_wait_parity(barrier, 0)) {
        }
        STORES
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
""".replace(
    "LOADS",
    " ".join(
        f"cp_async_bulk_tensor_load_5d(place + {i} * 2048, p.in_map, barrier, {coordinates_of(*at)});" for i, at in enumerate(LOADED_ROWS)
    ),
).replace(
    "STORES",
    " ".join(f"cp_async_bulk_tensor_store_5d(p.out_map, place + {i} * 2048, {coordinates_of(*at)});" for i, at in enumerate(STORED_ROWS)),
)

# Copies under way at two mbarriers, waited for in the order in which they were not issued.
TWO_MBARRIERS = """
    const SharedAddress place = shared_memory(), barriers = place + 2 * 2048;
    if (t == 0) {
        for (int i = 0; i < 2; ++i) mbarrier_init(barriers + i * 8, 1);
        fence_mbarrier_init();
        for (int i = 0; i < 2; ++i) {
            mbarrier_arrive_expect_tx(barriers + i * 8, 2048);
            cp_async_bulk_tensor_load(place + i * 2048, p.in_map, barriers + i * 8, 0, i, 0, 0);
        }
    }
    barrier_sync();
    for (int i = 1; i >= 0; --i) {
        while (!mbarrier_try_wait_parity(barriers + i * 8, 0)) {
        }
        out[i] = load_shared(place + i * 2048);
    }
"""

# A pipeline of one stage: a thread loads two tiles X, one after the other, a warpgroup multiplies each to X X^T and stores that.
PIPELINE = """
    const SharedAddress tile = shared_memory(), result = tile + 8192, full = result + 8192, empty = full + 8;
    if (t == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 1);
        fence_mbarrier_init();
    }
    barrier_sync();
    if (warp_index() < 4) {
        setmaxnreg_dec<24>();
        for (u32 i = 0; t == 0 && i < 2; ++i) {
            while (!mbarrier_try_wait_parity(empty, i & 1 ^ 1)) {
            }
            mbarrier_arrive_expect_tx(full, 8192);
            cp_async_bulk_tensor_load(tile, p.in_map, full, 0, i * 64, 0, 0);
        }
    } else {
        setmaxnreg_inc<240>();
        const int lane = lane_index(), warp = warp_index() - 4;
        const SharedAddress own = result + warp * 2048;
        for (u32 i = 0; i < 2; ++i) {
            while (!mbarrier_try_wait_parity(full, i & 1)) {
            }
            float d[8][4];
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                wgmma_ss<Bf16, 64>(d, matrix_descriptor(tile, step * 32), matrix_descriptor(tile, step * 32), step > 0);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            launder(d);
            if (t == 128) mbarrier_arrive(empty);
            if (lane == 0) cp_async_bulk_wait_group_read<0>();
            barrier_warp_sync();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                u32 r[4];
                for (int e = 0; e < 4; ++e) r[e] = cvt_rn_x2<Bf16>(d[j + e / 2][e % 2 * 2], d[j + e / 2][e % 2 * 2 + 1]);
                stmatrix_x4(own + lane % 16 * 128 + ((j + lane / 16) ^ lane % 8) * 16, r[0], r[1], r[2], r[3]);
            }
            fence_proxy_async();
            barrier_warp_sync();
            if (lane == 0) {
                cp_async_bulk_tensor_store(p.out_map, own, 0, i * 64 + warp * 16, 0, 0);
                cp_async_bulk_commit_group();
            }
        }
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
    }
"""
TILES = TensorMapShape(Dtype.BF16, (64, 128, 1, 1), (128, 16384, 16384), (64, 64, 1, 1))
RESULTS = TensorMapShape(Dtype.BF16, (64, 128, 1, 1), (128, 16384, 16384), (64, 16, 1, 1))


def whole_numbers() -> Words:
    """Two tiles of small ones, as bf16: products and their sums are exact."""
    drawn = torch.randint(-3, 4, (128, 64), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    words: Words = drawn.view(torch.int16).numpy().reshape(-1).view(np.uint32)
    return words


def bits(count: int) -> Words:
    """Pairs of different 16-bit numbers."""
    return np.arange(2 * count, dtype=np.uint16).view(np.uint32)


PROBES = [
    hopper("mbarrier", MBARRIER, lambda: bits(64), 4),
    hopper("named-barrier", NAMED_BARRIER, lambda: bits(64), threads=128),
    hopper("unaligned-barrier", UNALIGNED_BARRIER, lambda: bits(64), threads=128),
    hopper("setmaxnreg", SETMAXNREG, lambda: bits(256), threads=256),
    hopper("stmatrix", STMATRIX, lambda: bits(256), 4),
    hopper("tensor-load", LOAD, lambda: bits(104 * 20 * 3 * 2 // 2), 40, maps=(SOURCE,)),
    hopper("two-mbarriers", TWO_MBARRIERS, lambda: bits(104 * 20 * 3 * 2 // 2), 2, maps=(SOURCE,)),
    hopper("tensor-store", STORE, lambda: bits(len(STORED) * 512), 32, maps=(SOURCE, TARGET)),
    hopper("packed-copies", PACKED_COPIES, lambda: bits(PACKED_ROWS * 72), 36, maps=(PACKED, PACKED)),
    hopper("pipeline", PIPELINE, whole_numbers, 16, threads=256, maps=(TILES, RESULTS), instructions=wgmma.wgmma_ss("Bf16", 64)),
    *products(),
]
