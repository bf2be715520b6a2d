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
using Clock = std::uint32_t;

// Up to which time somebody has seen what the parties did of all blocks of a cluster, by the rank of the block.
class Clocks {
  public:
    explicit Clocks(int blocks) : times(blocks * kParties) {}

    Clock* of(int rank) { return &times[rank * kParties]; }
    const Clock* of(int rank) const { return &times[rank * kParties]; }
    void clear() { std::fill(times.begin(), times.end(), Clock{0}); }
    void join(const Clocks& other) {
        for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], other.times[i]);
    }

    // The same of what products and copies did, and of what the warps of block `rank` had done when they met at its last barrier: `now` is
    // the time of `warp`, which has done more since.
    void join_performed(const Clocks& other, int rank, int warp, Clock now) {
        for (std::size_t i = 0; i < times.size(); ++i)
            if (i % kParties >= kMatrixUnits) times[i] = std::max(times[i], other.times[i]);
        for (int w = 0; w < kMaxWarps; ++w) {
            const Clock known = w == warp ? now - 1 : other.of(rank)[w];
            of(rank)[w] = std::max(of(rank)[w], known);
        }
    }

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
    Clock read[kReaders] = {};   // when each party has last read it, 0 if not since it was written
};

struct Shared {
    const int given;  // bytes that the launch gives a block; `bytes` has room for red zones, too
    int claimed = 0;  // bytes of all regions
    std::vector<unsigned char> bytes;
    std::vector<Cell> cells;
    const char* fault = nullptr;  // the check that the last access failed, with the other thread
    int other = -1;

    explicit Shared(int given)
        : given(given), bytes((given + kMaxRegions * kRedZone + 15) / 16 * 16), cells(bytes.size() / 4), fences(kMaxWarps * 32) {}

    // Every block begins with bytes that nobody wrote; they hold NaN as fp32, fp16 and bf16.
    void clear() {
        std::fill(bytes.begin(), bytes.end(), static_cast<unsigned char>(0xff));
        std::fill(cells.begin(), cells.end(), Cell{});
        for (std::vector<Time>& of_thread : fences) of_thread.clear();
        taken.clear(), sent.clear();
        claimed = 0, end = given;
    }

    int regions() const { return static_cast<int>(taken.size()); }
    // A thread's region number `number` begins at `address`, behind the one before: the same for all threads, or false. A red zone follows
    // it, and nothing after that one belongs to a kernel that takes regions; one that takes none has all that was given to it.
    bool claim(int number, std::uint32_t address, int size) {
        if (number < regions()) return taken[number].address == address && taken[number].bytes == size;
        taken.push_back({address, size});
        claimed += size;
        for (int i = 0; i < kRedZone / 4; ++i) cells[(address + size) / 4 + i].state = Cell::kRedZone;
        end = address + size + kRedZone;
        return true;
    }

