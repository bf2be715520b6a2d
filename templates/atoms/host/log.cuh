// Natural logarithm to 1 ulp.

inline float natural_log(float x) { return std::log(x); }
