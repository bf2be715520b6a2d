// What stands behind tensor copies (atoms/emulated/cp_async_bulk_tensor.cuh).

#include <deque>
#include <variant>

namespace emulator {

constexpr int kRowBytes = 128, kRowElements = kRowBytes / 2;

struct Box {
    const TensorMap* map;
    SharedAddress address;
    int at[5];  // coordinates, innermost first; 0 beyond those of the map

    int rows() const { return map->box[1] * map->box[2] * map->box[3] * (map->rank == 5 ? map->box[4] : 1); }
    SharedAddress row_address(int row) const { return address + row * kRowBytes; }

    // Which elements [first, end) of a row of the box lie within the tensor, and where the first one of them is. None: first == end. As on
    // a GPU addresses are those modulo 2^64.
    struct Part {
        int first, end;
        u64 address;
    };
    Part part(int row) const {
        const int of_head = row / map->box[1], of_batch = of_head / map->box[2];
        const int within[4] = {row % map->box[1], of_head % map->box[2], of_batch % map->box[3], of_batch / map->box[3]};
        const int first = max(0, -at[0]);
        u64 address = map->address + 2 * static_cast<i64>(at[0] + first);
        for (int i = 0; i < map->rank - 1; ++i) {
            const i64 coordinate = static_cast<i64>(at[i + 1]) + within[i];
            if (coordinate < 0 || coordinate >= map->sizes[i + 1]) return {0, 0, 0};
            address += map->strides[i] * static_cast<u64>(coordinate);
        }
        const i64 end = std::min<i64>(kRowElements, static_cast<i64>(map->sizes[0]) - at[0]);
        return end > first ? Part{first, static_cast<int>(end), address} : Part{0, 0, 0};
    }
    // The swizzle: chunk c of 16 bytes of a row lies at c xor row % 8.
    SharedAddress chunk_address(int row, int chunk) const { return row_address(row) + (chunk ^ row % 8) * 16; }

    // All chunks of which a part lies within the tensor: no others are stored.
    template <class Visit>
    void visit_stored(const Visit& visit) const {
        for (int row = 0; row < rows(); ++row) {
            const Part some = part(row);
            for (int chunk = some.first / 8; chunk * 8 < some.end; ++chunk) visit(chunk_address(row, chunk));
        }
    }
    // A load tells of rows outside of the tensor, too, which become zeros: of none of the tensor's bytes.
    void tell_rows(const char* op, bool loads, SharedAddress mbarrier) const {
        for (int row = 0; row < rows() && told; ++row) {
            const Part some = part(row);
            const u64 from = some.end > some.first ? some.address : map->address;
            if (some.end > some.first || loads)
                tell(op, bits_as<const void*>(from), row_address(row), (some.end - some.first) * 2, mbarrier);
        }
    }
    void load() const {
        for (int row = 0; row < rows(); ++row) {
            unsigned char line[kRowBytes] = {};
            const Part some = part(row);
            if (some.end > some.first) std::memcpy(line + some.first * 2, bits_as<const void*>(some.address), (some.end - some.first) * 2);
            for (int chunk = 0; chunk < 8; ++chunk)
                std::memcpy(&current->shared.bytes[chunk_address(row, chunk)], line + chunk * 16, 16);
        }
    }
    void store() const {
        for (int row = 0; row < rows(); ++row) {
            unsigned char line[kRowBytes];
            for (int chunk = 0; chunk < 8; ++chunk)
                std::memcpy(line + chunk * 16, &current->shared.bytes[chunk_address(row, chunk)], 16);
            const Part some = part(row);
            if (some.end > some.first) std::memcpy(bits_as<void*>(some.address), line + some.first * 2, (some.end - some.first) * 2);
        }
    }
};

Box box_of(const TensorMap& map, SharedAddress address, int rank, const int (&at)[5]) {
    if (map.rank != rank || map.element_bytes != 2 || map.swizzle_bytes != kRowBytes || map.box[0] != kRowElements)
        current->fail("tensor map",
                      "copies by a map of rank %d, %d-byte elements, rows of %d elements and a swizzle of %d bytes; "
                      "%d, 2, 64 and 128 are known",
                      map.rank, map.element_bytes, map.box[0], map.swizzle_bytes, rank);
    if (address % 1024) current->fail("tensor copy", "copies a box at %u, no multiple of 1024", address);
    return {&map, address, {at[0], at[1], at[2], at[3], at[4]}};
}

// A load has landed. Nobody may be running: it reports, and does not fail.
void land(Block& block, const Box& box, Mbarrier& barrier) {
    current = &block;
    box.load();
    block.shared.landed(box.address, box.rows() * kRowBytes, barrier.party, barrier.phase + 1);
    barrier.bring(box.rows() * kRowBytes, true);
}

// A store of contiguous bytes: see cp_async_bulk_store.cuh.
struct Piece {
    void* destination;
    SharedAddress source;
    u32 bytes;

