// The network between ranks of different hosts: two stream sockets to each of them, opened and authenticated by Python
// (distmk/bootstrap/pairs.py), one for data and one for control.
//
// A worker writes a parcel to the data socket itself; a thread for each far rank, asleep while nothing arrives, applies
// the parcels that come from there in order, data before signals, and acknowledges them on the control socket. This is
// free of deadlock: receiving threads never write data, so that they always drain it, and the acknowledgements that can
// be outstanding, some for each thread of a rank since quiet() waits for them, fit into a socket's buffer.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "host/transport.h"

namespace distmk {

// Memory that far ranks may write to.
struct ExposedHeap {
  char* base;
  uint64_t num_bytes;
  uint64_t events_offset;
  uint32_t num_events;

  bool holds(uint64_t offset, uint64_t bytes) const { return offset <= num_bytes && bytes <= num_bytes - offset; }
  uint64_t* event(uint32_t index) const {
    return reinterpret_cast<uint64_t*>(base + events_offset + uint64_t{index} * EVENT_STRIDE_BYTES);
  }
  Control* control() const { return reinterpret_cast<Control*>(base); }
};

struct Parcel {
  struct Write {
    uint64_t heap_offset, num_bytes;
  };
  struct Signal {
    uint64_t event, amount;
  };
  std::vector<Write> writes;
  std::vector<const void*> sources;  // of the writes
  std::vector<Signal> signals;
};

// The connection to one far rank.
class Peer {
 public:
  // Takes over both sockets.
  Peer(const ExposedHeap& heap, int data, int control);
  ~Peer();

  // Frames of earlier launches are dropped from now on, and none is being applied when this returns.
  void begin_launch(uint64_t launch);
  // Returns the number of the parcel in this launch, for wait_delivered().
  uint64_t send(const Parcel& parcel);
  // Waits until a parcel is applied. False: that rank is lost, the launch is given up, or `deadline_ns` is over.
  bool wait_delivered(uint64_t parcel, uint64_t deadline_ns);
  void send_abort(uint64_t reason);
  bool is_lost() const { return lost_.load(std::memory_order_acquire); }

 private:
  struct Frame;
  const ExposedHeap heap_;
  const int data_, control_;
  std::mutex data_mutex_, control_mutex_;  // of writers
  std::mutex state_mutex_;                 // of the following; held while a frame is applied
  std::condition_variable changed_;
  uint64_t launch_ = 0, num_sent_ = 0, num_delivered_ = 0, num_applied_ = 0;
  std::atomic<bool> lost_{false}, closing_{false};
  std::vector<char> body_;
  std::thread receiver_;

  void receive();
  bool receive_data();
  bool receive_control();
  bool apply(const Frame& frame);
  void send_control(uint32_t kind, uint64_t value);
  void lose();
};

// The connections of a rank; they outlive launches.
class Network {
 public:
  // `sockets[2 * rank]` and the next one: data and control of a far rank, -1 where there is none.
  Network(const ExposedHeap& heap, uint32_t num_ranks, const int* sockets);

  Peer* peer(uint32_t rank) const { return peers_[rank].get(); }
  uint32_t num_ranks() const { return static_cast<uint32_t>(peers_.size()); }
  void begin_launch();

 private:
  uint64_t launch_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;
};

// A launch's use of the network.
class NetworkTransport : public Transport {
 public:
  NetworkTransport(const RankState& state, Network& network) : state_(state), network_(network) {}

  bool covers(uint32_t rank) const override { return network_.peer(rank) != nullptr; }
  void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) override;
  void signal(uint32_t rank, uint32_t event, uint64_t amount) override;
  void send(uint32_t rank) override;
  void send_all() override;
  void quiet() override;
  void abort(uint32_t rank, uint64_t reason) override { network_.peer(rank)->send_abort(reason); }

 private:
  using Key = std::pair<std::thread::id, uint32_t>;  // thread and rank
  const RankState& state_;
  Network& network_;
  std::mutex mutex_;
  std::map<Key, Parcel> open_;
  std::map<Key, uint64_t> undelivered_;  // number of the last parcel that may not be applied yet

  void dispatch(const Key& key, const Parcel& parcel);
};

}  // namespace distmk
