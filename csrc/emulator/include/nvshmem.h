// Every rank is in reach of a pointer here: what goes by the network is never called.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

constexpr int NVSHMEM_SIGNAL_ADD = 0;
inline void nvshmem_putmem_nbi(void*, const void*, size_t, int) { abort(); }
inline void nvshmem_fence() { abort(); }
inline void nvshmem_quiet() { abort(); }
inline void nvshmemx_signal_op(uint64_t*, uint64_t, int, int) { abort(); }
