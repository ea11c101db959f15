// The transport of the host twin: how a rank puts data and signals to ranks whose heaps no pointer reaches.
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

// Of one rank in one launch. Implemented by NetworkTransport (host/network_transport.h) and, for fault injection, by
// DelayedPuts (host/delayed_puts.h), which takes puts first if there are both.
class Transport {
 public:
  virtual ~Transport() = default;

  // Whether `rank` is reached by this transport instead of a pointer.
  virtual bool covers(uint32_t rank) const = 0;

  // Both add to this thread's open parcel for `rank`. The source is read by `send` at the latest.
  virtual void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) = 0;
  virtual void signal(uint32_t rank, uint32_t event, uint64_t amount) = 0;
  // Sends this thread's parcel for `rank`: its data arrives before its signals. The next parcel may overtake it.
  virtual void send(uint32_t rank) = 0;
  virtual void send_all() = 0;
  // Sends all parcels and waits until everything that this thread has sent has arrived, or the launch is given up.
  virtual void quiet() = 0;
  // Sets the rank's abort flag, eventually; does not wait.
  virtual void abort(uint32_t rank, uint64_t reason) = 0;
};

}  // namespace distmk
