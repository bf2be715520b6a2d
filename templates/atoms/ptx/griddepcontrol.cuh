// Launches that overlap: one that depends on the launch before it may begin while that is under way. PTX ISA, "griddepcontrol" (sm_90).

// The launch that depends on this one may begin once all blocks have called this or ended. It says nothing of what they have written.
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns once the launch before has ended, and all that it wrote is there; at once where the two do not overlap.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
