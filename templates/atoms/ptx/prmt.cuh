// Permutation of bytes. PTX ISA, "prmt".

// The bytes of `word` in another order: digit i of `selector`, from 0 to 3, is the number of the byte that becomes byte i.
__device__ __forceinline__ u32 prmt(u32 word, u32 selector) { return __byte_perm(word, 0, selector); }
