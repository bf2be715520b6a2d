// Where the rows of a sequence lie in global memory: dense tensors here; packed or paged ones would differ only in this file.

// The first row of (batch, head) in a tensor with these strides, in elements.
template <class Element>
__device__ __forceinline__ Element* sequence_rows(Element* base, int batch, i64 batch_stride, int head, i64 head_stride) {
    return base + batch * batch_stride + head * head_stride;
}
