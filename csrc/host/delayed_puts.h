// A transport for fault injection: a slow, unordered network between ranks of different virtual nodes that share
// memory.
#pragma once
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "host/transport.h"

namespace distmk {

// The data that a task puts to a remote rank is copied at once, and a thread delivers it later: data before the signals
// that are sent with it, but every parcel after its own random delay, so that parcels overtake each other.
class DelayedPuts : public Transport {
 public:
  explicit DelayedPuts(const RankState& state);
  ~DelayedPuts() override;  // delivers what is in flight

  bool covers(uint32_t rank) const override { return rank / node_size_ != own_node_; }
  void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) override;
  void signal(uint32_t rank, uint32_t event, uint64_t amount) override;
  void send(uint32_t rank) override;  // the next parcel may overtake this one
  void send_all() override;
  void quiet() override;
  // Not delayed: the fault is about data and signals, not about the end of the launch.
  void abort(uint32_t rank, uint64_t reason) override { store_release(state_.abort_flag(rank), reason, Scope::SYSTEM); }

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
  std::multimap<uint64_t, Parcel> in_flight_;          // by time of delivery, in ns
  std::map<std::thread::id, uint64_t> num_in_flight_;  // by sender
  bool closing_ = false;
  std::thread thread_;

  void post(Parcel parcel);
  void deliver();
};

}  // namespace distmk
