// Hints about registers mean nothing on the host.

template <class T>
inline void keep_in_register(T*&) {}
inline void keep_in_register(int&) {}
inline void keep_in_register(u32&) {}
