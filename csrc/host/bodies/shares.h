// How workers share the work of a task on the host.
#pragma once
#include "runtime/job_batch.h"

namespace distmk {

inline uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

struct Range {
  uint32_t begin, end;
};

// Share `index` of `num_shares` of the numbers 0 to count - 1. Shares are consecutive and equal to within one number.
inline Range share(uint32_t count, uint32_t index, uint32_t num_shares) {
  const auto at = [&](uint32_t i) { return static_cast<uint32_t>(uint64_t{count} * i / num_shares); };
  return {at(index), at(index + 1)};
}

// Shares of a job task: one for each worker that runs the task.
inline uint32_t num_shares(const Context& context) {
  const TaskDesc& task = *context.task.desc;
  const uint32_t num_workers = is_spread(task) ? context.rank_state.program->num_workers : 1;
  return num_workers < task.max_instances ? num_workers : task.max_instances;
}

// Calls run(share) for each of the `count` shares that belong to the calling worker.
template <class Run>
void run_shares(Context& context, uint32_t count, const Run& run) {
  if (!context.take_assigned(count)) return;
  uint32_t index = context.instance;
  do run(index);
  while (context.next_assigned(index));
}

// Calls run(row) for each row in the calling worker's share of `count` rows.
template <class Run>
void run_rows(Context& context, uint32_t count, const Run& run) {
  const uint32_t shares = num_shares(context);
  run_shares(context, shares, [&](uint32_t index) {
    const Range rows = share(count, index, shares);
    for (uint32_t row = rows.begin; row < rows.end; ++row) run(row);
  });
}

}  // namespace distmk
