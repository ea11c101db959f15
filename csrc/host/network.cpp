#include "host/network.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>

namespace distmk {

namespace {

enum FrameKind : uint32_t { DATA = 0xD157D000, DELIVERED, ABORT };

// Parts of one parcel; a larger number is no frame of ours.
constexpr uint32_t MAX_PARTS = 1 << 16;

bool read_all(int fd, void* to, uint64_t num_bytes) {
  auto* bytes = static_cast<char*>(to);
  while (num_bytes) {
    const ssize_t got = recv(fd, bytes, num_bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    bytes += got;
    num_bytes -= static_cast<uint64_t>(got);
  }
  return true;
}

// Writes all of `parts`, which it uses up.
bool write_all(int fd, std::vector<iovec>& parts) {
  for (size_t first = 0; first < parts.size();) {
    msghdr message = {};
    message.msg_iov = &parts[first];
    message.msg_iovlen = std::min<size_t>(parts.size() - first, IOV_MAX);
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    for (; first < parts.size() && static_cast<size_t>(sent) >= parts[first].iov_len; ++first)
      sent -= static_cast<ssize_t>(parts[first].iov_len);
    if (first == parts.size()) break;
    parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + sent;
    parts[first].iov_len -= static_cast<size_t>(sent);
  }
  return true;
}

template <class T>
iovec part_of(const std::vector<T>& items) {
  return {const_cast<T*>(items.data()), items.size() * sizeof(T)};
}

}  // namespace

struct Peer::Frame {
  uint32_t kind;
  uint32_t num_writes, num_signals, pad;
  uint64_t launch;
  uint64_t value;  // DATA: bytes of all writes; DELIVERED: parcels applied; ABORT: the reason
};

Peer::Peer(const ExposedHeap& heap, int data, int control)
    : heap_(heap), data_(data), control_(control), receiver_([this] { receive(); }) {}

Peer::~Peer() {
  closing_.store(true, std::memory_order_release);
  shutdown(data_, SHUT_RDWR);
  shutdown(control_, SHUT_RDWR);
  receiver_.join();
  close(data_);
  close(control_);
}

void Peer::begin_launch(uint64_t launch) {
  const std::lock_guard lock(state_mutex_);
  launch_ = launch;
  num_sent_ = num_delivered_ = num_applied_ = 0;
}

uint64_t Peer::send(const Parcel& parcel) {
  Frame frame = {};
  frame.kind = DATA;
  frame.num_writes = static_cast<uint32_t>(parcel.writes.size());
  frame.num_signals = static_cast<uint32_t>(parcel.signals.size());
  for (const Parcel::Write& write : parcel.writes) frame.value += write.num_bytes;
  std::vector<iovec> parts = {{&frame, sizeof(frame)}, part_of(parcel.writes), part_of(parcel.signals)};
  for (size_t i = 0; i < parcel.writes.size(); ++i)
    parts.push_back({const_cast<void*>(parcel.sources[i]), parcel.writes[i].num_bytes});
  const std::lock_guard lock(data_mutex_);
  uint64_t number;
  {
    const std::lock_guard state(state_mutex_);
    frame.launch = launch_;
    number = ++num_sent_;
  }
  if (!is_lost() && !write_all(data_, parts)) lose();
  return number;
}

bool Peer::wait_delivered(uint64_t parcel, uint64_t deadline_ns) {
  const uint64_t until = now_ns() + deadline_ns;
  std::unique_lock lock(state_mutex_);
  while (num_delivered_ < parcel) {
    if (is_lost() || load_relaxed(&heap_.control()->abort) || now_ns() > until) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  return true;
}

void Peer::send_abort(uint64_t reason) { send_control(ABORT, reason); }

void Peer::send_control(uint32_t kind, uint64_t value) {
  Frame frame = {};
  frame.kind = kind;
  frame.value = value;
  {
    const std::lock_guard state(state_mutex_);
    frame.launch = launch_;
  }
  std::vector<iovec> parts = {{&frame, sizeof(frame)}};
  const std::lock_guard lock(control_mutex_);
  if (!is_lost() && !write_all(control_, parts)) lose();
}

void Peer::lose() {
  if (closing_.load(std::memory_order_acquire)) return;
  lost_.store(true, std::memory_order_release);
  uint64_t* flag = &heap_.control()->abort;
  if (!load_relaxed(flag)) store_release(flag, static_cast<uint64_t>(Abort::RANK_LOST), Scope::SYSTEM);
  changed_.notify_all();
}

void Peer::receive() {
  pollfd waiting[2] = {{data_, POLLIN, 0}, {control_, POLLIN, 0}};
  while (!closing_.load(std::memory_order_acquire)) {
    if (poll(waiting, 2, -1) < 0 && errno != EINTR) return lose();
    // Control first: an abort, or the delivery that a worker waits for.
    if (waiting[1].revents && !receive_control()) return lose();
    if (waiting[0].revents && !receive_data()) return lose();
  }
}

bool Peer::receive_control() {
  Frame frame;
  if (!read_all(control_, &frame, sizeof(frame))) return false;
  const std::lock_guard lock(state_mutex_);
  if (frame.launch != launch_) return frame.kind == DELIVERED || frame.kind == ABORT;
  if (frame.kind == DELIVERED) {
    num_delivered_ = frame.value;
    changed_.notify_all();
    return true;
  }
  uint64_t* flag = &heap_.control()->abort;
  if (frame.kind == ABORT && !load_relaxed(flag)) store_release(flag, frame.value, Scope::SYSTEM);
  return frame.kind == ABORT;
}

bool Peer::receive_data() {
  Frame frame;
  if (!read_all(data_, &frame, sizeof(frame))) return false;
  if (frame.kind != DATA || frame.num_writes > MAX_PARTS || frame.num_signals > MAX_PARTS) return false;
  if (frame.value > heap_.num_bytes * 2) return false;
  const uint64_t tables = frame.num_writes * sizeof(Parcel::Write) + frame.num_signals * sizeof(Parcel::Signal);
  body_.resize(tables + frame.value);
  if (!read_all(data_, body_.data(), body_.size())) return false;
  uint64_t num_applied;
  {
    // Held meanwhile, so that no frame of an earlier launch is applied to a heap that is being cleared.
    const std::lock_guard lock(state_mutex_);
    if (frame.launch != launch_) return true;
    if (!apply(frame)) return false;
    num_applied = ++num_applied_;
  }
  send_control(DELIVERED, num_applied);
  return true;
}

bool Peer::apply(const Frame& frame) {
  const auto* writes = reinterpret_cast<const Parcel::Write*>(body_.data());
  const auto* signals = reinterpret_cast<const Parcel::Signal*>(writes + frame.num_writes);
  const char* bytes = reinterpret_cast<const char*>(signals + frame.num_signals);
  uint64_t left = frame.value;
  for (uint32_t i = 0; i < frame.num_writes; ++i) {
    const auto [offset, num_bytes] = writes[i];
    if (num_bytes > left || !heap_.holds(offset, num_bytes)) return false;
    // Not received in place: whoever polls the data must never see half of a word.
    copy_bytes(Team{}, heap_.base + offset, bytes, num_bytes);
    bytes += num_bytes;
    left -= num_bytes;
  }
  for (uint32_t i = 0; i < frame.num_signals; ++i) {
    if (signals[i].event >= heap_.num_events) return false;
    add_release(heap_.event(static_cast<uint32_t>(signals[i].event)), signals[i].amount);
  }
  return left == 0;
}

Network::Network(const ExposedHeap& heap, uint32_t num_ranks, const int* sockets) : peers_(num_ranks) {
  for (uint32_t rank = 0; rank < num_ranks; ++rank)
    if (sockets[2 * rank] >= 0) peers_[rank] = std::make_unique<Peer>(heap, sockets[2 * rank], sockets[2 * rank + 1]);
}

void Network::begin_launch() {
  ++launch_;
  for (const auto& peer : peers_)
    if (peer) peer->begin_launch(launch_);
}

void NetworkTransport::put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  Parcel& parcel = open_[{std::this_thread::get_id(), rank}];
  parcel.writes.push_back({heap_offset, num_bytes});
  parcel.sources.push_back(src);
}

void NetworkTransport::signal(uint32_t rank, uint32_t event, uint64_t amount) {
  const std::lock_guard lock(mutex_);
  open_[{std::this_thread::get_id(), rank}].signals.push_back({event, amount});
}

void NetworkTransport::send(uint32_t rank) {
  const Key key = {std::this_thread::get_id(), rank};
  std::unique_lock lock(mutex_);
  const auto parcel = open_.extract(key);
  lock.unlock();
  if (!parcel.empty()) dispatch(key, parcel.mapped());
}

void NetworkTransport::dispatch(const Key& key, const Parcel& parcel) {
  const uint64_t number = network_.peer(key.second)->send(parcel);
  const std::lock_guard lock(mutex_);
  undelivered_[key] = number;
}

void NetworkTransport::send_all() {
  const auto self = std::this_thread::get_id();
  std::vector<std::pair<Key, Parcel>> own;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = open_.lower_bound({self, 0}); it != open_.end() && it->first.first == self; it = open_.erase(it))
      own.emplace_back(it->first, std::move(it->second));
  }
  for (const auto& [key, parcel] : own) dispatch(key, parcel);
}

