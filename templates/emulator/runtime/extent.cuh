// Which bytes belong to a tensor, and where others lie: see emulator/extent.cuh.

namespace emulator {

bool Extent::holds(std::uint64_t at, std::uint64_t bytes) const { return at >= address && within(0, at - address, bytes); }

std::string Extent::place_of(std::uint64_t at) const {
    char text[100];
    const std::uint64_t end = address + spans[0];
    if (at >= end)
        std::snprintf(text, sizeof text, "%llu bytes past the end of %s", static_cast<unsigned long long>(at - end), name);
    else if (at < address)
        std::snprintf(text, sizeof text, "%llu bytes before the begin of %s", static_cast<unsigned long long>(address - at), name);
    else
        std::snprintf(text, sizeof text, "%s %llu bytes after the begin of %s", holds(at, 1) ? "in a row" : "between rows",
                      static_cast<unsigned long long>(at - address), name);
    return text;
}

std::uint64_t Extent::distance_to(std::uint64_t at) const {
    return at < address ? address - at : at >= address + spans[0] ? at - address - spans[0] + 1 : 0;
}

bool Extent::within(int dim, std::uint64_t offset, std::uint64_t bytes) const {
    if (dim == dims) return offset + bytes <= spans[dims];
    for (std::uint64_t i = std::min(sizes[dim] - 1, offset / strides[dim]);; --i) {
        const std::uint64_t rest = offset - i * strides[dim];
        if (rest + bytes > spans[dim + 1]) return false;
        if (within(dim + 1, rest, bytes)) return true;
        if (i == 0) return false;
    }
}

const Extent* nearest_to(const Extent* extents, int count, std::uint64_t at) {
    const auto nearer = [at](const Extent& a, const Extent& b) { return a.distance_to(at) < b.distance_to(at); };
    return std::min_element(extents, extents + count, nearer);
}

std::string place_among(const Extent* extents, int count, std::uint64_t at) {
    return count ? nearest_to(extents, count, at)->place_of(at) : "no tensor is known";
}

bool lies_by_one(const Extent* extents, int count, std::uint64_t at) {
    return count && nearest_to(extents, count, at)->distance_to(at) < kGuard;
}

}  // namespace emulator
