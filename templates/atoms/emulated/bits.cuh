// Counts of zeros in a word.

inline int leading_zeros(u32 word) { return word == 0 ? 32 : __builtin_clz(word); }

inline int trailing_zeros(u32 word) { return __builtin_ctz(word); }
