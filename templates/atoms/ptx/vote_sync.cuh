// Votes of a warp. PTX ISA, "vote.sync".

// Whether `predicate` holds for any of the 32 lanes. All take part.
__device__ __forceinline__ bool vote_sync_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

// A word in which bit i is the predicate of lane i. All 32 lanes take part.
__device__ __forceinline__ u32 vote_sync_ballot(bool predicate) { return __ballot_sync(0xffffffff, predicate); }
