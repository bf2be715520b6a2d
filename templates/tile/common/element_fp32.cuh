// Single fp32 elements: the counterpart of element_16bit.cuh.

__device__ __forceinline__ float load_element(const Element* at) { return *at; }
__device__ __forceinline__ void store_element(Element* at, float value) { *at = value; }
