// A tensor in global memory as a kernel may touch it: which bytes belong to its elements, and how to say where other ones lie.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

namespace emulator {

constexpr int kDims = 4;
constexpr std::uint64_t kGuard = 1ull << 32;  // bytes beside each tensor where nothing else lies: _GUARD in build/emulator/memory.py

// Rows of adjacent elements, and dimensions by which rows are apart, the widest stride first; all in bytes.
struct Extent {
    std::uint64_t address, sizes[kDims], strides[kDims];
    std::uint64_t spans[kDims + 1];  // spans[d]: from the first to the last element in dimensions d and on alone; spans[dims]: a row
    std::int32_t dims, writable;
    char name[16];

    bool holds(std::uint64_t at, std::uint64_t bytes) const;

    // "64 bytes past the end of k"
    std::string place_of(std::uint64_t at) const;
    std::uint64_t distance_to(std::uint64_t at) const;

  private:
    // Views may overlap themselves: then more than one step along a dimension may lead to the same byte.
    bool within(int dim, std::uint64_t offset, std::uint64_t bytes) const;
};

// The nearest of some tensors, from which a byte of no tensor is told.
const Extent* nearest_to(const Extent* extents, int count, std::uint64_t at);
std::string place_among(const Extent* extents, int count, std::uint64_t at);
bool lies_by_one(const Extent* extents, int count, std::uint64_t at);

}  // namespace emulator
