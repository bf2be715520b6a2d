// Launches that overlap: see atoms/ptx/griddepcontrol.cuh. The emulator begins blocks of the launch that depends on this one whenever it
// likes, before the first block of this one, too: whoever is right then is right wherever launch_dependents stands.

inline void griddepcontrol_launch_dependents() {}

inline void griddepcontrol_wait() { emulator::current->wait_for_launch("griddepcontrol_wait"); }
