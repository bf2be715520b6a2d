// The matrix units of warpgroups, behind the atoms of wgmma (atoms/emulated/wgmma.cuh): what a product reads, when it takes place, and
// which registers and bytes of shared memory are in use until then. Registers of d hold a pattern that nobody else may change, those of a
// must stay as they are, and operands in shared memory count as being read. Products of 16-bit elements are exact in fp32; those of one
// step are added up in double and rounded once.

#include <deque>

namespace emulator {

constexpr int kRows = 64, kStep = 16, kMaxColumns = 256;
constexpr u32 kPoison = 0x7fa0feedu;  // a signalling NaN: arithmetic makes another NaN of it

// Registers of d while products are under way, as a matrix.
struct Accumulator {
    float* lanes[kWarpgroup];
    int columns, products = 0;  // that are still to come
    std::vector<float> values;

    template <class Visit>
    void visit(const Visit& visit) {
        for (int thread = 0; thread < kWarpgroup; ++thread)
            for (int i = 0; i < columns / 2; ++i) {
                const int lane = thread % kLanes, row = thread / kLanes * 16 + lane / 4 + i % 4 / 2 * 8;
                const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                visit(thread, lanes[thread][i], values[row * columns + column]);
            }
    }
};

struct Product {
    std::shared_ptr<Accumulator> d;
    u64 a, b;
    const u32* a_registers[kWarpgroup];
    u32 a_issued[kWarpgroup][4];  // what they held
    bool from_registers, accumulate, a_mn_major, b_mn_major;
    float (*value_of)(u16 bits);
};

constexpr u64 kOffsetBit = u64{1} << 19;  // where kOffsetMark of cluster.cuh is in a descriptor; no panel has a size that sets it

// A descriptor's fields, in bytes.
struct Descriptor {
    u32 start, leading, stride;

    explicit Descriptor(u64 bits)
        : start((bits & 0x3fff) << 4), leading(((bits & ~kOffsetBit) >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1 || (bits >> 49 & 7))
            current->fail("wgmma", "takes the descriptor %llx; those with 128-byte swizzle and base offset 0 are known", bits);
        if (current->progress.launch.cluster > 1 && !(bits & kOffsetBit))
            current->fail("wgmma", "takes a descriptor of %u, an address that says of which block it is, too", start);
    }
    // Where element (row, k) is, K-major; where element (k, n) is, MN-major. The swizzle is one of addresses.
    SharedAddress k_major(int row, int k) const { return swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2); }
    SharedAddress mn_major(int k, int n) const { return swizzled(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2); }
    static SharedAddress swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
};

struct Warpgroup {
    std::deque<std::vector<Product>> groups;  // committed, oldest first
    std::vector<Product> open;
    std::vector<std::shared_ptr<Accumulator>> accumulators;  // of all products under way
    Clock committed = 0;                                     // groups ever
    bool fenced = false;                                     // since the last wait, after which registers could be touched
};

struct Products : Kept {
    Warpgroup warpgroups[kMaxWarpgroups];

    Warpgroup& own() { return warpgroups[current->running / kWarpgroup]; }

    void thread_ends(Block& block) override {
        if (!own().open.empty() || !own().groups.empty()) block.fail("wgmma", "ends while matrix products are under way");
    }
};

static void carry_out(const Product& product) {
    const auto element_at = [&product](SharedAddress address) {
        u16 bits;
        std::memcpy(&bits, &current->shared.bytes[address], 2);
        return product.value_of(bits);
    };
    const int columns = product.d->columns;
    float a[kRows][kStep], b[kStep][kMaxColumns];
    const Descriptor at_a(product.from_registers ? product.b : product.a), at_b(product.b);
    if (product.from_registers) {
        for (int thread = 0; thread < kWarpgroup; ++thread)
            for (int i = 0; i < 8; ++i) {
                if (product.a_registers[thread][i / 2] != product.a_issued[thread][i / 2])
                    current->fail("wgmma", "finds registers of a of thread %d of its warpgroup changed while a product was under way",
                                  thread);
                const int lane = thread % kLanes, row = thread / kLanes * 16 + lane / 4 + i / 2 % 2 * 8;
                const int k = lane % 4 * 2 + i / 4 * 8 + i % 2;
                a[row][k] = product.value_of(static_cast<u16>(product.a_issued[thread][i / 2] >> i % 2 * 16));
            }
    } else {
        for (int row = 0; row < kRows; ++row)
            for (int k = 0; k < kStep; ++k)
                a[row][k] = element_at(product.a_mn_major ? at_a.mn_major(k, row) : at_a.k_major(row, k));
    }
    for (int k = 0; k < kStep; ++k)
        for (int n = 0; n < columns; ++n) b[k][n] = element_at(product.b_mn_major ? at_b.mn_major(k, n) : at_b.k_major(n, k));
    for (int row = 0; row < kRows; ++row) {
        float* const d = &product.d->values[row * columns];
        double sums[kMaxColumns];
        for (int n = 0; n < columns; ++n) sums[n] = product.accumulate ? d[n] : 0.0;
        for (int k = 0; k < kStep; ++k)
            for (int n = 0; n < columns; ++n) sums[n] += static_cast<double>(a[row][k]) * b[k][n];
        for (int n = 0; n < columns; ++n) d[n] = static_cast<float>(sums[n]);
    }
}

