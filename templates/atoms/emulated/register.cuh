// Hints about registers mean nothing in the emulator.

template <class T>
inline void launder(T*&) {}
inline void launder(int&) {}
inline void launder(u32&) {}
inline void compute_here(float&) {}
template <class T, int kTiles>
inline void launder(T (&)[kTiles][4]) {}
