// The emulated network under NVSHMEM. It reads the source of a put as late as NVSHMEM allows: at the thread's next
// quiet or at every other fence. This finds sources that are overwritten too early.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "emulator/fibers.h"

namespace distmk {
namespace emulator {

class Network {
 public:
  // Ranks on other nodes than this rank's are not peer-mapped. A node has `node_size` ranks.
  Network(const uint64_t* heap_bases, uint32_t rank, uint32_t num_ranks, uint32_t node_size)
      : heap_bases_(heap_bases, heap_bases + num_ranks), mapped_bases_(heap_bases_), rank_(rank) {
    for (uint32_t other = 0; other < num_ranks; ++other)
      if (other / node_size != rank / node_size) mapped_bases_[other] = 0, ++num_remote_;
  }

  const uint64_t* mapped_bases() const { return mapped_bases_.data(); }
  uint32_t num_remote_ranks() const { return num_remote_; }

  void put(void* own, const void* src, size_t num_bytes, int rank) {
    const Unwatched unwatched;
    char* dst = address_on(own, rank);
    sent_.push_back({&current(), false, [=] { memcpy(dst, src, num_bytes); }});
  }
  // Arrives after everything that was put before the last fence, and perhaps before later puts.
  void signal(uint64_t* own, int rank, const std::function<void(uint64_t*)>& change) {
    auto* word = reinterpret_cast<uint64_t*>(address_on(own, rank));
    if (!has_fenced()) return change(word);
    const Unwatched unwatched;
    sent_.push_back({&current(), true, [=] { change(word); }});
  }
  void fence() {
    if (is_late()) {
      const Unwatched unwatched;
      for (Sent& each : sent_) each.fenced |= each.by == &current();
    } else {
      quiet();
    }
  }
  void quiet() {
    for (const Sent& each : take()) each.arrive();
  }

 private:
  struct Sent {
    const Fiber* by;
    bool fenced;
    std::function<void()> arrive;
  };
  std::vector<uint64_t> heap_bases_, mapped_bases_;
  uint32_t rank_, num_remote_ = 0, num_fences_ = 0;
  std::vector<Sent> sent_;

  // The address on another rank that corresponds to `own` on this one.
  char* address_on(const void* own, int rank) const {
    return reinterpret_cast<char*>(reinterpret_cast<uint64_t>(own) - heap_bases_[rank_] + heap_bases_[rank]);
  }
  bool is_late() {
    const Unwatched unwatched;
    return ++num_fences_ % 2 == 0;
  }
  bool has_fenced() const {
    const Unwatched unwatched;
    return std::any_of(sent_.begin(), sent_.end(),
                       [](const Sent& each) { return each.by == &current() && each.fenced; });
  }
  std::vector<Sent> take() {
    const Unwatched unwatched;
    std::vector<Sent> own;
    std::erase_if(sent_, [&own](const Sent& each) {
      const bool is_own = each.by == &current();
      if (is_own) own.push_back(each);
      return is_own;
    });
    return own;
  }
};

// The network of the rank that this CPU thread emulates.
inline thread_local Network* network = nullptr;

}  // namespace emulator
}  // namespace distmk
