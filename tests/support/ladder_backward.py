"""Planted faults of the lines that both backward families of the ladder have.

These lines are the same in both texts, so each fault is planted in one of them: the version with the loop over key tiles has those of keys
and of what belongs to them, the other one those of scores and dQ, both have the races. Tile operations are attention_backward's, whose
faults tests/emulator/test_backward_faults.py has.
"""

from __future__ import annotations

from functools import partial

from flashgen.codegen.ladder import LadderConfig
from flashgen.codegen.problem import Mask
from tests.support import ladder
from tests.support.caught import NOT_WRITTEN
from tests.support.gradient_faults import FAR, HUGE, IN_FLIGHT, OVERWRITE, UNORDERED, GradientFault, GradientSetting

_NEXT_HEAD = "if (++tile == tiles.end) tile = tiles.begin, ++head;\n        };"
_STORES = "store_tile<kThreads, kHeadDim"
_TILES = "query_tiles<kBlockQ>(first_key, first_key + kBlockKv, p.len_q)"
_STEPS = "first < kBlockQ; first += kStepQ)"
_LAST_KEYS = "        cp_async_wait_group<0>();  // without a query tile"


def _settings(config: LadderConfig) -> tuple[GradientSetting, GradientSetting, GradientSetting]:
    """With a causal mask, without one, and with head dims that no tile ends at: there the next columns are no one's."""
    given = partial(GradientSetting, config)
    return given((1, 4, 2, 100, 150)), given((1, 4, 2, 70, 150), Mask.FULL), given((1, 2, 2, 40, 70), Mask.FULL, width=(40, 72))


def _strides(tensor: str, batch_and_head: str) -> str:
    return f"{{p.{tensor}_batch, p.{tensor}_head, p.{tensor}_row}}, {batch_and_head},"


def key_faults(config: LadderConfig) -> list[GradientFault]:
    """Of a block's keys, of the queries that see them, and of dK and dV. With block_q 32 a query tile has two steps."""
    causal, full, narrow = _settings(config)
    batches = GradientSetting(config, FAR, special=True)
    faults = [
        *(
            (f"{tensor}-of-the-first-{what}", _strides(tensor, "batch, head_kv"), _strides(tensor, wrong), setting)
            for tensor in ("k", "v", "d_k", "d_v")
            for what, wrong, setting in (("head", "batch, 0", full), ("batch", "0, head_kv", batches))
        ),
        ("head-taken-for-the-batch", ", p.heads_kv, p.heads_kv_reciprocal);", ", p.heads_kv, p.l2_group_heads_reciprocal);", full),
        ("tile-of-one-key-more", "first_key = index * kBlockKv,", "first_key = index * kBlockKv + (index > 0),", full),
        ("keys-past-the-end-loaded", "key_tile, k, p.k_row, keys,", "key_tile, k, p.k_row, kBlockKv,", full),
        ("values-past-the-end-loaded", "value_tile, v, p.v_row, keys,", "value_tile, v, p.v_row, kBlockKv,", full),
        ("columns-of-k-past-the-end", "k, p.k_row, keys, kHeadDim)", "k, p.k_row, keys, kColumns)", narrow),
        ("columns-of-v-past-the-end", "v, p.v_row, keys, kHeadDimV)", "v, p.v_row, keys, kColumnsV)", narrow),
        ("queries-of-the-next-keys", _TILES, _TILES.replace("(first_key,", "(first_key + kBlockKv,"), causal),
        ("queries-that-see-one-key-count-as-seeing-all", _TILES, _TILES.replace("first_key + kBlockKv", "first_key + 1"), causal),
        ("queries-of-the-first-heads", "sequences, tiles, batch, head_kv);", "sequences, tiles, batch, 0);", full),
        ("queries-of-one-head", "tiles.count() * p.group, ring", "tiles.count(), ring", full),
        ("dK-not-zeroed", "dK[kRowTiles][kColumns / 8][4] = {},", "dK[kRowTiles][kColumns / 8][4] = {{{1.0f}}},", full),
        ("dV-not-zeroed", "dV[kRowTiles][kColumnsV / 8][4] = {};", "dV[kRowTiles][kColumnsV / 8][4] = {{{1.0f}}};", full),
        ("dV-from-dS", "gemm_columns<Element>(dV, P, d_out,", "gemm_columns<Element>(dV, dS, d_out,", full),
        ("dK-from-P", "gemm_columns<Element>(dK, dS, q,", "gemm_columns<Element>(dK, P, q,", full),
        ("dK-not-scaled", "first_row, dK, p.scale,", "first_row, dK, 1.0f,", full),
        ("dV-scaled", "first_row, dV, 1.0f,", "first_row, dV, p.scale,", full),
        ("dK-of-the-first-warp", "key_tile, first_row, dK,", "key_tile, 0, dK,", full),
        ("dV-of-the-first-warp", "value_tile, first_row, dV,", "value_tile, 0, dV,", full),
        ("dK-past-the-end", _STORES + ">(d_k, p.d_k_row, keys,", _STORES + ">(d_k, p.d_k_row, kBlockKv,", full),
        ("dV-past-the-end", _STORES + "V>(d_v, p.d_v_row, keys,", _STORES + "V>(d_v, p.d_v_row, kBlockKv,", full),
        ("columns-of-dK-past-the-end", _STORES + ">(d_k,", "store_tile<kThreads, kColumns>(d_k,", narrow),
        ("columns-of-dV-past-the-end", _STORES + "V>(d_v,", "store_tile<kThreads, kColumnsV>(d_v,", narrow),
    ]  # fmt: skip
    return [GradientFault(*fault) for fault in faults]


