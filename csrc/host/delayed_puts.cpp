// Collects the parcels of all threads and delivers them late (delayed_puts.h).
#include "host/delayed_puts.h"

#include <chrono>

namespace distmk {

DelayedPuts::DelayedPuts(const RankState& state, std::unique_ptr<Transport> network)
    : state_(state),
      network_(std::move(network)),
      node_size_(state.params->fault.node_size),
      own_node_(state.program->rank / node_size_),
      random_(state.params->fault.seed + 7919 * (state.program->rank + 1)),
      thread_([this] { run(); }) {}

DelayedPuts::~DelayedPuts() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DelayedPuts::put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) {
  const auto* bytes = static_cast<const char*>(src);
  const std::lock_guard lock(mutex_);
  open_[{std::this_thread::get_id(), rank}].writes.emplace_back(heap_offset,
                                                                std::vector<char>(bytes, bytes + num_bytes));
}

void DelayedPuts::signal(uint32_t rank, uint32_t event, uint64_t amount) {
  const std::lock_guard lock(mutex_);
  open_[{std::this_thread::get_id(), rank}].signals.emplace_back(event, amount);
}

void DelayedPuts::send(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  auto parcel = open_.extract({std::this_thread::get_id(), rank});
  if (!parcel.empty()) post(rank, std::move(parcel.mapped()));
}

void DelayedPuts::send_all() {
  const std::lock_guard lock(mutex_);
  const auto self = std::this_thread::get_id();
  for (auto it = open_.lower_bound({self, 0}); it != open_.end() && it->first.first == self; it = open_.erase(it))
    post(it->first.second, std::move(it->second));
}

void DelayedPuts::quiet() {
  send_all();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_in_flight_[std::this_thread::get_id()] == 0; });
}

void DelayedPuts::post(uint32_t rank, Parcel parcel) {
  parcel.rank = rank;
  parcel.sender = std::this_thread::get_id();
  ++num_in_flight_[parcel.sender];
  std::uniform_int_distribution<uint64_t> delay_ns(0, state_.params->fault.delay_puts_ns);
  in_flight_.emplace(now_ns() + delay_ns(random_), std::move(parcel));
  changed_.notify_all();
}

void DelayedPuts::run() {
  std::unique_lock lock(mutex_);
  while (!closing_ || !in_flight_.empty()) {
    if (in_flight_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const uint64_t due = in_flight_.begin()->first, now = now_ns();
    if (now < due && !closing_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(due - now));
      continue;
    }
    const Parcel parcel = std::move(in_flight_.extract(in_flight_.begin()).mapped());
    lock.unlock();
    deliver(parcel);
    lock.lock();
    --num_in_flight_[parcel.sender];
    changed_.notify_all();
  }
}

void DelayedPuts::deliver(const Parcel& parcel) {
  if (is_far(parcel.rank)) {
    for (const auto& [offset, bytes] : parcel.writes) network_->put(parcel.rank, offset, bytes.data(), bytes.size());
    for (const auto& [event, amount] : parcel.signals) network_->signal(parcel.rank, event, amount);
    return network_->quiet();
  }
  auto* heap = reinterpret_cast<char*>(state_.heap_bases[parcel.rank]);
  for (const auto& [offset, bytes] : parcel.writes) copy_bytes(Team{}, heap + offset, bytes.data(), bytes.size());
  for (const auto& [event, amount] : parcel.signals) add_release(state_.event(parcel.rank, event), amount);
}

}  // namespace distmk
