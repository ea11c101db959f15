// The host twin's transports to ranks that share no memory with this one: a network (network.h), or the fault injection
// that plays one (delayed_puts.h).
#pragma once
#include "runtime/context.h"

namespace distmk {

class Transport {
 public:
  virtual ~Transport() = default;

  // Whether this transport, and no pointer, reaches `rank`.
  virtual bool covers(uint32_t rank) const = 0;

  // Both add to this thread's open parcel for `rank`. The source of a put is read until the parcel is sent.
  virtual void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) = 0;
  virtual void signal(uint32_t rank, uint32_t event, uint64_t amount) = 0;
  // Sends this thread's parcel for `rank`, the data before the signals.
  virtual void send(uint32_t rank) = 0;
  virtual void send_all() = 0;
  // Sends all parcels of this thread, and waits until everything that it has sent was delivered.
  virtual void quiet() = 0;
  virtual void abort(uint32_t rank, uint64_t reason) = 0;
};

}  // namespace distmk
