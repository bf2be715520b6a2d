// How shared memory in the emulator and its shadow decide whether an access is one that a GPU would guarantee: see emulator/shared.cuh.

namespace emulator {

Clocks::Clocks(int blocks) : times(blocks * kParties) {}

void Clocks::clear() { std::fill(times.begin(), times.end(), Clock{0}); }

void Clocks::join(const Clocks& other) {
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], other.times[i]);
}

void Clocks::join_performed(const Clocks& other, int rank, int warp, Clock now) {
    for (std::size_t i = 0; i < times.size(); ++i)
        if (i % kParties >= kMatrixUnits) times[i] = std::max(times[i], other.times[i]);
    for (int w = 0; w < kMaxWarps; ++w) {
        const Clock known = w == warp ? now - 1 : other.of(rank)[w];
        of(rank)[w] = std::max(of(rank)[w], known);
    }
}

Shared::Shared(int given)
    : given(given), bytes((given + kMaxRegions * kRedZone + 15) / 16 * 16), cells(bytes.size() / 4),
      read(cells.size() * kReaders), fences(kMaxWarps * 32) {}

void Shared::clear() {
    std::fill(bytes.begin(), bytes.end(), static_cast<unsigned char>(0xff));
    std::fill(cells.begin(), cells.end(), Cell{});
    for (std::vector<Time>& of_thread : fences) of_thread.clear();
    taken.clear(), sent.clear();
    claimed = 0, end = given;
}

int Shared::regions() const { return static_cast<int>(taken.size()); }

bool Shared::claim(int number, std::uint32_t address, int size) {
    if (number < regions()) return taken[number].address == address && taken[number].bytes == size;
    taken.push_back({address, size});
    claimed += size;
    for (int i = 0; i < kRedZone / 4; ++i) cells[(address + size) / 4 + i].state = Cell::kRedZone;
    end = address + size + kRedZone;
    return true;
}

bool Shared::inside(std::uint32_t address, int size) {
    if (address % size) return wrong("misaligned shared access", -1);
    if (address + size > end) return wrong("shared access outside of the block's memory", -1);
    return true;
}

bool Shared::may_read(std::uint32_t address, int size, const Moment& now, bool alone) {
    if (!inside(address, size)) return false;
    for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
        if (!readable(*cell, now)) return false;
        mark_read(*cell, now, alone);
    }
    return true;
}

