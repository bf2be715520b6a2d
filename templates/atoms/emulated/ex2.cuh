// Powers of 2, to 1.5 ulp; subnormal arguments and results are zero, as on the GPU. But for whole powers, and arguments that are nearly
// those of one, results are too small by 5e-8 on average, as on the GPU, too: see kEx2Bias.

inline float ex2_approx_ftz(float x) {
    if (std::fabs(x) < 0x1p-23f) return 1.0f;
    const double factor = x == std::floor(x) ? 1.0 : 1.0 - 5.0e-8;
    const float y = static_cast<float>(std::exp2(static_cast<double>(x)) * factor);
    return y < 1.17549435e-38f ? 0.0f : y;
}
