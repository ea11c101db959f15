// Records when each task of a worker or scheduler started and ended, in a ring that keeps the last ones across
// launches. A launch that is not traced pays one branch per task.
#pragma once
#include "runtime/context.h"

namespace distmk {

class Tracer {
 public:
  // `runner`: the index of a worker, or num_workers + the index of a scheduler. Only one thread of a team writes
  // entries.
  DISTMK_FN Tracer(const RankState& state, uint32_t runner) {
    const LaunchParams& params = *state.params;
    if (!params.trace || !params.trace_capacity) return;
    capacity_ = static_cast<uint32_t>(params.trace_capacity);
    entries_ = reinterpret_cast<TraceEntry*>(params.trace) + uint64_t{runner} * capacity_;
    count_ = reinterpret_cast<uint64_t*>(params.trace_counts) + runner;
    num_recorded_ = *count_;
    next_ = static_cast<uint32_t>(num_recorded_ % capacity_);
  }

  DISTMK_FN uint64_t now() const { return entries_ ? now_ns() : 0; }

  // Records that the context's task has ended. Its inputs were ready at `start_ns`, and its body ended at
  // `body_end_ns`.
  DISTMK_FN void record(const Context& context, uint64_t start_ns, uint64_t body_end_ns) {
    if (!entries_ || !context.team.leader()) return;
    const uint64_t end_ns = now_ns();
    entries_[next_] = {context.task.index, static_cast<uint32_t>(context.iteration),
                       context.instance,   static_cast<uint32_t>(end_ns - body_end_ns),
                       start_ns,           end_ns};
    if (++next_ == capacity_) next_ = 0;
    *count_ = ++num_recorded_;
  }

 private:
  TraceEntry* entries_ = nullptr;  // a ring of capacity_ entries; null: not traced
  uint64_t* count_ = nullptr;
  uint32_t capacity_ = 0, next_ = 0;
  uint64_t num_recorded_ = 0;
};

}  // namespace distmk