bool Shared::may_write(std::uint32_t address, int size, const Moment& now, bool in_flight) {
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
        for (std::uint64_t left = cell->readers; left; left &= left - 1) {
            const int party = __builtin_ctzll(left);
            if (party == now.warp || last_read(*cell, party) <= now.clock[party]) continue;
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

void Shared::landed(std::uint32_t address, int size, const Moment& now) {
    for (int i = 0; i < size / 4; ++i) {
        cells[address / 4 + i].state = Cell::kWritten;
        stamp(cells[address / 4 + i], now);
    }
}

void Shared::fence(const Moment& now) { fences[now.thread].push_back({now.clock[now.warp], now.synced}); }

void Shared::landed(std::uint32_t address, int size, int party, Clock time) {
    for (int i = 0; i < size / 4; ++i) {
        Cell& cell = cells[address / 4 + i];
        cell.state = Cell::kWritten;
        cell.writer = -1, cell.party = static_cast<std::uint8_t>(party), cell.written = {time, 0};
    }
}

bool Shared::may_multiply(std::uint32_t address, int size, const Moment& now, int party, Clock time) {
    if (!inside(address, size)) return false;
    for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
        if (!readable(*cell, now) || !fenced(*cell, now)) return false;
        mark_reader(*cell, party, time);
    }
    return true;
}

bool Shared::may_store(std::uint32_t address, int size, const Moment& now) {
    if (!inside(address, size)) return false;
    for (Cell* cell = &cells[address / 4]; cell < &cells[address / 4] + size / 4; ++cell) {
        if (!readable(*cell, now) || !fenced(*cell, now)) return false;
        ++cell->stores;
    }
    return true;
}

void Shared::stored(std::uint32_t address, int size, const Moment& now) {
    for (int i = 0; i < size / 4; ++i) {
        --cells[address / 4 + i].stores;
        mark_read(cells[address / 4 + i], now, true);
    }
}

bool Shared::may_send(std::uint32_t address, int size, const Moment& now, int party, Clock time) {
    if (!inside(address, size)) return false;
    sent.resize(cells.size());
    for (std::uint32_t i = address / 4; i < (address + size) / 4; ++i) {
        if (!readable(cells[i], now) || !fenced(cells[i], now)) return false;
        sent[i].push_back({party, time});
    }
    return true;
}

void Shared::mark_mbarrier(std::uint32_t address) {
    for (int i = 0; i < 2; ++i) cells[address / 4 + i].state = Cell::kMbarrier;
}

bool Shared::may_use_mbarrier(std::uint32_t address, const Moment& now, bool by_copies) {
    if (!inside(address, 8)) return false;
    const Cell& cell = cells[address / 4];
    if (cell.state != Cell::kMbarrier) return wrong("use of an mbarrier that was not initialised", -1);
    if (!after_write(cell, now)) {
        return wrong("use of an mbarrier that another thread initialised, with no barrier between", cell.writer);
    }
    return !by_copies || fenced(cell, now);
}

void Shared::stamp(Cell& cell, const Moment& now) const {
    if (now.thread < 0) return;
    cell.writer = static_cast<std::int16_t>(now.thread), cell.party = static_cast<std::uint8_t>(now.warp);
    cell.written = {now.clock[now.warp], now.synced};
    cell.fences = static_cast<std::uint32_t>(fences[now.thread].size());
}

void Shared::mark_read(Cell& cell, const Moment& now, bool alone) {
    mark_reader(cell, now.warp, now.clock[now.warp]);
    if (alone) cell.reader = static_cast<std::int16_t>(now.thread), cell.read_synced = now.synced;
}

bool Shared::after(const Time& time, const Cell& cell, const Moment& now) {
    if (cell.writer >= 0 && cell.writer == now.thread) return true;
    if (cell.party == now.warp) return time.synced < now.synced;
    return time.clock <= now.clock[cell.party];
}

bool Shared::all_seen(std::vector<Reader>& readers, const Moment& now) {
    for (const Reader& reader : readers)
        if (reader.until > now.clock[reader.party]) return false;
    readers.clear();
    return true;
}

bool Shared::after_write(const Cell& cell, const Moment& now) { return after(cell.written, cell, now); }

bool Shared::readable(const Cell& cell, const Moment& now) {
    if (cell.state == Cell::kRedZone) return wrong("read of a red zone", -1);
    if (cell.state == Cell::kMbarrier) return wrong("read of an mbarrier", -1);
    if (cell.state == Cell::kUnwritten) return wrong("read of shared memory that nobody wrote", -1);
    if (cell.state == Cell::kInFlight) return wrong("read under an asynchronous copy that was not waited for", cell.writer);
    if (after_write(cell, now)) return true;
    if (cell.writer < 0) return wrong("read of what a tensor copy wrote, with no wait for its mbarrier", -1);
    return wrong("read of what another thread wrote, with no barrier between", cell.writer);
}

bool Shared::fenced(const Cell& cell, const Moment& now) {
    if (cell.writer < 0) return true;
    const std::vector<Time>& executed = fences[cell.writer];
    if (cell.fences < executed.size() && after(executed[cell.fences], cell, now)) return true;
    return wrong("missing proxy fence: asynchronous use of what a thread wrote, with no fence of that thread between", cell.writer);
}

bool Shared::wrong(const char* what, int thread) {
    fault = what, other = thread;
    return false;
}

}  // namespace emulator
