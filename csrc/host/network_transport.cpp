// Cuts parcels into frames, sends them and waits for their acknowledgements (network_transport.h).
#include "host/network_transport.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "runtime/wait.h"

namespace distmk {
namespace {

// One frame of a parcel.
struct Frame {
  wire::Header header{wire::Type::PARCEL, 0, 0, 0, 0};
  std::array<wire::Write, wire::MAX_WRITES> writes;
  std::array<wire::Signal, wire::MAX_SIGNALS> signals;
  std::array<iovec, wire::MAX_WRITES + 3> parts;

  bool has_room() const { return header.num_writes < wire::MAX_WRITES && header.num_bytes < wire::MAX_DATA_BYTES; }

  // Adds as much of `num_bytes` as fits, and returns how much that is.
  uint64_t add(uint64_t heap_offset, const char* src, uint64_t num_bytes) {
    // A put is cut only at multiples of this from its beginning. Every element's size divides it.
    constexpr uint32_t CUT_BYTES = 64;
    uint64_t most = wire::MAX_DATA_BYTES - header.num_bytes;
    if (num_bytes > most) most -= most % CUT_BYTES;
    const uint64_t added = std::min(num_bytes, most);
    if (!added) return 0;
    writes[header.num_writes] = {heap_offset, added};
    parts[3 + header.num_writes++] = {const_cast<char*>(src), added};
    header.num_bytes += static_cast<uint32_t>(added);
    return added;
  }

  uint64_t send(Connection& connection, const GoOn& go_on) {
    parts[0] = {&header, sizeof header};
    parts[1] = {writes.data(), header.num_writes * sizeof(wire::Write)};
    parts[2] = {signals.data(), header.num_signals * sizeof(wire::Signal)};
    const uint64_t number = connection.send_parcel(parts.data(), 3 + header.num_writes, go_on);
    header.num_writes = header.num_signals = header.num_bytes = 0;
    return number;
  }
};

uint64_t new_launch() {
  static std::atomic<uint64_t> count{0};
  return ++count;
}

}  // namespace

// How long a worker waits for the network: until the launch is given up or its own deadline passes. Time in which the
// process was stopped does not count (see Backoff). When its patience ends, it tells all ranks to leave.
class NetworkTransport::Patience {
 public:
  explicit Patience(const RankState& state) : state_(state) {}
  ~Patience() {
    if (expired_) raise_abort(state_, Abort::HANG);
  }

  bool operator()() {
    if (expired_ || load_relaxed(state_.abort_flag(state_.program->rank))) return false;
    const uint64_t now = now_ns();
    if (last_) waited_ += std::min(now - last_, state_.params->deadline_ns / 4);
    last_ = now;
    expired_ = waited_ > state_.params->deadline_ns;
    return !expired_;
  }

 private:
  const RankState& state_;
  uint64_t waited_ = 0, last_ = 0;
  bool expired_ = false;
};

NetworkTransport::NetworkTransport(const RankState& state, Network& network)
    : state_(state), network_(network), launch_(new_launch()) {
  network_.check_connections();
}

NetworkTransport::Sender& NetworkTransport::sender() const {
  thread_local Sender sender;
  if (sender.launch != launch_) {
    sender.launch = launch_;
    sender.outboxes.assign(network_.num_ranks(), {});
  }
  return sender;
}

void NetworkTransport::put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) {
  if (num_bytes) sender().outboxes[rank].puts.push_back({heap_offset, static_cast<const char*>(src), num_bytes});
}

void NetworkTransport::signal(uint32_t rank, uint32_t event, uint64_t amount) {
  sender().outboxes[rank].signals.push_back({amount, event, 0});
}

void NetworkTransport::send(uint32_t rank) {
  Patience patience(state_);
  send_parcel(rank, sender().outboxes[rank], patience);
}

void NetworkTransport::send_all() {
  Patience patience(state_);
  auto& outboxes = sender().outboxes;
  for (uint32_t rank = 0; rank < outboxes.size(); ++rank) send_parcel(rank, outboxes[rank], patience);
}

void NetworkTransport::send_parcel(uint32_t rank, Outbox& outbox, Patience& patience) {
  if (outbox.puts.empty() && outbox.signals.empty()) return;
  Connection& connection = *network_.connection(rank);
  const GoOn go_on = std::ref(patience);
  Frame frame;
  for (Put& put : outbox.puts) {
    while (put.num_bytes) {
      const uint64_t added = frame.add(put.heap_offset, put.src, put.num_bytes);
      put.heap_offset += added;
      put.src += added;
      put.num_bytes -= added;
      if (put.num_bytes || !frame.has_room()) outbox.last_sent = frame.send(connection, go_on);
    }
  }
  for (size_t begin = 0; begin < outbox.signals.size(); begin += wire::MAX_SIGNALS) {
    if (begin) outbox.last_sent = frame.send(connection, go_on);
    const size_t count = std::min<size_t>(outbox.signals.size() - begin, wire::MAX_SIGNALS);
    std::copy_n(outbox.signals.begin() + static_cast<ptrdiff_t>(begin), count, frame.signals.begin());
    frame.header.num_signals = static_cast<uint32_t>(count);
  }
  if (frame.header.num_writes || frame.header.num_signals) outbox.last_sent = frame.send(connection, go_on);
  outbox.puts.clear();
  outbox.signals.clear();
}

void NetworkTransport::quiet() {
  send_all();
  Patience patience(state_);
  const GoOn go_on = std::ref(patience);
  auto& outboxes = sender().outboxes;
  for (uint32_t rank = 0; rank < outboxes.size(); ++rank) {
    const uint64_t last_sent = std::exchange(outboxes[rank].last_sent, 0);
    if (last_sent) network_.wait_for(*network_.connection(rank), last_sent, state_.params->spin_polls, go_on);
  }
}

void NetworkTransport::abort(uint32_t rank, uint64_t reason) {
  network_.connection(rank)->send_control(wire::Type::ABORT, reason);
}

}  // namespace distmk
