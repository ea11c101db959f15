// One end of the connection to a rank on another host. Any thread may write whole frames to its socket.
#pragma once
#include <sys/uio.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "host/wire.h"

namespace distmk {

// A thread that waits for the network calls this from time to time. False means: give up.
using GoOn = std::function<bool()>;

// Writing cannot deadlock. A worker that waits for room in the socket holds the mutex. The peer's receiver makes that
// room, because it reads whatever has arrived and never waits. It only tries to take a mutex, and what does not fit
// into its own socket goes to the tail, which is written when there is room.
class Connection {
 public:
  // Why a connection is over. The first reason stays.
  enum class End : uint32_t { NONE, LEFT, CLOSED, NO_ANSWER, MALFORMED };

  // Takes over the socket. `wake` is called when the receiver should look at `wants_to_write`.
  Connection(uint32_t rank, int fd, std::function<void()> wake);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const uint32_t rank;
  const int fd;

  // Sends a frame and returns the number of parcels sent so far. If `go_on` gives up, the rest of the frame is kept and
  // sent when there is room. If the connection is over, the rest is dropped.
  uint64_t send_parcel(iovec* parts, size_t num_parts, const GoOn& go_on);
  // Sends a frame without data; does not wait.
  void send_control(wire::Type type, uint64_t value);

  // Tells the peer that the receiver has applied `num_applied` parcels, now or as soon as the socket has room.
  void acknowledge(uint64_t num_applied);
  // Whether some frame waits for room in the socket; write_pending() writes what fits.
  bool wants_to_write() const { return has_tail_.load(std::memory_order_acquire); }
  bool owes_acknowledgement() const { return ack_due_.load() != ack_sent_.load(); }
  void write_pending();

  // Stores how many parcels of this rank the peer has applied. Returns false if that number is impossible.
  bool set_acknowledged(uint64_t num_applied);
  uint64_t acknowledged() const { return acknowledged_.load(); }
  uint64_t fences() const { return fences_.load(); }
  void count_fence() { fences_.fetch_add(1); }

  End end() const { return end_.load(); }
  // Ends the connection in both directions. The receiver then finds its end.
  void set_end(End reason);

 private:
  const std::function<void()> wake_;
  std::mutex mutex_;                   // held by the thread that writes
  std::string tail_;                   // the rest of frames that did not fit
  std::atomic<uint64_t> num_sent_{0};  // parcels, counted before they are written
  std::atomic<uint64_t> ack_due_{0}, ack_sent_{0}, acknowledged_{0}, fences_{0};
  std::atomic<bool> has_tail_{false};
  std::atomic<End> end_{End::NONE};

  // All but settle() need the mutex; settle() takes it itself. write() returns false if the socket is full.
  bool write(iovec*& parts, size_t& num_parts);
  bool write_tail();
  bool write_due();
  void append_to_tail(const iovec* parts, size_t num_parts);
  bool wait_for_room(const GoOn& go_on);
  void settle();
};

}  // namespace distmk
