// Puts and signals of one rank's launch over the network between hosts.
#pragma once
#include <vector>

#include "host/network.h"
#include "host/transport.h"

namespace distmk {

// A thread's parcel for a rank lists what to send. `send` hands the parcel to the socket at once, without copying it.
// Parcels for a rank arrive in the order in which they were sent, by whichever thread.
class NetworkTransport : public Transport {
 public:
  NetworkTransport(const RankState& state, Network& network);

  bool covers(uint32_t rank) const override { return network_.connection(rank) != nullptr; }
  void put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) override;
  void signal(uint32_t rank, uint32_t event, uint64_t amount) override;
  void send(uint32_t rank) override;
  void send_all() override;
  void quiet() override;
  void abort(uint32_t rank, uint64_t reason) override;

 private:
  struct Put {
    uint64_t heap_offset;
    const char* src;
    uint64_t num_bytes;
  };
  // What a thread sends to a rank: the open parcel, and the number of the last parcel that was sent and not waited for.
  struct Outbox {
    std::vector<Put> puts;
    std::vector<wire::Signal> signals;
    uint64_t last_sent = 0;  // 0: none
  };
  // The outboxes of one thread. They belong to the last launch that the thread sent for.
  struct Sender {
    uint64_t launch = 0;
    std::vector<Outbox> outboxes;  // by rank
  };
  class Patience;

  const RankState& state_;
  Network& network_;
  const uint64_t launch_;  // unique in this process

  Sender& sender() const;
  void send_parcel(uint32_t rank, Outbox& outbox, Patience& patience);
};

}  // namespace distmk