def score_faults(config: LadderConfig) -> list[GradientFault]:
    """Of S, P and dS, and of dQ and where it lies. With 4 warps and block_q 32, two of them share rows of dQ."""
    causal, full, narrow = _settings(config)
    huge = GradientSetting(config, HUGE, special=True)
    lse, delta, shift = "here.row_lse()", "here.row_delta()", "p.row_shift + tile_index * kBlockQ"
    faults = [
        # ---- S and P ----
        ("queries-of-the-first-step", "q = here.q() + first * QueryTile::kRowBytes,", "q = here.q(),", full),
        ("last-step-skipped", _STEPS, _STEPS.replace("kBlockQ;", "kBlockQ - kStepQ;"), full),
        ("keys-of-the-first-warp", "key_tile.base + first_row * KeyTile::kRowBytes", "key_tile.base", full),
        ("mask-one-key-too-many", "return key <= query + causal_offset;", "return key <= query + causal_offset + 1;", causal),
        ("mask-one-key-too-few", "return key <= query + causal_offset;", "return key < query + causal_offset;", causal),
        ("mask-of-the-first-warp", "mask_transposed(S, first_key + first_row,", "mask_transposed(S, first_key,", causal),
        ("mask-of-the-first-keys", "mask_transposed(S, first_key + first_row,", "mask_transposed(S, first_row,", causal),
        ("mask-of-the-first-step", "first_row, tile * kBlockQ + first, chain)", "first_row, tile * kBlockQ, chain)", causal),
        ("mask-of-the-first-tile", "first_row, tile * kBlockQ + first, chain)", "first_row, first, chain)", causal),
        ("no-mask", "if (tiles.needs_mask(tile)) mask_transposed(", "if (false) mask_transposed(", causal),
        ("huge-rows-not-shifted", "if (unlikely(huge)) shift_transposed(", "if (false) shift_transposed(", huge),
        ("huge-rows-not-told", "huge = p.huge_tiles[tile_index] != 0;", "huge = p.huge_tiles[tile_index] == 0;", huge),
        ("shift-of-the-first-step", f"{shift} + first)", f"{shift})", huge),
        ("lse-of-the-first-step", f"{lse} + first * 4)", f"{lse})", full),
        ("scale-not-applied", "exponentiate(S, p.scale_log2,", "exponentiate(S, 1.0f,", full),
        # ---- dS ----
        ("values-of-the-first-warp", "value_tile.base + first_row * ValueTile::kRowBytes", "value_tile.base", full),
        ("dO-of-the-first-step", "d_out = here.d_out() + first * GradientTile::kRowBytes;", "d_out = here.d_out();", full),
        ("delta-of-the-first-step", f"{delta} + first * 4)", f"{delta})", full),
        ("dS-of-the-first-step", "dS_tile, first_row, first + slice * 16, dS)", "dS_tile, first_row, slice * 16, dS)", full),
        ("dS-of-the-first-warp", "store_operand(dS_tile, first_row,", "store_operand(dS_tile, 0,", full),
        ("P-for-dS", "first + slice * 16, dS)", "first + slice * 16, P)", full),
        # ---- dQ ----
        ("sums-not-zeroed", "write_zeros<kThreads, kBlockQ * kColumns>(", "if (false) write_zeros<kThreads, kBlockQ * kColumns>(", full),
        ("dS-of-other-rows", "dS_rows(dS_tile, row_tile_dq);", "dS_rows(dS_tile, row_tile_dq ^ 1);", full),
        ("dQ-of-the-first-columns", "query_columns(offsets.keys(), warp % kGroupsDq);", "query_columns(offsets.keys(), 0);", full),
        ("rows-of-dQ-by-warp", "row_tile_dq = warp / kGroupsDq;", "row_tile_dq = warp % kGroupsDq;", full),
        ("sums-of-the-first-heads", "p.d_q_sum + tile_index * (kBlockQ * kColumns);\n", "p.d_q_sum + tile * (kBlockQ * kColumns);\n", full),
        ("sums-of-narrow-tiles", "tile_index * (kBlockQ * kColumns);\n", "tile_index * (kBlockQ * kHeadDim);\n", narrow),
        ("sums-of-the-first-key-heads", "int head = head_kv * p.group,", "int head = head_kv,", full),
        ("sums-of-one-head", _NEXT_HEAD, _NEXT_HEAD.replace(", ++head", ""), full),
        ("sums-from-the-first-tile", "head = head_kv * p.group, tile = tiles.begin;", "head = head_kv * p.group, tile = 0;", causal),
        ("sums-of-the-first-tile", "first_tile(batch, head) + tile;  // among", "first_tile(batch, head);  // among", causal),
        ("rows-of-dQ-in-one-place", "gradient_offset<kColumns>(row_tile + i, columns", "gradient_offset<kColumns>(i, columns", full),
        ("columns-of-dQ-in-one-place", "columns.pair(j / 2) * 2 + j % 2));", "j));", full),
        ("sums-read-in-another-order", "kColumns, kVectors>(p);", "kColumns, !kVectors>(p);", full),
    ]  # fmt: skip
    return [GradientFault(*fault) for fault in faults]


def race_faults(config: LadderConfig) -> list[GradientFault]:
    """Barriers and waits that are left out."""
    _, full, _ = _settings(config)
    no_queries = GradientSetting(config, (1, 2, 1, 0, 70))
    faults = [
        ("barrier-before-dS-is-read", "barrier_sync();  // dS of all warps is here", "//", full, UNORDERED),
        ("barrier-before-a-tile-is-used", ladder.TILE_BARRIER, "//", full, NOT_WRITTEN),
        ("wait-for-a-tile", ladder.TILE_WAIT, "", full, IN_FLIGHT),
        ("wait-one-group-short", ladder.TILE_WAIT, "cp_async_wait_group<kStages - 1>();", full, IN_FLIGHT),
        ("wait-for-keys-without-queries", _LAST_KEYS, "        //", no_queries, "asynchronous copy"),
        ("barrier-before-dK-takes-the-place-of-K", "barrier_sync();            // nobody reads K and V", "//", full, OVERWRITE),
        ("barrier-before-dK-is-stored", "barrier_sync();  // dK and dV of all warps are here", "//", full, UNORDERED),
    ]
    return [GradientFault(*fault) for fault in faults]