// Takes the product's operands in shared memory into use, as all four warps see them.
static void mark_operands(const Product& product, int warpgroup, Clock group) {
    const int columns = product.d->columns;
    for (int w = 0; w < 4; ++w) {
        const int warp = warpgroup * 4 + w;
        const Moment moment = current->now(warp);
        auto mark = [&](SharedAddress chunk) {
            require(current->shared.may_multiply(chunk / 16 * 16, 16, moment, kMatrixUnits + warpgroup, group), chunk, 16);
        };
        const Descriptor b(product.b);
        for (int k = 0; product.b_mn_major && k < kStep; ++k)
            for (int n = 0; n < columns; n += 8) mark(b.mn_major(k, n));
        for (int row = 0; !product.b_mn_major && row < columns; ++row) mark(b.k_major(row, 0)), mark(b.k_major(row, 8));
        if (product.from_registers) continue;
        const Descriptor a(product.a);
        for (int i = 0; i < kRows / 4; ++i) {  // of the warp's rows, or of the shared dimension: 16 of either
            const int row = w * 16;
            for (int half = 0; half < 16; half += 8) mark(product.a_mn_major ? a.mn_major(i, row + half) : a.k_major(row + i, half));
        }
    }
}

// The accumulator of these registers, which are taken out of use.
static std::shared_ptr<Accumulator> take_registers(Warpgroup& own, WgmmaOperand** threads, int columns) {
    for (const std::shared_ptr<Accumulator>& known : own.accumulators)
        if (known->lanes[0] == threads[0]->d) return known;
    const auto taken = std::make_shared<Accumulator>();
    for (int thread = 0; thread < kWarpgroup; ++thread) taken->lanes[thread] = threads[thread]->d;
    taken->columns = columns;
    taken->values.resize(kRows * columns);
    taken->visit([](int, float& in_register, float& value) { value = in_register, in_register = bits_as<float>(kPoison); });
    own.accumulators.push_back(taken);
    return taken;
}

void issue(const char* name, WgmmaOperand& operand) {
    current->meet_warpgroup(name, operand, [](WgmmaOperand** threads) {
        const WgmmaOperand& first = *threads[0];
        Warpgroup& own = current->kept<Products>().own();
        const std::size_t under_way = own.accumulators.size();
        const bool from_registers = first.a_registers != nullptr;
        Product product{take_registers(own, threads, first.columns), first.a, first.b, {}, {}, from_registers, first.accumulate != 0,
                        first.a_mn_major, first.b_mn_major, first.value_of};
        if (!own.fenced && (from_registers || own.accumulators.size() > under_way))
            current->fail("wgmma", "issues a product with no wgmma_fence since its registers could be touched");
        if (product.d->columns != first.columns)
            current->fail("wgmma", "issues a product of %d columns while one of %d is under way", first.columns, product.d->columns);
        for (int thread = 0; thread < kWarpgroup; ++thread) {
            const WgmmaOperand& operand = *threads[thread];
            if (operand.a != first.a || operand.b != first.b || !operand.accumulate != !first.accumulate)
                current->fail("divergence", "issues a product whose operands are not the same in all threads of the warpgroup");
            if (!product.from_registers) continue;
            product.a_registers[thread] = operand.a_registers;
            std::memcpy(product.a_issued[thread], operand.a_registers, 16);
        }
        mark_operands(product, current->running / kWarpgroup, own.committed + 1);
        if (!from_registers) tell("wgmma_operand", nullptr, Descriptor(first.a).start);
        tell("wgmma_operand", nullptr, Descriptor(first.b).start);
        ++product.d->products;
        own.open.push_back(std::move(product));
    });
}

// The products of a group take place; registers for which no more are to come get their values.
static void carry_out(Warpgroup& own, std::vector<Product>& group) {
    for (Product& product : group) {
        carry_out(product);
        if (--product.d->products) continue;
        product.d->visit([](int thread, float& in_register, float& value) {
            if (bits_as<u32>(in_register) != kPoison)
                current->fail("wgmma", "finds the accumulator of thread %d of its warpgroup touched while a product was under way", thread);
            in_register = value;
        });
        own.accumulators.erase(std::find(own.accumulators.begin(), own.accumulators.end(), product.d));
    }
    group.clear();
}

// All threads of the warpgroup meet; `work` is done once.
template <class WorkTile>
static void meet_at(const char* name, const WorkTile& work) {
    int nothing = 0;
    current->meet_warpgroup(name, nothing, [&](int**) { work(current->kept<Products>().own()); });
}

void wait_products(int pending) {
    meet_at("wgmma_wait_group", [pending](Warpgroup& own) {
        for (; static_cast<int>(own.groups.size()) > pending; own.groups.pop_front()) carry_out(own, own.groups.front());
        const int first = current->running / kWarpgroup * 4, unit = kMatrixUnits + first / 4;
        const Clock complete = own.committed - static_cast<Clock>(own.groups.size());
        for (int warp = first; warp < first + 4; ++warp) current->clock(warp)[unit] = complete;
        own.fenced = false;
        tell("wgmma_complete", nullptr, complete);  // groups so far
    });
}

}  // namespace emulator

void wgmma_fence() {
    emulator::meet_at("wgmma_fence", [](emulator::Warpgroup& own) { own.fenced = true; });
}

void wgmma_commit_group() {
    emulator::meet_at("wgmma_commit_group", [](emulator::Warpgroup& own) {
        own.groups.push_back(std::move(own.open));
        own.open.clear();
        ++own.committed;
        if (!emulator::current->options.late_copies) emulator::carry_out(own, own.groups.back());
    });
}
