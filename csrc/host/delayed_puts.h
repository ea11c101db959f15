// Fault injection: makes the network between ranks of different virtual nodes slow and unordered.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "host/transport.h"

namespace distmk {

// The data of a put to a remote rank is copied at once, and a thread delivers it later. Within a parcel, data arrives
// before the signals that are sent with it. Each parcel has a random delay of its own, so parcels overtake each other.
class DelayedPuts : public Transport {
 public:
  // `network` takes the parcels for ranks that no pointer reaches, once their delay is over. It is null if there are no
  // such ranks.
  DelayedPuts(const RankState& state, std::unique_ptr<Transport> network);
  ~DelayedPuts() override;  // delivers what is in flight

  bool covers(uint32_t rank) const override { return rank / node_size_ != own_node_ || is_far(rank); }

  void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) override;
  void signal(uint32_t rank, uint32_t event, uint64_t amount) override;
  void send(uint32_t rank) override;
  void send_all() override;
  void quiet() override;
  // Not delayed: the fault is about data and signals, not about the end of the launch.
  void abort(uint32_t rank, uint64_t reason) override {
    if (is_far(rank)) return network_->abort(rank, reason);
    store_release(state_.abort_flag(rank), reason, Scope::SYSTEM);
  }

 private:
  struct Parcel {
    std::thread::id sender;
    uint32_t rank;
    std::vector<std::pair<uint64_t, std::vector<char>>> writes;  // heap offset, data
    std::vector<std::pair<uint32_t, uint64_t>> signals;          // event, amount
  };

  const RankState& state_;
  const std::unique_ptr<Transport> network_;
  const uint32_t node_size_, own_node_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::minstd_rand random_;
  std::map<std::pair<std::thread::id, uint32_t>, Parcel> open_;
  std::multimap<uint64_t, Parcel> in_flight_;          // by time of delivery in ns
  std::map<std::thread::id, uint64_t> num_in_flight_;  // by sender
  bool closing_ = false;
  std::thread thread_;

  bool is_far(uint32_t rank) const { return network_ && network_->covers(rank); }
  void post(uint32_t rank, Parcel parcel);
  void run();
  void deliver(const Parcel& parcel);
};

}  // namespace distmk
