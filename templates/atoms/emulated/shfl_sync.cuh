// Exchange of registers between the lanes of a warp.

namespace emulator {

template <class T>
struct ShflOperand {
    T value, result;
    int lane;  // whose value is wanted
};

template <class T>
inline T shfl_sync(const char* name, T value, int lane) {
    ShflOperand<T> own{value, T{}, lane};
    current->meet(name, own, [](ShflOperand<T>** lanes) {
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane]->result = lanes[lanes[lane]->lane]->value;
    });
    return own.result;
}
inline int own_lane() { return current->running % kLanes; }

}  // namespace emulator

inline float shfl_sync_bfly(float value, int lane_mask) {
    return emulator::shfl_sync("shfl_sync_bfly", value, emulator::own_lane() ^ lane_mask);
}

inline u32 shfl_sync_bfly(u32 value, int lane_mask) {
    return emulator::shfl_sync("shfl_sync_bfly", value, emulator::own_lane() ^ lane_mask);
}

inline int shfl_sync_first(int value) { return emulator::shfl_sync("shfl_sync_first", value, 0); }

inline float shfl_sync_idx(float value, int lane) { return emulator::shfl_sync("shfl_sync_idx", value, lane); }
