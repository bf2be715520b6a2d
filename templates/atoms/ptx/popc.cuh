// How many bits of a word are 1. PTX ISA, "popc".

__device__ __forceinline__ int popc(u32 word) { return __popc(word); }
