// Bulk copies: see atoms/ptx/cp_async_bulk.cuh. They land early or late, and are waited for, as tensor copies are.

void cp_async_bulk_load(SharedAddress destination, const void* source, u32 bytes, SharedAddress barrier);

// Global memory has one order here, for asynchronous reads of it, too: that this fence is missing is not found.
inline void fence_proxy_async_global() {}
