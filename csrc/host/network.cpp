// The receiver thread of a network: reads frames, checks them and applies them to the heap (network.h).
#include "host/network.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "platform/platform.h"

namespace distmk {
namespace {

constexpr auto WAIT_SLICE = std::chrono::milliseconds(20);
constexpr int OWED_POLL_MS = 1;

bool is_beat(const wire::Write& write) {
  return write.heap_offset == offsetof(Control, beat) && write.num_bytes == sizeof(Control::beat);
}

}  // namespace

Network::Network(char* heap, const ProgramHeader& program, const std::vector<int>& sockets)
    : heap_(heap),
      heap_bytes_(program.heap_bytes),
      events_offset_(program.events_heap_offset),
      num_events_(program.num_events),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (uint32_t rank = 0; rank < sockets.size(); ++rank) {
    const bool is_far = sockets[rank] >= 0;
    connections_.push_back(is_far ? std::make_unique<Connection>(rank, sockets[rank], [this] { wake(); }) : nullptr);
    inboxes_.push_back(is_far ? std::make_unique<Inbox>() : nullptr);
  }
  receiver_ = std::thread([this] { receive(); });
}

Network::~Network() {
  for (const auto& each : connections_)
    if (each) each->send_control(wire::Type::LEAVE, 0);
  closing_.store(true);
  wake();
  receiver_.join();
  connections_.clear();
  close(wake_fd_);
}

Connection::End Network::end_of(uint32_t rank) const {
  return rank < connections_.size() && connections_[rank] ? connections_[rank]->end() : Connection::End::NONE;
}

void Network::check_connections() {
  for (const auto& each : connections_)
    if (each && each->end() != Connection::End::NONE) raise(Abort::RANK_LOST);
}

void Network::abort(uint64_t reason) {
  for (const auto& each : connections_)
    if (each) each->send_control(wire::Type::ABORT, reason);
}

void Network::send_fence() {
  ++num_fences_;
  for (const auto& each : connections_)
    if (each) each->send_control(wire::Type::FENCE, num_fences_);
}

bool Network::reached_fence(uint64_t timeout_ns) {
  const auto met = [this] {
    for (const auto& each : connections_)
      if (each && each->end() == Connection::End::NONE && each->fences() < num_fences_) return false;
    return true;
  };
  const uint64_t until = now_ns() + timeout_ns;
  wait_until(met, [until] { return now_ns() < until; });
  return met();
}

void Network::wait_for(const Connection& connection, uint64_t number, uint32_t num_polls, const GoOn& go_on) {
  const auto met = [&] { return connection.acknowledged() >= number || connection.end() != Connection::End::NONE; };
  for (uint32_t i = 0; i < num_polls; ++i) {
    if (met()) return;
    pause();
  }
  wait_until(met, go_on);
}

template <class Met>
void Network::wait_until(const Met& met, const GoOn& go_on) {
  num_waiting_.fetch_add(1);
  std::unique_lock lock(mutex_);
  while (!met() && go_on()) changed_.wait_for(lock, WAIT_SLICE);
  num_waiting_.fetch_sub(1);
}

// No wake-up is lost: a waiter counts itself before it checks its condition, and the receiver looks for waiters after
// it has changed the condition.
void Network::notify() {
  if (!num_waiting_.load()) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Network::wake() const {
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof one) < 0) return;  // fails only if the counter is full: the receiver is awake anyway
}

void Network::raise(Abort reason) {
  uint64_t* flag = &reinterpret_cast<Control*>(heap_)->abort;
  if (!load_relaxed(flag)) store_release(flag, static_cast<uint64_t>(reason), Scope::SYSTEM);
}

void Network::receive() {
  std::vector<pollfd> polled(connections_.size() + 1);
  while (!closing_.load()) {
    bool owes = false;
    polled.back() = {wake_fd_, POLLIN, 0};
    for (size_t i = 0; i < connections_.size(); ++i) {
      const Connection* each = connections_[i].get();
      polled[i] = {each && !inboxes_[i]->is_over ? each->fd : -1, POLLIN, 0};
      if (polled[i].fd < 0) continue;
      if (each->wants_to_write()) polled[i].events |= POLLOUT;
      owes |= each->owes_acknowledgement();
    }
    if (poll(polled.data(), polled.size(), owes ? OWED_POLL_MS : -1) < 0) continue;
    uint64_t count;
    if (polled.back().revents && ::read(wake_fd_, &count, sizeof count) < 0 && errno != EAGAIN) return;
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (polled[i].fd < 0) continue;
      if (connections_[i]->wants_to_write() || connections_[i]->owes_acknowledgement())
        connections_[i]->write_pending();
      if (polled[i].revents & ~POLLOUT) read(*connections_[i], *inboxes_[i]);
    }
  }
}

