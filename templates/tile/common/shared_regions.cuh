// How a kernel divides its shared memory: regions one after the other. Together they take just what the launch gives the block.

struct SharedRegions {
    SharedAddress next;

    __device__ __forceinline__ SharedRegions() : next(shared_memory()) {}

    // The address of a new region. Regions that need an alignment come before those whose `bytes` are no multiple of it.
    __device__ __forceinline__ SharedAddress take(int bytes) {
        const SharedAddress region = next;
        next += bytes + kRedZone;
        claim_region(region, bytes);
        return region;
    }
};
