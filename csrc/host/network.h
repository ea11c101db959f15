// The network between ranks of different hosts: a connection to each peer, and a thread that applies what arrives.
//
// Why sockets and not UCX: UCX's TCP transport listens without authentication. Whoever sends it the right magic number
// can have it copy bytes to any address of the process (uct/tcp/tcp_ep.c, uct_tcp_ep_handle_put_req). A stranger must
// not write to a heap. Sockets that distmk/bootstrap has authenticated do what UCX would do here in a hundred lines,
// and check every offset against the heap. The wheel (libucx-cu12) takes 152 MB, and TCP between hosts needs little of
// it.
#pragma once
#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "host/connection.h"

namespace distmk {

// A network lives as long as the heap, over many launches. A frame of one launch never arrives in the next one. Between
// the two barriers that precede a launch, every rank sends a fence, and zeroes its heap only when the fences of all
// peers have arrived.
//
// The receiver sleeps in poll() and costs nothing while nothing arrives. If a connection ends or a frame is malformed,
// it raises this rank's abort flag (RANK_LOST); `end_of` says why.
class Network {
 public:
  // `heap`: this rank's heap. `sockets`: by rank, -1 for none; the network takes them over.
  Network(char* heap, const ProgramHeader& program, const std::vector<int>& sockets);
  ~Network();  // tells the peers that this rank leaves in order

  // Null if a pointer reaches `rank`.
  Connection* connection(uint32_t rank) const { return connections_[rank].get(); }
  uint32_t num_ranks() const { return static_cast<uint32_t>(connections_.size()); }
  Connection::End end_of(uint32_t rank) const;

  // Sets this rank's abort flag if a connection is over already. Called at the start of a launch.
  void check_connections();
  // Sets the abort flag of every rank that has a connection.
  void abort(uint64_t reason);

  // Sends a fence to every peer. reached_fence() returns whether the fences of all peers that are still there arrive
  // within `timeout_ns`.
  void send_fence();
  bool reached_fence(uint64_t timeout_ns);

  // Waits until the peer has acknowledged `number` parcels, the connection is over, or `go_on` gives up. Polls
  // `num_polls` times before it sleeps.
  void wait_for(const Connection& connection, uint64_t number, uint32_t num_polls, const GoOn& go_on);

 private:
  // Bytes that one connection has received and that are not applied yet.
  struct Inbox {
    std::array<char, wire::MAX_FRAME_BYTES> bytes;
    size_t num_bytes = 0;
    uint64_t num_applied = 0;  // parcels
    bool is_over = false;
  };

  char* const heap_;
  const uint64_t heap_bytes_, events_offset_;
  const uint32_t num_events_;
  const int wake_fd_;
  std::vector<std::unique_ptr<Connection>> connections_;  // by rank
  std::vector<std::unique_ptr<Inbox>> inboxes_;           // by rank
  uint64_t num_fences_ = 0;
  std::atomic<bool> closing_{false};
  std::atomic<uint32_t> num_waiting_{0};
  std::mutex mutex_;  // for changed_
  std::condition_variable changed_;
  std::thread receiver_;

  void wake() const;
  void raise(Abort reason);
  template <class Met>
  void wait_until(const Met& met, const GoOn& go_on);

  // Run by the receiver thread.
  void receive();
  void read(Connection& connection, Inbox& inbox);
  bool apply_all(Connection& connection, Inbox& inbox);
  bool apply(Connection& connection, Inbox& inbox, const wire::Header& header, const char* body);
  bool apply_parcel(const wire::Header& header, const char* body);
  void lose(Connection& connection, Inbox& inbox, Connection::End reason);
  void notify();
};

}  // namespace distmk
