// Shared memory in the emulator, with a shadow: for every 4 bytes, the smallest access there is, who wrote them and who has read them
// since. Each access says whether it is one that a GPU would guarantee. Order between warps is by vector clocks (Fidge 1988), order between
// the lanes of a warp by how often they have met.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace emulator {

constexpr int kRedZone = 1024;  // bytes after each region of a block's memory, which nobody may touch
constexpr int kMaxRegions = 16;
constexpr int kMaxWarps = 32, kMaxWarpgroups = kMaxWarps / 4, kMaxMbarriers = 64;

// Whom clocks tell apart: warps; the matrix units of warpgroups, whose time is the number of the group of products; and mbarriers, to which
// copies that land belong, with the number of their phase.
constexpr int kMatrixUnits = kMaxWarps, kMbarriers = kMatrixUnits + kMaxWarpgroups, kParties = kMbarriers + kMaxMbarriers;
constexpr int kReaders = kMbarriers;
static_assert(kReaders <= 64, "a cell has a bit for each");
using Clock = std::uint32_t;

// Up to which time somebody has seen what the parties did of all blocks of a cluster, by the rank of the block.
class Clocks {
  public:
    explicit Clocks(int blocks);

    Clock* of(int rank) { return &times[rank * kParties]; }
    const Clock* of(int rank) const { return &times[rank * kParties]; }
    void clear();
    void join(const Clocks& other);

    // The same of what products and copies did, and of what the warps of block `rank` had done when they met at its last barrier: `now` is
    // the time of `warp`, which has done more since.
    void join_performed(const Clocks& other, int rank, int warp, Clock now);

  private:
    std::vector<Clock> times;
};

// A thread at one moment, as far as order in the memory of one block goes. Thread -1: all lanes of the warp; warp -1: of another block.
struct Moment {
    int thread, warp;
    const Clock* clock;  // what its warp has seen of the parties of the block whose memory it is
    Clock synced;
};

// When something happened, by the clock of its party and, for lanes of one warp, by how often they had met.
struct Time {
    Clock clock = 0, synced = 0;
};

struct Cell {
    enum State : std::uint8_t { kUnwritten, kWritten, kInFlight, kMbarrier, kRedZone };
    State state = kUnwritten;
    std::uint8_t party = 0;                 // that wrote
    std::uint16_t stores = 0;               // tensor copies that have not read it yet
    std::int16_t writer = -1, reader = -1;  // threads; writer -1: a tensor copy; the reader is the last one that read alone, not as a warp
    Time written;
    Clock read_synced = 0;
    std::uint32_t fences = 0;    // for the asynchronous proxy that the writer had executed before it wrote
    std::uint64_t readers = 0;   // parties that have read it since it was written, a bit for each
};

struct Shared {
    const int given;  // bytes that the launch gives a block; `bytes` has room for red zones, too
    int claimed = 0;  // bytes of all regions
    std::vector<unsigned char> bytes;
    std::vector<Cell> cells;
    std::vector<Clock> read;  // of each cell, when each party has last read it: what is not of its `readers` means nothing
    const char* fault = nullptr;  // the check that the last access failed, with the other thread
    int other = -1;

    explicit Shared(int given);

    // Every block begins with bytes that nobody wrote; they hold NaN as fp32, fp16 and bf16.
    void clear();

    int regions() const;
    // A thread's region number `number` begins at `address`, behind the one before: the same for all threads, or false. A red zone follows
    // it, and nothing after that one belongs to a kernel that takes regions; one that takes none has all that was given to it.
    bool claim(int number, std::uint32_t address, int size);

    bool inside(std::uint32_t address, int size);
    // `alone`: a lane's own load; else a warp's, which is over when its lanes go on.
    bool may_read(std::uint32_t address, int size, const Moment& now, bool alone);
    bool may_write(std::uint32_t address, int size, const Moment& now, bool in_flight);
    // An asynchronous copy of thread `now` is complete, as far as that thread can tell.
    void landed(std::uint32_t address, int size, const Moment& now);

    // ---- the asynchronous proxy: tensor copies and matrix products ----

    // What the thread has written so far, the asynchronous proxy sees if it is told after this.
    void fence(const Moment& now);

    // A tensor copy is complete, as far as those can tell that know of `time` of `party`.
    void landed(std::uint32_t address, int size, int party, Clock time);
    // The lanes of a warp issue a product that reads until `time` of the matrix unit `party`.
    bool may_multiply(std::uint32_t address, int size, const Moment& now, int party, Clock time);
    // A thread issues a tensor copy to global memory. Once it has waited for it, `stored`.
    bool may_store(std::uint32_t address, int size, const Moment& now);
    void stored(std::uint32_t address, int size, const Moment& now);
    // A thread issues a bulk copy to a block of its cluster: it reads until `time` of `party`, an mbarrier of that block, counted from this
    // block's parties on.
    bool may_send(std::uint32_t address, int size, const Moment& now, int party, Clock time);
    // An mbarrier takes the place of what was written there.
    void mark_mbarrier(std::uint32_t address);
    // `by_copies`: it has to be known to the asynchronous proxy, too.
    bool may_use_mbarrier(std::uint32_t address, const Moment& now, bool by_copies);

  private:
    struct Region {
        std::uint32_t address;
        int bytes;
    };
    struct Reader {
        int party;
        Clock until;
    };
    std::vector<Region> taken;
    std::vector<std::vector<Reader>> sent;  // copies to other blocks that read a cell since it was written; empty if there were none at all
    std::uint32_t end = 0;  // of what the kernel may touch, red zones included
    std::vector<std::vector<Time>> fences;  // of each thread, for the asynchronous proxy

    // What another block writes is in flight, and lands.
    void stamp(Cell& cell, const Moment& now) const;
    Clock& last_read(const Cell& cell, int party) { return read[(&cell - cells.data()) * kReaders + party]; }
    void mark_reader(Cell& cell, int party, Clock time) {
        cell.readers |= std::uint64_t{1} << party;
        last_read(cell, party) = time;
    }
    void mark_read(Cell& cell, const Moment& now, bool alone);
    // Whether `now` knows of what the cell's writer did at that time.
    static bool after(const Time& time, const Cell& cell, const Moment& now);
    // Whether `now` knows that all of these copies have come; then they are forgotten.
    static bool all_seen(std::vector<Reader>& readers, const Moment& now);
    static bool after_write(const Cell& cell, const Moment& now);
    bool readable(const Cell& cell, const Moment& now);
    // What threads wrote, not copies, the asynchronous proxy sees after a fence of the writer that `now` knows of.
    bool fenced(const Cell& cell, const Moment& now);
    bool wrong(const char* what, int thread);
};

}  // namespace emulator
