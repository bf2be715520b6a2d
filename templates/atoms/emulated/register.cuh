// Hints about registers mean nothing in the emulator.

template <class T>
inline void keep_in_register(T*&) {}
inline void keep_in_register(int&) {}
inline void keep_in_register(u32&) {}
template <class T, int kTiles>
inline void keep_in_registers(T (&)[kTiles][4]) {}
