// How a kernel divides its shared memory: regions one after the other.

struct SharedRegions {
    SharedAddress next;

    __device__ __forceinline__ SharedRegions() : next(shared_memory()) {}

    // The address of a new region. `bytes` is a multiple of 128, or it is the last region.
    __device__ __forceinline__ SharedAddress take(int bytes) {
        const SharedAddress region = next;
        next += bytes + kRedZone;
        mark_red_zone(region + bytes);
        return region;
    }
};
