// NVSHMEM's way to ranks that no pointer reaches, played: what a thread puts lies where it came from until that thread
// asks for it to be there, so that whoever writes over it too early, or signals ahead of it, is found out.
#pragma once
#include <cstring>
#include <vector>

#include "emulator/fibers.h"

namespace distmk {
namespace emulator {

class Network {
 public:
  // Ranks of another node than this one's, of `node_size` each, are reached by it alone.
  Network(const uint64_t* heap_bases, uint32_t rank, uint32_t num_ranks, uint32_t node_size)
      : heap_bases_(heap_bases, heap_bases + num_ranks), near_bases_(heap_bases_), rank_(rank) {
    for (uint32_t other = 0; other < num_ranks; ++other)
      if (other / node_size != rank / node_size) near_bases_[other] = 0, ++num_far_;
  }

  const uint64_t* near_bases() const { return near_bases_.data(); }
  uint32_t num_far() const { return num_far_; }

  // What lies at this rank's `own` address, on another.
  char* there(const void* own, int rank) const {
    return reinterpret_cast<char*>(reinterpret_cast<uint64_t>(own) - heap_bases_[rank_] + heap_bases_[rank]);
  }
  void put(void* dst, const void* src, size_t num_bytes, int rank) {
    const Unwatched unwatched;
    waiting_.push_back({&current(), there(dst, rank), static_cast<const char*>(src), num_bytes});
  }
  // All that this thread has put.
  void bring() {
    for (const Put& put : take()) memcpy(put.dst, put.src, put.num_bytes);
  }

 private:
  struct Put {
    const Fiber* by;
    char* dst;
    const char* src;
    size_t num_bytes;
  };
  std::vector<uint64_t> heap_bases_, near_bases_;
  uint32_t rank_, num_far_ = 0;
  std::vector<Put> waiting_;

  std::vector<Put> take() {
    const Unwatched unwatched;
    std::vector<Put> own;
    std::erase_if(waiting_, [&own](const Put& put) {
      const bool is_own = put.by == &current();
      if (is_own) own.push_back(put);
      return is_own;
    });
    return own;
  }
};

// Of the rank that this thread of the CPU plays.
inline thread_local Network* network = nullptr;

}  // namespace emulator
}  // namespace distmk
