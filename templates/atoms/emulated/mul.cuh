// Products. The compiler must not fuse them: -ffp-contract=off.

inline float mul_rn(float a, float b) { return a * b; }

inline u64 mul_hi(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }
