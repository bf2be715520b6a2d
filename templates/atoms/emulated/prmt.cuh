// Permutation of bytes.

// The bytes of `word` in another order: digit i of `selector`, from 0 to 3, is the number of the byte that becomes byte i.
inline u32 prmt(u32 word, u32 selector) {
    u32 permuted = 0;
    for (int i = 0; i < 4; ++i) permuted |= (word >> (selector >> i * 4 & 3u) * 8 & 255u) << i * 8;
    return permuted;
}
