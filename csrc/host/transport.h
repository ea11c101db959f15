// The transport of the host twin: how a rank puts data and signals to ranks whose heaps no pointer reaches.
#pragma once
#include "runtime/rank_state.h"

namespace distmk {

// The transport of one rank in one launch. NetworkTransport (host/network_transport.h) implements it and, for fault
// injection, DelayedPuts (host/delayed_puts.h). If there are both, DelayedPuts takes puts first.
class Transport {
 public:
  virtual ~Transport() = default;

  // Whether this transport reaches `rank`, because no pointer does.
  virtual bool covers(uint32_t rank) const = 0;

  // put() and signal() add to this thread's open parcel for `rank`. The source may be read as late as in send().
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