// Reads at most a full inbox, so that no connection holds up the others.
void Network::read(Connection& connection, Inbox& inbox) {
  const ssize_t got =
      recv(connection.fd, inbox.bytes.data() + inbox.num_bytes, inbox.bytes.size() - inbox.num_bytes, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) {
    const bool silent = got < 0 && (errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH);
    return lose(connection, inbox, silent ? Connection::End::NO_ANSWER : Connection::End::CLOSED);
  }
  inbox.num_bytes += static_cast<size_t>(got);
  const uint64_t before = inbox.num_applied;
  if (!apply_all(connection, inbox)) return lose(connection, inbox, Connection::End::MALFORMED);
  if (inbox.num_applied != before) connection.acknowledge(inbox.num_applied);
}

// Applies all complete frames. Returns false if one is malformed.
bool Network::apply_all(Connection& connection, Inbox& inbox) {
  size_t at = 0;
  while (inbox.num_bytes - at >= sizeof(wire::Header)) {
    wire::Header header;
    memcpy(&header, inbox.bytes.data() + at, sizeof header);
    if (header.num_writes > wire::MAX_WRITES || header.num_signals > wire::MAX_SIGNALS ||
        header.num_bytes > wire::MAX_DATA_BYTES)
      return false;
    const size_t frame_bytes = sizeof header + wire::tables_bytes(header) + header.num_bytes;
    if (inbox.num_bytes - at < frame_bytes) break;
    if (!apply(connection, inbox, header, inbox.bytes.data() + at + sizeof header)) return false;
    at += frame_bytes;
  }
  inbox.num_bytes -= at;
  memmove(inbox.bytes.data(), inbox.bytes.data() + at, inbox.num_bytes);
  return true;
}

bool Network::apply(Connection& connection, Inbox& inbox, const wire::Header& header, const char* body) {
  if (header.type == wire::Type::PARCEL) {
    ++inbox.num_applied;
    return apply_parcel(header, body);
  }
  if (header.num_writes || header.num_signals || header.num_bytes) return false;
  switch (header.type) {
    case wire::Type::ACK:
      if (!connection.set_acknowledged(header.value)) return false;
      notify();
      return true;
    case wire::Type::ABORT:
      if (header.value < static_cast<uint64_t>(Abort::HANG) || header.value > static_cast<uint64_t>(Abort::INTERRUPTED))
        return false;
      raise(static_cast<Abort>(header.value));
      return true;
    case wire::Type::FENCE:
      if (header.value != connection.fences() + 1) return false;
      connection.count_fence();
      notify();
      return true;
    case wire::Type::LEAVE:
      connection.set_end(Connection::End::LEFT);
      return true;
    default:
      return false;
  }
}

// Checks the whole parcel before it writes anything. The heap begins with this rank's Control, where a put may change
// only the beat.
bool Network::apply_parcel(const wire::Header& header, const char* body) {
  std::array<wire::Write, wire::MAX_WRITES> writes;
  std::array<wire::Signal, wire::MAX_SIGNALS> signals;
  memcpy(writes.data(), body, header.num_writes * sizeof(wire::Write));
  memcpy(signals.data(), body + header.num_writes * sizeof(wire::Write), header.num_signals * sizeof(wire::Signal));
  const char* data = body + wire::tables_bytes(header);
  uint64_t left = header.num_bytes;
  for (uint32_t i = 0; i < header.num_writes; ++i) {
    const auto [offset, num_bytes] = writes[i];
    if (num_bytes > left || offset > heap_bytes_ || num_bytes > heap_bytes_ - offset) return false;
    if (offset < sizeof(Control) && !is_beat(writes[i])) return false;
    left -= num_bytes;
  }
  if (left) return false;
  for (uint32_t i = 0; i < header.num_signals; ++i)
    if (signals[i].event >= num_events_) return false;
  for (uint32_t i = 0; i < header.num_writes; data += writes[i++].num_bytes) {
    char* to = heap_ + writes[i].heap_offset;
    if (is_beat(writes[i])) {  // waits may read it at any time
      uint64_t beat;
      memcpy(&beat, data, sizeof beat);
      store_relaxed(reinterpret_cast<uint64_t*>(to), beat);
    } else {
      copy_bytes(Team{}, to, data, writes[i].num_bytes);
    }
  }
  for (uint32_t i = 0; i < header.num_signals; ++i) {
    char* event = heap_ + events_offset_ + uint64_t{signals[i].event} * EVENT_STRIDE_BYTES;
    add_release(reinterpret_cast<uint64_t*>(event), signals[i].amount, Scope::SYSTEM);
  }
  return true;
}

void Network::lose(Connection& connection, Inbox& inbox, Connection::End reason) {
  inbox.is_over = true;
  connection.set_end(reason);
  raise(Abort::RANK_LOST);
  notify();
}

}  // namespace distmk