    bool inside(std::uint32_t address, int size) {
        if (address % size) return wrong("misaligned shared access", -1);
        if (address + size > end) return wrong("shared access outside of the block's memory", -1);
        return true;
    }
    // `alone`: a lane's own load; else a warp's, which is over when its lanes go on.
    bool may_read(std::uint32_t address, int size, const Moment& now, bool alone) {
        if (!inside(address, size)) return false;
        for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
            if (!readable(*cell, now)) return false;
            mark_read(*cell, now, alone);
        }
        return true;
    }
    bool may_write(std::uint32_t address, int size, const Moment& now, bool in_flight) {
        if (!inside(address, size)) return false;
        for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
            if (cell->state == Cell::kRedZone) return wrong("write to a red zone", -1);
            if (cell->state == Cell::kMbarrier) return wrong("write to an mbarrier", -1);
            if (cell->state == Cell::kInFlight) return wrong("write under an asynchronous copy", cell->writer);
            if (cell->stores) return wrong("write under a store that has not read it", -1);
            if (!sent.empty() && !all_seen(sent[cell - cells.data()], now))
                return wrong("write under a copy to another block, with no word from there that it has come", -1);
            if (cell->state == Cell::kWritten && !after_write(*cell, now))
                return wrong("write over what another thread wrote, with no barrier between", cell->writer);
            for (int party = 0; party < kReaders; ++party) {
                if (party == now.warp || cell->read[party] <= now.clock[party]) continue;
                if (party >= kMatrixUnits) return wrong("write under a matrix product that was not waited for", -1);
                return wrong("write over what another warp may still read, with no barrier between", party * 32);
            }
            if (cell->reader >= 0 && cell->reader != now.thread && cell->reader / 32 == now.warp && cell->read_synced == now.synced)
                return wrong("write over what another lane may still read, with no barrier between", cell->reader);
            *cell = Cell{};
            cell->state = in_flight ? Cell::kInFlight : Cell::kWritten;
            stamp(*cell, now);
        }
        return true;
    }
    // An asynchronous copy of thread `now` is complete, as far as that thread can tell.
    void landed(std::uint32_t address, int size, const Moment& now) {
        for (int i = 0; i < size / 4; ++i) {
            cells[address / 4 + i].state = Cell::kWritten;
            stamp(cells[address / 4 + i], now);
        }
    }

    // ---- the asynchronous proxy: tensor copies and matrix products ----

    // What the thread has written so far, the asynchronous proxy sees if it is told after this.
    void fence(const Moment& now) { fences[now.thread].push_back({now.clock[now.warp], now.synced}); }

    // A tensor copy is complete, as far as those can tell that know of `time` of `party`.
    void landed(std::uint32_t address, int size, int party, Clock time) {
        for (int i = 0; i < size / 4; ++i) {
            Cell& cell = cells[address / 4 + i];
            cell.state = Cell::kWritten;
            cell.writer = -1, cell.party = static_cast<std::uint8_t>(party), cell.written = {time, 0};
        }
    }
    // The lanes of a warp issue a product that reads until `time` of the matrix unit `party`.
    bool may_multiply(std::uint32_t address, int size, const Moment& now, int party, Clock time) {
        if (!inside(address, size)) return false;
        for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
            if (!readable(*cell, now) || !fenced(*cell, now)) return false;
            cell->read[party] = time;
        }
        return true;
    }
    // A thread issues a tensor copy to global memory. Once it has waited for it, `stored`.
    bool may_store(std::uint32_t address, int size, const Moment& now) {
        if (!inside(address, size)) return false;
        for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
            if (!readable(*cell, now) || !fenced(*cell, now)) return false;
            ++cell->stores;
        }
        return true;
    }
    void stored(std::uint32_t address, int size, const Moment& now) {
        for (int i = 0; i < size / 4; ++i) {
            --cells[address / 4 + i].stores;
            mark_read(cells[address / 4 + i], now, true);
        }
    }
    // A thread issues a bulk copy to a block of its cluster: it reads until `time` of `party`, an mbarrier of that block, counted from this
    // block's parties on.
    bool may_send(std::uint32_t address, int size, const Moment& now, int party, Clock time) {
        if (!inside(address, size)) return false;
        sent.resize(cells.size());
        for (std::uint32_t i = address / 4; i < (address + size) / 4; ++i) {
            if (!readable(cells[i], now) || !fenced(cells[i], now)) return false;
            sent[i].push_back({party, time});
        }
        return true;
    }
    // An mbarrier takes the place of what was written there.
    void mark_mbarrier(std::uint32_t address) {
        for (int i = 0; i < 2; ++i) cells[address / 4 + i].state = Cell::kMbarrier;
    }
    // `by_copies`: it has to be known to the asynchronous proxy, too.
    bool may_use_mbarrier(std::uint32_t address, const Moment& now, bool by_copies) {
        if (!inside(address, 8)) return false;
        const Cell& cell = cells[address / 4];
        if (cell.state != Cell::kMbarrier) return wrong("use of an mbarrier that was not initialised", -1);
        if (!after_write(cell, now)) {
            return wrong("use of an mbarrier that another thread initialised, with no barrier between", cell.writer);
        }
        return !by_copies || fenced(cell, now);
    }

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
    void stamp(Cell& cell, const Moment& now) const {
        if (now.thread < 0) return;
        cell.writer = static_cast<std::int16_t>(now.thread), cell.party = static_cast<std::uint8_t>(now.warp);
        cell.written = {now.clock[now.warp], now.synced};
        cell.fences = static_cast<std::uint32_t>(fences[now.thread].size());
    }
    static void mark_read(Cell& cell, const Moment& now, bool alone) {
        cell.read[now.warp] = now.clock[now.warp];
        if (alone) cell.reader = static_cast<std::int16_t>(now.thread), cell.read_synced = now.synced;
    }
    // Whether `now` knows of what the cell's writer did at that time.
    static bool after(const Time& time, const Cell& cell, const Moment& now) {
        if (cell.writer >= 0 && cell.writer == now.thread) return true;
        if (cell.party == now.warp) return time.synced < now.synced;
        return time.clock <= now.clock[cell.party];
    }
    // Whether `now` knows that all of these copies have come; then they are forgotten.
    static bool all_seen(std::vector<Reader>& readers, const Moment& now) {
        for (const Reader& reader : readers)
            if (reader.until > now.clock[reader.party]) return false;
        readers.clear();
        return true;
    }
    static bool after_write(const Cell& cell, const Moment& now) { return after(cell.written, cell, now); }
    bool readable(const Cell& cell, const Moment& now) {
        if (cell.state == Cell::kRedZone) return wrong("read of a red zone", -1);
        if (cell.state == Cell::kMbarrier) return wrong("read of an mbarrier", -1);
        if (cell.state == Cell::kUnwritten) return wrong("read of shared memory that nobody wrote", -1);
        if (cell.state == Cell::kInFlight) return wrong("read under an asynchronous copy that was not waited for", cell.writer);
        if (after_write(cell, now)) return true;
        if (cell.writer < 0) return wrong("read of what a tensor copy wrote, with no wait for its mbarrier", -1);
        return wrong("read of what another thread wrote, with no barrier between", cell.writer);
    }
    // What threads wrote, not copies, the asynchronous proxy sees after a fence of the writer that `now` knows of.
    bool fenced(const Cell& cell, const Moment& now) {
        if (cell.writer < 0) return true;
        const std::vector<Time>& executed = fences[cell.writer];
        if (cell.fences < executed.size() && after(executed[cell.fences], cell, now)) return true;
        return wrong("missing proxy fence: asynchronous use of what a thread wrote, with no fence of that thread between", cell.writer);
    }
    bool wrong(const char* what, int thread) {
        fault = what, other = thread;
        return false;
    }
};

}  // namespace emulator
