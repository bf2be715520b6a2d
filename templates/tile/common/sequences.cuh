// Where the sequences of a batch lie. Kernels get all lengths and row addresses from one struct, so that another layout of sequences needs
// only another struct with these functions. Tensor maps know nothing of it: they assume the dense layout.

// Distances between batch entries, heads and rows of a tensor, in elements.
struct Strides {
    i64 batch, head, row;
};

// Sequences of one length, each an entry of the tensors' batch axis.
struct DenseSequences {
    int query_length, key_length;  // of each sequence
    int heads_q, query_tiles;

    __device__ __forceinline__ int len_q(int) const { return query_length; }
    __device__ __forceinline__ int len_kv(int) const { return key_length; }

    // Row `row` of a head in a tensor of queries, and in a tensor of keys: for kernels that read rows by their addresses.
    template <class Element>
    __device__ __forceinline__ Element* query_row(Element* tensor, const Strides& strides, int batch, int head, int row) const {
        return tensor + batch * strides.batch + head * strides.head + row * strides.row;
    }
    template <class Element>
    __device__ __forceinline__ Element* key_row(Element* tensor, const Strides& strides, int batch, int head, int row) const {
        return tensor + batch * strides.batch + head * strides.head + row * strides.row;
    }
    // Where a head's first query lies in lse and all that has its layout: [batch, heads_q, len_q], dense.
    __device__ __forceinline__ i64 lse_offset(int batch, int head) const {
        return (static_cast<i64>(batch) * heads_q + head) * query_length;
    }
    // The first query tile's place in [batch, heads_q, query_tiles], for the backward pass.
    __device__ __forceinline__ i64 first_tile(int batch, int head) const {
        return (static_cast<i64>(batch) * heads_q + head) * query_tiles;
    }
};
