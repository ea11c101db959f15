// Stands in for the bodies: notes which instances ran, for how many iterations, and whether every worker kept its
// order. Linked with the runtime and run_ranks in place of csrc/host/bodies; see test_runtime.py.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

#include "host/delayed_puts.h"
#include "runtime/context.h"
#include "runtime/splits.h"

namespace distmk {
namespace {

std::mutex mutex;
std::map<std::tuple<uint32_t, uint32_t, uint64_t>, std::map<uint32_t, uint32_t>> runs;  // (rank, task, iteration)
std::map<std::pair<uint32_t, uint32_t>, uint32_t> instances;                            // wanted of (rank, task)
std::map<std::pair<uint32_t, uint32_t>, uint64_t> next_run;  // of (rank, worker): iteration * tasks + place in queue
uint32_t wrong = 0;

void check_order(const Context& context, uint32_t task) {
  const RankState& state = context.rank_state;
  for (uint32_t worker = 0; worker < state.program->num_workers; ++worker) {
    const Queue& queue = state.queues[worker];
    if (task < queue.begin || task >= queue.begin + queue.count) continue;
    uint64_t& next = next_run[{context.rank(), worker}];
    wrong += next++ != context.iteration * queue.count + (task - queue.begin);
  }
}

void note(const Context& context) {
  const auto task = context.task.index;
  const std::lock_guard lock(mutex);
  check_order(context, task);
  ++runs[{context.rank(), task, context.iteration}][context.instance];
  const bool massive = context.task.desc->launch == static_cast<uint16_t>(LaunchKind::MASSIVE);
  instances[{context.rank(), task}] = massive ? context.task.desc->max_instances : 1;
}

// At exit: each instance once in each iteration.
struct Verdict {
  ~Verdict() {
    for (const auto& [key, ran] : runs) {
      const uint32_t wanted = instances[{std::get<0>(key), std::get<1>(key)}];
      wrong += ran.size() != wanted;
      for (const auto& [instance, times] : ran) wrong += times != 1 || instance >= wanted;
    }
    std::printf("%zu launches of %zu tasks, %u wrong\n", runs.size(), instances.size(), wrong);
  }
} verdict;

}  // namespace

#define DISTMK_COUNT(id, name, Args) \
  void body_##name(Context& context, const Args&) { note(context); }
DISTMK_TASK_TYPES(DISTMK_COUNT)
#undef DISTMK_COUNT

}  // namespace distmk
