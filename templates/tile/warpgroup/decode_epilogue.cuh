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
    static constexpr int kFirstBarrier = 3, kOutTiles = Traits::kHeadDimV / 8;  // a barrier of each row group

    const Parameters& p;
    const DecodeStorage<Traits>& smem;
    const PackedRows& rows;
    const RowTiles& tiles;
    const int row_group;

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
    // `is_first`: whether it is the block's first part.
    template <int kTiles>
    __device__ __forceinline__ void store_partial_rows(const float (&O)[kTiles][4], const float (&totals)[2], const Origin (&origins)[2],
                                                       bool is_first, const HeadParts& parts) const {
        const Partials partials{p.partials, tiles.rows()};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = own_row(row_group, h);
            if (row >= tiles.rows()) continue;
            float* to = partials.row(Partials::slot_of(block_index(), is_first), row);
#pragma unroll
            for (int j = 0; j < kOutTiles; ++j) {
                float* pair = to + j * 8 + lane_index() % 4 * 2;
                pair[0] = O[j][h * 2], pair[1] = O[j][h * 2 + 1];
            }
            if (lane_index() % 4 == 0) Partials::store_statistics(to, totals[h], origins[h]);
        }
        const SharedAddress flag = smem.flags + row_group * 4;
        bar_sync(kFirstBarrier + row_group, 128);
        if (thread_index() % 128 == 0)
            store_shared(flag, is_last_part(p.part_counters + parts.first_block * Traits::kRowGroups + row_group, parts));
        bar_sync(kFirstBarrier + row_group, 128);
        if (load_shared(flag) != 0) merge(partials, parts);
    }

  private:
    __device__ __forceinline__ void merge(const Partials& partials, const HeadParts& parts) const {
        const int first_row = row_group * 64, end_row = min(first_row + 64, tiles.rows());
        merge_parts<128>(partials, parts, first_row, end_row, thread_index() % 128, p.scale_log2,
                         [&](int row, int column, const MergedRow& merged) {
                             if (!rows.has(tiles, row, p.len_q)) return;
                             const int query = rows.query(tiles, row), head = rows.head(tiles, row);
                             const float by = normaliser(merged.total);
                             u32* out = reinterpret_cast<u32*>(out_row(query, head) + column);
                             out[0] = cvt_rn_x2<Element>(merged.columns[0] * by, merged.columns[1] * by);
                             out[1] = cvt_rn_x2<Element>(merged.columns[2] * by, merged.columns[3] * by);
                             if (column == 0) store_lse(query, head, merged.origin, merged.total);
                         });
    }
    __device__ __forceinline__ Element* out_row(int query, int head) const {
        return p.out + rows.batch * p.out_batch + head * p.out_head + query * p.out_row;
    }
    __device__ __forceinline__ void store_lse(int query, int head, const Origin& origin, float total) const {
        if (p.lse == nullptr) return;
        p.lse[(static_cast<i64>(rows.batch) * p.heads_q + head) * p.len_q + query] =
            log_sum_exp(origin, total, p.scale_log2, p.ln2_hi, p.ln2_lo);
    }
};
