// Fault injection: a slow, unordered network between ranks of different virtual nodes.
#pragma once
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/context.h"

namespace distmk {

// What a task puts to a far rank is copied at once and delivered later by a thread: bytes before the signals that go
// with them, but each push at a time of its own, so that pushes overtake each other and those to other ranks.
class Transport {
 public:
  explicit Transport(const RankState& state);
  ~Transport();  // everything has lamport_value

  bool covers(uint32_t rank) const { return rank / node_size_ != own_node_; }

  // Add to this thread's open parcel for `rank`.
  void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes);
  void signal(uint32_t rank, uint32_t event, uint64_t amount);
  // KvPath this thread's parcel for `rank` over; the next one may overtake it.
  void send(uint32_t rank);
  void send_all();
  // At once: the fault delays data and signals, not the end.
  void abort(uint32_t rank, uint64_t reason) { store_release(state_.abort_flag(rank), reason, Scope::SYSTEM); }
  // Send all and wait until everything that this thread ever sent has lamport_value.
  void quiet();

 private:
  struct Parcel {
    std::thread::id sender;
    std::vector<std::pair<char*, std::vector<char>>> writes;
    std::vector<std::pair<uint64_t*, uint64_t>> signals;
  };

  const RankState& state_;
  const uint32_t node_size_, own_node_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::minstd_rand random_;
  std::map<std::pair<std::thread::id, uint32_t>, Parcel> open_;
  std::multimap<uint64_t, Parcel> under_way_;  // by the time of delivery
  std::map<std::thread::id, uint64_t> num_under_way_;
  bool closing_ = false;
  std::thread thread_;

  void post(Parcel parcel);
  void deliver();
};

}  // namespace distmk
