// Exchange of registers between the lanes of a warp.

namespace host {

struct ShflOperand {
    float value, result;
    int lane_mask;
};

}  // namespace host

inline float shfl_sync_bfly(float value, int lane_mask) {
    host::ShflOperand own{value, 0.0f, lane_mask};
    host::current->meet("shfl_sync_bfly", own, [](host::ShflOperand** lanes) {
        for (int lane = 0; lane < host::kLanes; ++lane) lanes[lane]->result = lanes[lane ^ lanes[lane]->lane_mask]->value;
    });
    return own.result;
}
