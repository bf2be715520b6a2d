// Powers of 2, to 1 ulp; subnormal arguments and results are zero, as on the GPU.

inline float ex2_approx_ftz(float x) {
    const float y = std::exp2(std::fabs(x) < 1.17549435e-38f ? 0.0f : x);
    return y < 1.17549435e-38f ? 0.0f : y;
}
