// How many bits of a word are 1.

inline int popc(u32 word) { return __builtin_popcount(word); }