void NetworkTransport::quiet() {
  send_all();
  const auto self = std::this_thread::get_id();
  std::vector<std::pair<uint32_t, uint64_t>> own;
  {
    const std::lock_guard lock(mutex_);
    const auto first = undelivered_.lower_bound({self, 0});
    auto last = first;
    for (; last != undelivered_.end() && last->first.first == self; ++last)
      own.emplace_back(last->first.second, last->second);
    undelivered_.erase(first, last);
  }
  for (const auto& [rank, number] : own) {
    if (network_.peer(rank)->wait_delivered(number, state_.params->deadline_ns)) continue;
    uint64_t* flag = state_.abort_flag(state_.program->rank);
    if (!load_relaxed(flag)) store_release(flag, static_cast<uint64_t>(Abort::HANG), Scope::SYSTEM);
    return;
  }
}

}  // namespace distmk

extern "C" {

void* distmk_network_open(const distmk::LaunchParams* params, const int* sockets) {
  const auto& program = *reinterpret_cast<const distmk::ProgramHeader*>(params->program);
  const auto* bases = reinterpret_cast<const uint64_t*>(params->heap_bases);
  const distmk::ExposedHeap heap = {reinterpret_cast<char*>(bases[program.rank]), program.heap_bytes,
                                    program.events_heap_offset, program.num_events};
  return new distmk::Network(heap, program.num_ranks, sockets);
}

// Between launches, before this rank's heap is cleared.
void distmk_network_begin_launch(void* network) { static_cast<distmk::Network*>(network)->begin_launch(); }

void distmk_network_abort(void* network, uint64_t reason) {
  const auto& all = *static_cast<distmk::Network*>(network);
  for (uint32_t rank = 0; rank < all.num_ranks(); ++rank)
    if (all.peer(rank)) all.peer(rank)->send_abort(reason);
}

// Writes 1 to `lost[rank]` for each rank whose connection has ended.
void distmk_network_lost(const void* network, uint8_t* lost) {
  const auto& all = *static_cast<const distmk::Network*>(network);
  for (uint32_t rank = 0; rank < all.num_ranks(); ++rank) lost[rank] = all.peer(rank) && all.peer(rank)->is_lost();
}

// No launch may be under way.
void distmk_network_close(void* network) { delete static_cast<distmk::Network*>(network); }

}  // extern "C"
