#include "host/delayed_puts.h"

#include <chrono>

namespace distmk {

FarRanks::FarRanks(const RankState& state)
    : state_(state),
      node_size_(state.params->fault.node_size),
      own_node_(state.program->rank / node_size_),
      random_(state.params->fault.seed + 7919 * (state.program->rank + 1)),
      thread_([this] { deliver(); }) {}

FarRanks::~FarRanks() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FarRanks::put(uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) {
  const auto* bytes = static_cast<const char*>(src);
  const std::lock_guard lock(mutex_);
  open_[{std::this_thread::get_id(), rank}].writes.emplace_back(
      reinterpret_cast<char*>(state_.heap_bases[rank] + heap_offset), std::vector<char>(bytes, bytes + num_bytes));
}

void FarRanks::signal(uint32_t rank, uint32_t event, uint64_t amount) {
  const std::lock_guard lock(mutex_);
  open_[{std::this_thread::get_id(), rank}].signals.emplace_back(state_.event(rank, event), amount);
}

void FarRanks::send(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  auto parcel = open_.extract({std::this_thread::get_id(), rank});
  if (!parcel.empty()) post(std::move(parcel.mapped()));
}

void FarRanks::send_all() {
  const std::lock_guard lock(mutex_);
  const auto self = std::this_thread::get_id();
  for (auto it = open_.lower_bound({self, 0}); it != open_.end() && it->first.first == self; it = open_.erase(it))
    post(std::move(it->second));
}

void FarRanks::quiet() {
  send_all();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_under_way_[std::this_thread::get_id()] == 0; });
}

void FarRanks::post(Parcel parcel) {
  parcel.sender = std::this_thread::get_id();
  ++num_under_way_[parcel.sender];
  std::uniform_int_distribution<uint64_t> delay_ns(0, state_.params->fault.delay_puts_ns);
  under_way_.emplace(now_ns() + delay_ns(random_), std::move(parcel));
  changed_.notify_all();
}

void FarRanks::deliver() {
  std::unique_lock lock(mutex_);
  while (!closing_ || !under_way_.empty()) {
    if (under_way_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const uint64_t due = under_way_.begin()->first, now = now_ns();
    if (now < due && !closing_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(due - now));
      continue;
    }
    const Parcel parcel = std::move(under_way_.extract(under_way_.begin()).mapped());
    lock.unlock();
    for (const auto& [dst, bytes] : parcel.writes) copy_bytes(Team{}, dst, bytes.data(), bytes.size());
    for (const auto& [event, amount] : parcel.signals) add_release(event, amount);
    lock.lock();
    --num_under_way_[parcel.sender];
    changed_.notify_all();
  }
}

bool is_far(const FarRanks& far, uint32_t rank) { return far.covers(rank); }
void far_put(FarRanks& far, const Team&, uint32_t rank, uint64_t heap_offset, const void* src, uint64_t num_bytes) {
  far.put(rank, heap_offset, src, num_bytes);
}
void far_signal(FarRanks& far, uint32_t rank, uint32_t event, uint64_t amount) { far.signal(rank, event, amount); }
void far_send(FarRanks& far, uint32_t rank) { far.send(rank); }
void far_send_all(FarRanks& far) { far.send_all(); }
void far_quiet(FarRanks& far) { far.quiet(); }
void far_abort(FarRanks& far, uint32_t rank, uint64_t reason) { far.abort(rank, reason); }

}  // namespace distmk
