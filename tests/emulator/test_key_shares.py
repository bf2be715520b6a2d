"""Shares of keys and the merge of their partial outputs, on a kernel of their own: who has which tiles, whoever comes last, and faults."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from flashgen import templates
from flashgen.build.emulator import compiler
from flashgen.build.emulator.kernel import ORDERS, EmulatedLaunch, EmulatedLibrary, EmulationOrder, Schedule
from flashgen.codegen.attention import reciprocal
from flashgen.codegen.families.attention_decode_sm90.rows import aligned_shares
from flashgen.codegen.prune import END
from flashgen.codegen.render import Atoms, Source, atom_files, jinja_environment
from flashgen.codegen.score_chain import conditions

ROWS, COLUMNS, THREADS = 3, 8, 64
ATOMS = ("types", "register", "index", "shared_memory", "barrier", "atomic", "mul", "ex2", "shfl_sync")
TILES = ("tile_scheduler", "softmax_rows", "lse", "key_shares", "partial_outputs")
SIZES = [
    (3, 4, 5, 10),
    (2, 4, 2, 2),
    (1, 1, 1, 1),
    (7, 3, 2, 5),
    (7, 3, 2, 6),
    (7, 3, 2, 42),
    (1, 3, 2, 4),
    (40, 1, 1, 13),
    (5, 2, 2, 3),
    (2, 5, 3, 7),
]

# A key tile is one key, whose scores in base 2 and values are given for each row. Each share also says which tiles it had.
KERNEL = r"""
struct Parameters {
    const float *scores, *values;
    float *partials, *out;
    u32* counters;
    int* owners;
    u64 of_head_reciprocal, sequences_reciprocal, blocks_reciprocal, aligned_shares_reciprocal;
    int of_head, heads, sequences, blocks, aligned_shares, share_distance;
};
__global__ void __launch_bounds__(64, 1) split(const Parameters& p) {
    constexpr int kRows = 3, kColumns = 8;
    const int t = thread_index();
    const SharedAddress flag = shared_memory();
    const DenseKeyTiles key_tiles{p.of_head, p.heads, p.sequences, p.of_head_reciprocal, p.sequences_reciprocal};
    const KeyShares<DenseKeyTiles> shares(key_tiles, p.blocks, p.blocks_reciprocal);
    const PartialOutputs<kColumns> partials{p.partials, kRows};
    for (KeyPart<DenseKeyTiles> part(shares, own_share(p)); part.exists(); part.advance(shares)) {
        float* out = p.out + (part.head.batch * p.heads + part.head.head) * kRows * (kColumns + 2);
        if (t < kRows) {
            float O[kColumns] = {}, total = 0.0f, row_max = kInitialRowMax;
            for (int i = 0; i < part.count(); ++i) {
                const int tile = (part.head.batch * p.heads + part.head.head) * p.of_head + part.first_in_head() + i;
                p.owners[tile] = block_index();
                const float s = p.scores[tile * kRows + t], next = fmaxf(row_max, s), factor = ex2_approx_ftz(row_max - next);
                const float P = ex2_approx_ftz(s - next);
                for (int c = 0; c < kColumns; ++c) O[c] = O[c] * factor + P * p.values[tile * kColumns + c];
                total = total * factor + P, row_max = next;
            }
            float* row = part.is_whole() ? out + t * (kColumns + 2) : partials.row(partials.slot_of(own_share(p), part.is_first), t);
            for (int c = 0; c < kColumns; ++c) row[c] = part.is_whole() ? O[c] * normaliser(total) : O[c];
            if (part.is_whole()) row[kColumns] = total, row[kColumns + 1] = row_max;
            else partials.store_statistics(row, total, {0.0f, row_max});
        }
        if (part.is_whole()) continue;
        const HeadParts parts = shares.parts(part.head);
        barrier_sync();
        if (t == 0) store_shared(flag, is_last_part(p.counters + parts.first_block, parts));
        barrier_sync();
        const bool last = load_shared(flag);
        barrier_sync();
        if (!last) continue;
        merge_parts<64>(partials, parts, 0, kRows, t, 1.0f, [&](int row, int column, const MergedRow& merged) {
            for (int c = 0; c < 4; ++c) out[row * (kColumns + 2) + column + c] = merged.columns[c] * normaliser(merged.total);
            if (column == 0) out[row * (kColumns + 2) + kColumns] = merged.total;
            if (column == 0) out[row * (kColumns + 2) + kColumns + 1] = merged.origin.row_max;
        });
    }
}
"""
FAULTS = {
    "last-tile-of-a-share": ("shares.first_tile(block + 1)),", "shares.first_tile(block + 1) - 1),"),
    "first-part-skipped": ("for (int first = 0;", "for (int first = 1;"),
    "last-part-skipped": ("O, statistics, parts.count - first,", "O, statistics, parts.count - 1 - first,"),
    "slot-of-the-first-part": ("part > 0 || parts.begins_share", "true"),
    "one-slot": ("(is_first ? 0 : 1)", "0"),
    "unscaled-parts": ("fmaf(__uint_as_float(given[i]), by, columns[i])", "columns[i] + __uint_as_float(given[i])"),
    "totals-of-half-the-parts": ("distance < kParts; distance *= 2) totals", "distance < kParts / 2; distance *= 2) totals"),
    "trace-of-whoever-is-last": ("    MergedRow merged;\n", "    MergedRow merged; merged.total = 1e-7f * block_index();\n"),
    "sequence-one-off": ("return {number - head * sequences, head, number", "return {min(number - head * sequences, 1), head, number"),
    "share-of-another-head": ("round * p.aligned_shares) * p.share_distance + round", "round * p.aligned_shares) * p.share_distance"),
    "counter-not-reset": ("*counter = 0;", ""),
    "last-but-one": ("parts.count - 1)) return", "parts.count - 2)) return"),
    "parts-of-a-head": ("block_of(head.end() - 1)", "block_of(head.end())"),
}


def variant(name: str, old: str = "", new: str = "") -> str:
    found = conditions((), "forward")  # as for dense sequences
    inserted = jinja_environment().from_string("{{ source(path) }}")
    text = "".join(inserted.render(path=f"tile/common/{tile}.cuh", **found).replace(END, "") for tile in TILES)
    assert not old or text.count(old) == 1, f"{name} does not apply"
    return f"namespace {name.replace('-', '_')} {{{text.replace(old, new) if old else text}{KERNEL}}}\n"


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    """One text of all: to compile it takes far longer than to run it."""
    atoms = "".join(map(templates.read, atom_files(ATOMS, Atoms.EMULATED)))
    names = ["right", *FAULTS]
    variants = variant("right") + "".join(variant(name, *fault) for name, fault in FAULTS.items())
    kernels = " ".join(f"kernel({name.replace('-', '_')}::split, {name.replace('-', '_')}::Parameters, 0, 0, 0)" for name in names)
    source = f"{atoms}{variants}#define FLASHGEN_KERNELS(kernel) {kernels}\n{templates.read('emulator/entry.cuh')}"
    return EmulatedLibrary(compiler.compile_for_emulator(Source("split", source)).cubin)


class Split:
    """One launch on random scores: some rows see no key of a tile, and the first row of the first head none at all."""

    def __init__(self, of_head: int, heads: int, sequences: int, blocks: int) -> None:
        self.sizes, self.blocks, self.tiles, rng = (
            (of_head, heads, sequences),
            blocks,
            of_head * heads * sequences,
            np.random.default_rng(5),
        )
        self.scores = rng.normal(0, 8, (self.tiles, ROWS)).astype(np.float32)
        self.scores[rng.random((self.tiles, ROWS)) < 0.1] = -np.inf
        self.scores[:of_head, 0] = -np.inf
        self.values = rng.normal(0, 1, (self.tiles, COLUMNS)).astype(np.float32)

    def run(self, library: EmulatedLibrary, order: EmulationOrder, name: str = "right") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The output, the counters that are left, and each tile's block."""
        of_head, heads, sequences = self.sizes
        out = np.full((heads * sequences, ROWS, COLUMNS + 2), np.nan, np.float32)
        partials = np.full(self.blocks * 2 * ROWS * (COLUMNS + 4) + 4, np.nan, np.float32)
        at_16_bytes = partials[-partials.ctypes.data // 4 % 4 :]
        counters, owners = np.zeros(self.blocks, np.uint32), np.full(self.tiles, -1, np.int32)
        arrays = (self.scores, self.values, at_16_bytes, out, counters, owners)
        aligned = aligned_shares(heads, self.blocks)
        numbers = (of_head, sequences, self.blocks, aligned)
        sizes = (*map(reciprocal, numbers), of_head, heads, sequences, self.blocks, aligned, self.blocks // aligned)
        parameters = struct.pack("=6Q4Q6i", *(array.ctypes.data for array in arrays), *sizes)
        number = ["right", *FAULTS].index(name)
        launch = EmulatedLaunch(parameters, THREADS, 1024, range(self.blocks), number, resident=self.blocks)
        library.run([launch], order)
        return out, counters, owners

    def owners(self) -> list[int]:
        """Each tile's block, by sequence, head and tile."""
        of_head, heads, sequences = self.sizes
        aligned = math.gcd(heads, self.blocks)
        distance = self.blocks // aligned
        shares = [share for share in range(self.blocks) for _ in range(*self.share(share))]
        numbered = [share % distance * aligned + share // distance for share in shares]
        return np.array(numbered).reshape(heads, sequences, of_head).transpose(1, 0, 2).ravel().tolist()

    def share(self, block: int) -> tuple[int, int]:
        """Tiles [begin, end)."""
        return block * self.tiles // self.blocks, (block + 1) * self.tiles // self.blocks

    def expected(self) -> np.ndarray:
        of_head, heads, sequences = self.sizes
        scores = self.scores.astype(np.float64).reshape(heads * sequences, of_head, ROWS)
        values = self.values.astype(np.float64).reshape(heads * sequences, of_head, COLUMNS)
        P = np.exp2(scores - np.maximum(scores.max(1, keepdims=True), -1e30))
        total: np.ndarray = P.sum(1)
        out: np.ndarray = np.einsum("htr,htc->hrc", P, values) / np.where(total == 0, 1, total)[:, :, None]
        return out


def random_orders(count: int) -> Iterator[EmulationOrder]:
    return (EmulationOrder(Schedule.RANDOM, seed=seed) for seed in range(count))


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_every_tile_has_one_block_and_every_order_the_same_bits(library: EmulatedLibrary, sizes: tuple[int, ...]) -> None:
    split = Split(*sizes)
    results = [split.run(library, order) for order in (*ORDERS, *random_orders(8))]
    for out, counters, owners in results:
        assert np.allclose(out[:, :, :COLUMNS], split.expected(), atol=2e-6)
        assert out[0, 0, COLUMNS] == 0  # the sum of a row that sees no key
        assert not counters.any()
        assert [*owners] == split.owners()
        assert np.array_equal(out, results[0][0])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(library: EmulatedLibrary, name: str) -> None:
    """By wrong results, by what a counter is left at, or by bits that depend on who comes last."""
    for sizes in SIZES:
        split = Split(*sizes)
        if split.blocks == split.tiles:  # a share less one tile would be none
            continue
        results = [split.run(library, order, name) for order in random_orders(8)]
        for out, counters, _ in results:
            right = np.allclose(out[:, :, :COLUMNS], split.expected(), atol=2e-6) and not counters.any()
            if not right or not np.array_equal(out, results[0][0]):
                return
    raise AssertionError("nothing is wrong")


def test_a_block_is_found_whatever_rounding_makes_of_the_guess() -> None:
    """The arithmetic of `first_tile`, without products of 64 bits, and of `block_of` after its guess."""
    for tiles, blocks in itertools.product((132, 133, 1000, 8191, 2**31 - 1), (1, 3, 128, 132, 264)):
        if blocks > tiles:
            continue
        quotient, remainder = divmod(tiles, blocks)
        for block in range(blocks + 1):
            assert block * quotient + block * remainder // blocks == block * tiles // blocks < 2**31
