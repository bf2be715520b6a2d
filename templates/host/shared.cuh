// Shared memory on the host, with a shadow: for every 4 bytes, the smallest access there is, who wrote them and who has read them since. Each
// access says whether it is one that a GPU would guarantee. Order between warps is by vector clocks (Fidge 1988), order
// between the lanes of a warp by how often they have met.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace host {

constexpr int kMaxWarps = 32;
using Clock = std::uint32_t;

// A thread at one moment, as far as order in memory goes.
struct Moment {
    int thread, warp;
    const Clock* clock;  // of its warp
    Clock synced;
};

struct Cell {
    enum State : std::uint8_t { kUnwritten, kWritten, kInFlight, kRedZone };
    State state = kUnwritten;
    std::int16_t writer = -1, reader = -1;  // threads; the reader is the last one that read alone, not as a warp
    Clock written = 0, written_synced = 0, read_synced = 0;
    Clock read[kMaxWarps] = {};  // when each warp has last read it, 0 if not since it was written
};

struct Shared {
    std::vector<unsigned char> bytes;
    std::vector<Cell> cells;
    const char* fault = nullptr;  // the check that the last access failed, with the other thread
    int other = -1;

    explicit Shared(int size) : bytes((size + 15) / 16 * 16), cells(bytes.size() / 4) {}

    // Every block begins with bytes that nobody wrote; they hold NaN as fp32, fp16 and bf16.
    void clear() {
        std::fill(bytes.begin(), bytes.end(), static_cast<unsigned char>(0xff));
        std::fill(cells.begin(), cells.end(), Cell{});
    }

    bool inside(std::uint32_t address, int size) {
        if (address % size) return wrong("misaligned shared access", -1);
        if (address + size > bytes.size()) return wrong("shared access outside of the block's memory", -1);
        return true;
    }
    // `alone`: a lane's own load; else a warp's, which is over when its lanes go on.
    bool may_read(std::uint32_t address, int size, const Moment& now, bool alone) {
        if (!inside(address, size)) return false;
        for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
            if (cell->state == Cell::kRedZone) return wrong("read of a red zone", -1);
            if (cell->state == Cell::kUnwritten) return wrong("read of shared memory that nobody wrote", -1);
            if (cell->state == Cell::kInFlight) return wrong("read under an asynchronous copy that was not waited for", cell->writer);
            if (!ordered_after_write(*cell, now)) return wrong("read of what another thread wrote, with no barrier between", cell->writer);
            cell->read[now.warp] = now.clock[now.warp];
            if (alone) cell->reader = static_cast<std::int16_t>(now.thread), cell->read_synced = now.synced;
        }
        return true;
    }
    bool may_write(std::uint32_t address, int size, const Moment& now, bool in_flight) {
        if (!inside(address, size)) return false;
        for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
            if (cell->state == Cell::kRedZone) return wrong("write to a red zone", -1);
            if (cell->state == Cell::kInFlight) return wrong("write under an asynchronous copy", cell->writer);
            if (cell->state == Cell::kWritten && !ordered_after_write(*cell, now))
                return wrong("write over what another thread wrote, with no barrier between", cell->writer);
            for (int warp = 0; warp < kMaxWarps; ++warp)
                if (warp != now.warp && cell->read[warp] > now.clock[warp])
                    return wrong("write over what another warp may still read, with no barrier between", warp * 32);
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
    void mark_red_zone(std::uint32_t address, int size) {
        for (int i = 0; i < size / 4; ++i) cells[address / 4 + i].state = Cell::kRedZone;
    }

  private:
    static void stamp(Cell& cell, const Moment& now) {
        cell.writer = static_cast<std::int16_t>(now.thread), cell.written = now.clock[now.warp], cell.written_synced = now.synced;
    }
    static bool ordered_after_write(const Cell& cell, const Moment& now) {
        if (cell.writer == now.thread) return true;
        if (cell.writer / 32 == now.warp) return cell.written_synced < now.synced;
        return cell.written <= now.clock[cell.writer / 32];
    }
    bool wrong(const char* what, int thread) {
        fault = what, other = thread;
        return false;
    }
};

}  // namespace host
