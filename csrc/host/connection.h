// One end of the connection to a rank of another host: whole frames are written to its socket, by any thread.
#pragma once
#include <sys/uio.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "host/wire.h"

namespace distmk {

// Asked from time to time by a thread that waits for the network; false: give up.
using GoOn = std::function<bool()>;

// Writing is free of deadlock. A worker that waits for room in the socket holds the mutex; the peer's receiver makes
// the room, as it reads whatever has arrived and never waits: neither for a mutex (it tries) nor for room in its own
// socket (what does not fit goes to the tail, which is written when there is room).
class Connection {
 public:
  // Why a connection is over. The first reason counts.
  enum class End : uint32_t { NONE, LEFT, CLOSED, NO_ANSWER, MALFORMED };

  // Takes over the socket. `wake` is called when the receiver is to look at `wants_to_write`.
  Connection(uint32_t rank, int fd, std::function<void()> wake);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const uint32_t rank;
  const int fd;

  // Sends a frame; returns the number of parcels sent so far. If `go_on` gives up, or the connection is over, the rest
  // of the frame is kept and sent when there is room, or dropped.
  uint64_t send_parcel(iovec* parts, size_t num_parts, const GoOn& go_on);
  // Sends a frame without data; does not wait.
  void send_control(wire::Type type, uint64_t value);

  // The receiver has applied so many parcels: tell the peer, now or as soon as the socket has room.
  void acknowledge(uint64_t num_applied);
  // Whether something waits for room in the socket; write_pending() writes what fits.
  bool wants_to_write() const { return has_tail_.load(std::memory_order_acquire); }
  bool owes_acknowledgement() const { return ack_due_.load() != ack_sent_.load(); }
  void write_pending();

  // Parcels of this rank that the peer has applied. False: the peer counts wrong.
  bool set_acknowledged(uint64_t num_applied);
  uint64_t acknowledged() const { return acknowledged_.load(); }
  uint64_t fences() const { return fences_.load(); }
  void count_fence() { fences_.fetch_add(1); }

  End end() const { return end_.load(); }
  // Ends the connection for both sides; the receiver then finds its end.
  void set_end(End reason);

 private:
  const std::function<void()> wake_;
  std::mutex mutex_;                   // of whoever writes
  std::string tail_;                   // the rest of frames that did not fit
  std::atomic<uint64_t> num_sent_{0};  // parcels, counted before they are written
  std::atomic<uint64_t> ack_due_{0}, ack_sent_{0}, acknowledged_{0}, fences_{0};
  std::atomic<bool> has_tail_{false};
  std::atomic<End> end_{End::NONE};

  // All need the mutex. write(): false if the socket is full.
  bool write(iovec*& parts, size_t& num_parts);
  bool write_tail();
  bool write_due();
  void append_to_tail(const iovec* parts, size_t num_parts);
  bool wait_for_room(const GoOn& go_on);
  void settle();
};

}  // namespace distmk
