// Start and end of every task, kept by whoever ran it; where tracing is off, all it costs is a branch.
#pragma once
#include "runtime/context.h"

namespace distmk {

class Tracer {
 public:
  // `runner`: a worker, or num_workers + a scheduler. Only one thread of a team keeps entries.
  DISTMK_FN Tracer(const RankState& state, uint32_t runner) {
    const LaunchParams& params = *state.params;
    if (!params.trace) return;
    capacity_ = params.trace_capacity;
    entries_ = reinterpret_cast<TraceEntry*>(params.trace) + runner * capacity_;
    count_ = reinterpret_cast<uint64_t*>(params.trace_counts) + runner;
  }

  DISTMK_FN uint64_t now() const { return entries_ ? now_ns() : 0; }

  // What context ran, since `start_ns`.
  DISTMK_FN void keep(const Context& context, uint64_t start_ns) {
    if (!entries_ || !context.team.leader()) return;
    if (seen_ < capacity_)
      entries_[seen_] = {
          context.task.index, static_cast<uint32_t>(context.iteration), context.instance, 0, start_ns, now_ns()};
    *count_ = ++seen_;
  }

 private:
  TraceEntry* entries_ = nullptr;  // null: off
  uint64_t* count_ = nullptr;
  uint64_t capacity_ = 0, seen_ = 0;
};

}  // namespace distmk
