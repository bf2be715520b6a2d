// Counts of zeros in a word. PTX ISA, "clz", "brev".

// How many bits above its highest 1 are 0; 32 for 0.
__device__ __forceinline__ int leading_zeros(u32 word) { return __clz(static_cast<int>(word)); }

// How many bits below its lowest 1 are 0, of a word that is not 0.
__device__ __forceinline__ int trailing_zeros(u32 word) { return __clz(static_cast<int>(__brev(word))); }
