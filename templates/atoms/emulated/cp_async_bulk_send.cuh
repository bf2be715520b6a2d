// Bulk copies to another block of the cluster: see atoms/ptx/cp_async_bulk_send.cuh. They land early or late, as bulk copies from global
// memory do, and may be faster than the arrival that announces them.

void cp_async_bulk_send(ClusterAddress destination, SharedAddress source, u32 bytes, ClusterAddress barrier);
