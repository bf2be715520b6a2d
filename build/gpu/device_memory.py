"""Memory of a GPU that lives as long as the process, from the driver itself."""

from __future__ import annotations

from .driver import check, driver


def zeroed_memory(size: int) -> int:
    """The address of so many bytes, all zero by the time that this returns, on the GPU whose context is current. Never freed.

    Allowed at any time, also while this or another thread captures a CUDA graph: nothing here touches a stream of anybody else, and
    in the relaxed mode the driver does not take an allocation for a step that the graph would lack.
    Raises DriverError if there is not so much memory left.
    """
    cu = driver()
    relaxed, not_blocking = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED, cu.CUstream_flags.CU_STREAM_NON_BLOCKING
    before = check(cu.cuThreadExchangeStreamCaptureMode(relaxed), "relaxing the rules of capture")
    try:
        address = int(check(cu.cuMemAlloc(size), f"allocating {size} B"))
        stream = check(cu.cuStreamCreate(not_blocking), "making a stream")
        check(cu.cuMemsetD8Async(address, 0, size, stream), f"zeroing {size} B")
        check(cu.cuStreamSynchronize(stream), f"zeroing {size} B")
        check(cu.cuStreamDestroy(stream), "releasing a stream")
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before), "restoring the rules of capture")
    return address
