// Reciprocals, rounded; subnormal arguments and results are zero, as on the GPU.

inline float rcp_approx_ftz(float x) {
    const float y = 1.0f / (std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x);
    return std::fabs(y) < 1.17549435e-38f ? std::copysign(0.0f, y) : y;
}