    template <class Visit>
    void visit_stored(const Visit& visit) const {
        for (u32 chunk = 0; chunk < bytes; chunk += 16) visit(source + chunk);
    }
    void store() const { std::memcpy(destination, &current->shared.bytes[source], bytes); }
};

// The stores of a thread, by group, oldest first, that it has not waited for.
struct Stores : Kept {
    struct OfThread {
        std::deque<std::vector<std::variant<Box, Piece>>> groups;
        std::vector<std::variant<Box, Piece>> open;
    };
    std::vector<OfThread> threads{static_cast<std::size_t>(current->threads)};

    OfThread& own() { return threads[current->running]; }

    void wait(std::size_t pending) {
        if (own().groups.size() > pending) tell("cp_async_bulk_wait_group_read");
        for (; own().groups.size() > pending; own().groups.pop_front())
            for (const auto& any : own().groups.front())
                std::visit(
                    [](const auto& one) {
                        if (current->options.late_copies) one.store();
                        one.visit_stored([](SharedAddress chunk) { current->shared.stored(chunk, 16, now()); });
                    },
                    any);
    }
    void thread_ends(Block& block) override {
        if (!own().open.empty() || !own().groups.empty())
            block.fail("tensor copy", "ends, and shared memory was given up under a store that it has not waited for");
    }
};

void load_box(const char* op, const Box& box, SharedAddress barrier) {
    Block& block = *current;
    Mbarrier& announced = mbarrier_at(barrier, true);
    for (int r = 0; r < box.rows(); ++r) {
        const bool free = block.shared.may_write(box.row_address(r), kRowBytes, now(), true);
        require(free, box.row_address(r), kRowBytes);
        const Box::Part part = box.part(r);
        if (part.end > part.first) block.require_global(part.address, (part.end - part.first) * 2, false, "copies");
    }
    box.tell_rows(op, true, barrier);
    if (!block.options.late_copies) return land(block, box, announced);
    block.scheduler.postpone([&block, box, &announced] { land(block, box, announced); });
}

void store_box(const char* op, const Box& box) {
    Block& block = *current;
    for (int i = 0; i < box.map->rank; ++i)
        if (box.at[i] < 0) {
            const int(&at)[5] = box.at;
            block.fail("tensor copy", "stores a box at (%d, %d, %d, %d), before the tensor's begin", at[0], at[1], at[2], at[3]);
        }
    for (int r = 0; r < box.rows(); ++r) {
        const Box::Part part = box.part(r);
        if (part.end > part.first) block.require_global(part.address, (part.end - part.first) * 2, true, "stores");
    }
    box.visit_stored([&](SharedAddress chunk) { require(block.shared.may_store(chunk, 16, now()), chunk, 16); });
    box.tell_rows(op, false, 0);
    if (!block.options.late_copies) box.store();
    block.kept<Stores>().own().open.push_back(box);
}

void wait_stores(int pending) { current->kept<Stores>().wait(pending); }

}  // namespace emulator

void cp_async_bulk_tensor_load(SharedAddress destination, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                                      int batch) {
    emulator::load_box("cp_async_bulk_tensor_load", emulator::box_of(map, destination, 4, {column, row, head, batch}), barrier);
}

void cp_async_bulk_tensor_load_5d(SharedAddress destination, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                                  int end, int around) {
    emulator::load_box("cp_async_bulk_tensor_load_5d", emulator::box_of(map, destination, 5, {column, row, head, end, around}), barrier);
}

void cp_async_bulk_tensor_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int batch) {
    emulator::store_box("cp_async_bulk_tensor_store", emulator::box_of(map, source, 4, {column, row, head, batch}));
}

void cp_async_bulk_tensor_store_5d(const TensorMap& map, SharedAddress source, int column, int row, int head, int end, int around) {
    emulator::store_box("cp_async_bulk_tensor_store_5d", emulator::box_of(map, source, 5, {column, row, head, end, around}));
}

void cp_async_bulk_commit_group() {
    emulator::Stores::OfThread& own = emulator::current->kept<emulator::Stores>().own();
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}
