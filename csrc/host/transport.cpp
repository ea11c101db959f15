// The runtime's transport functions (runtime/rank_state.h), on the transports of the host twin.
#include "host/transport.h"

namespace distmk {

bool is_remote(const Transport& transport, uint32_t rank) { return transport.covers(rank); }
void transport_put(Transport& transport, const Team&, uint32_t rank, uint64_t heap_offset, const void* src,
                   uint64_t num_bytes) {
  transport.put(rank, heap_offset, src, num_bytes);
}
void transport_signal(Transport& transport, uint32_t rank, uint32_t event, uint64_t amount) {
  transport.signal(rank, event, amount);
}
void transport_send(Transport& transport, uint32_t rank) { transport.send(rank); }
void transport_send_all(Transport& transport) { transport.send_all(); }
void transport_quiet(Transport& transport) { transport.quiet(); }
void transport_abort(Transport& transport, uint32_t rank, uint64_t reason) { transport.abort(rank, reason); }

}  // namespace distmk
