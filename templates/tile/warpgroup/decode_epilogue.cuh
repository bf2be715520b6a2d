// The epilogue of a consumer of the decode kernel: from its registers to the output, if its part is a whole head; else to the partial
// outputs, which whoever comes last adds up.

// The row of the tile that is a thread's first one (h 0) or second one (h 1) in the products' accumulators.
__device__ __forceinline__ int own_row(int row_group, int h) {
    return row_group * 64 + thread_index() / 32 % 4 * 16 + lane_index() / 4 + h * 8;
}

template <class Traits, class Parameters>
struct DecodeEpilogue {
    using Element = typename Traits::Element;
    using Partials = PartialOutputs<Traits::kHeadDimV>;
    // Barriers of each sharer, and one of both key groups.
    static constexpr int kFirstBarrier = 3, kBothGroups = 5, kOutTiles = Traits::kHeadDimV / 8;

    const Parameters& p;
    const DecodeStorage<Traits>& smem;
    const PackedRows& rows;
    const RowTiles& tiles;
    const int sharer, tile_head, row_group;  // see DecodeConsumer

    template <int kTiles>
    __device__ __forceinline__ void store_rows(const float (&O)[kTiles][4], const float (&totals)[2], const Origin (&origins)[2],
                                               const float (&normalisers)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row(row_group, h);
            if (!rows.has(tiles, row, p.len_q)) continue;
            const int query = rows.query(tiles, row), head = rows.head(tiles, row);
            u32* out = reinterpret_cast<u32*>(out_row(query, head)) + lane_index() % 4;
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j)
                out[j * 4] = cvt_rn_x2<Element>(O[j][h * 2] * normalisers[h], O[j][h * 2 + 1] * normalisers[h]);
            if (lane_index() % 4 == 0) store_lse(query, head, origins[h], totals[h]);
        }
    }
    // One thread of a sharer looks up where the other parts of a head are, while its keys are on their way.
    __device__ __forceinline__ void find_parts(const Shares<Traits>& shares, const HeadTiles& head, bool is_first) const {
        const HeadParts parts = shares.parts(head);
        store_shared_v4(parts_at(is_first), {static_cast<u32>(parts.first_block), static_cast<u32>(parts.count), parts.begins_share, 0});
    }
    // `is_first`: whether it is the block's first part.
    template <int kTiles>
    __device__ __forceinline__ void store_partial_rows(const float (&O)[kTiles][4], const float (&totals)[2], const Origin (&origins)[2],
                                                       bool is_first) const {
        const Partials partials{p.partials, rows_of_slot()};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row(row_group, h);
            if (row >= tiles.rows()) continue;
            float* to = partials.row(Partials::slot_of(own_share(p), is_first), first_row_of_slot() + row);
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j) {
                float* pair = to + j * 8 + lane_index() % 4 * 2;
                pair[0] = O[j][h * 2], pair[1] = O[j][h * 2 + 1];
            }
            if (lane_index() % 4 == 0) Partials::store_statistics(to, totals[h], origins[h]);
        }
        bar_sync(kFirstBarrier + sharer, 128);
        if (thread_index() % 128 == 0) {
            const HeadParts parts = load_parts(is_first);
            const bool is_last = is_last_part(p.part_counters + parts.first_block * Traits::kSharers + sharer, parts);
            store_shared(parts_at(is_first) + 12, is_last);
        }
    }
    // Adds the parts up, if they are all there: by so many key groups, of which this is one.
    __device__ __forceinline__ void merge_if_last(int key_group, int key_groups, bool is_first) const {
        bar_sync(key_groups > 1 ? kBothGroups : kFirstBarrier + sharer, key_groups * 128);
        if (load_shared(parts_at(is_first) + 12) == 0) return;
        const HeadParts parts = load_parts(is_first);
        const int before = first_row_of_slot();
        const int first_row = before + row_group * 64, end_row = min(first_row + 64, before + tiles.rows());
        const Partials partials{p.partials, rows_of_slot()};
        const auto store = [&](int row_of_slot, int column, const MergedRow& merged) {
            const int row = row_of_slot - before;
            if (!rows.has(tiles, row, p.len_q)) return;
            const int query = rows.query(tiles, row), head = rows.head(tiles, row);
//% if joins
            const float height = height_of_sink(p.sinks[head], merged.origin, p.sinks_unit, p.ln2_hi, p.ln2_lo);
            const float by = normaliser_with_sink(merged.total, height);
//% else
            const float by = normaliser(merged.total);
//% endif
            u32* out = reinterpret_cast<u32*>(out_row(query, head) + column);
            out[0] = cvt_rn_x2<Element>(merged.columns[0] * by, merged.columns[1] * by);
            out[1] = cvt_rn_x2<Element>(merged.columns[2] * by, merged.columns[3] * by);
            if (column == 0) store_lse(query, head, merged.origin, merged.total);
        };
        if constexpr (Traits::kKeyGroups == 1)
            merge_parts<128>(partials, parts, first_row, end_row, thread_index() % 128, p.scale_log2, store);
        else
            merge_rows(partials, parts, first_row, end_row, key_group * 4 + warp_index() % 4, key_groups * 4, p.scale_log2, store);
    }

  private:
    // A slot has the rows of all of a stage's heads.
    __device__ __forceinline__ int rows_of_slot() const { return Traits::kKeyHeads * tiles.rows(); }
    __device__ __forceinline__ int first_row_of_slot() const { return tile_head * tiles.rows(); }
    __device__ __forceinline__ SharedAddress parts_at(bool is_first) const {
        return smem.parts + (sharer * 2 + (is_first ? 0 : 1)) * 16;
    }
    __device__ __forceinline__ HeadParts load_parts(bool is_first) const {
        const uint4 v = load_shared_v4(parts_at(is_first));
        return {static_cast<int>(v.x), static_cast<int>(v.y), v.z != 0};
    }
    __device__ __forceinline__ Element* out_row(int query, int head) const {
        return p.out + rows.batch * p.out_batch + head * p.out_head + query * p.out_row;
    }
    __device__ __forceinline__ void store_lse(int query, int head, const Origin& origin, float total) const {
        if (p.lse == nullptr) return;
//% if joins
        const float lse = log_sum_exp(origin, total, p.scale_log2, p.ln2_hi, p.ln2_lo);
        p.lse[(static_cast<i64>(rows.batch) * p.heads_q + head) * p.len_q + query] = lse_with_sink(lse, p.sinks[head]);
//% else
        p.lse[(static_cast<i64>(rows.batch) * p.heads_q + head) * p.len_q + query] =
            log_sum_exp(origin, total, p.scale_log2, p.ln2_hi, p.ln2_lo);
//% endif
    }
};
