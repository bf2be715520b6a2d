// Single 16-bit elements as fp32 numbers.

__device__ __forceinline__ float load_element(const Element* at) {
    float value, nothing;
    cvt_f32_x2<Element>(value, nothing, at->bits);
    return value;
}
__device__ __forceinline__ void store_element(Element* at, float value) { at->bits = static_cast<u16>(cvt_rn_x2<Element>(value, 0.0f)); }
