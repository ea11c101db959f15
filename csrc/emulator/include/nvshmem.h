// The part of NVSHMEM that the kernel calls, over the emulated network.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "emulator/network.h"

inline distmk::emulator::Network& the_network() {
  if (!distmk::emulator::network) abort();  // every rank is peer-mapped
  return *distmk::emulator::network;
}

constexpr int NVSHMEM_SIGNAL_SET = 0, NVSHMEM_SIGNAL_ADD = 1;
inline void nvshmem_putmem_nbi(void* dst, const void* src, size_t num_bytes, int rank) {
  the_network().put(dst, src, num_bytes, rank);
}
inline void nvshmem_fence() { the_network().fence(); }
inline void nvshmem_quiet() { the_network().quiet(); }
inline void nvshmemx_signal_op(uint64_t* word, uint64_t value, int how, int rank) {
  the_network().signal(word, rank, [=](uint64_t* remote) {
    if (how == NVSHMEM_SIGNAL_ADD)
      __atomic_fetch_add(remote, value, __ATOMIC_RELEASE);
    else
      __atomic_store_n(remote, value, __ATOMIC_RELEASE);
  });
}
