// Replaces csrc/host/bodies in a program with the runtime and run_ranks (test_instances.py). Counts how often each
// instance ran, and checks that every worker kept the order of its queue and ran its own share of spread tasks. A task
// is known by its index in program order.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

#include "runtime/context.h"
#include "runtime/splits.h"
#include "runtime/task_types.h"

namespace distmk {
namespace {

std::mutex counting;
std::map<std::tuple<uint32_t, uint32_t, uint64_t>, std::map<uint32_t, uint32_t>> runs;  // by rank, task, iteration
std::map<std::pair<uint32_t, uint32_t>, uint32_t> instances;                            // wanted, by rank and task
std::map<std::pair<uint32_t, uint32_t>, uint64_t> next_run;  // by rank and worker: iteration * tasks + index in queue
uint32_t wrong = 0;

bool has_kind(const TaskDesc& desc, LaunchKind kind) { return desc.launch == static_cast<uint16_t>(kind); }

// A worker runs the tasks of its queue one after another; of a spread task it may run any number of instances, all its
// own.
void check_order(const Context& context, uint32_t task, uint32_t instance) {
  const RankState& state = context.rank_state;
  const uint32_t num_workers = state.program->num_workers;
  const auto is_spread = [&state](uint64_t index) { return has_kind(state.tasks[index], LaunchKind::SPREAD); };
  for (uint32_t worker = 0; worker < num_workers; ++worker) {
    const Queue& queue = state.queues[worker];
    if (task < queue.begin || task >= queue.begin + queue.count) continue;
    uint64_t& next = next_run[{context.rank(), worker}];
    const uint64_t place = context.iteration * queue.count + (task - queue.begin);
    while (next < place && is_spread(queue.begin + next % queue.count)) ++next;
    const bool again = is_spread(task) && next == place + 1;
    wrong += next != place && !again;
    next = place + 1;
    if (is_spread(task)) wrong += (context.task.desc->first_worker + instance) % num_workers != worker;
  }
}

void note(const Context& context, uint32_t instance) {
  const std::lock_guard lock(counting);
  check_order(context, context.task.index, instance);
  const TaskDesc& desc = *context.task.desc;
  ++runs[{context.rank(), desc.order, context.iteration}][instance];
  const bool many = has_kind(desc, LaunchKind::MASSIVE) || has_kind(desc, LaunchKind::SPREAD);
  instances[{context.rank(), desc.order}] = many ? desc.max_instances : 1;
}

// At exit, checks that each instance ran once in each iteration.
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

uint32_t num_work_items(const Context& context, const AttentionArgs& args) {
  return num_attention_instances(args, *context.batch(args.batch));
}

#define DISTMK_COUNT(id, name, Args)                \
  void body_##name(Context& context, const Args&) { \
    uint32_t instance = context.instance;           \
    do note(context, instance);                     \
    while (context.next_assigned(instance));        \
  }
DISTMK_TASK_TYPES(DISTMK_COUNT)
#undef DISTMK_COUNT

// What schedulers run in place of body_scheduler_step() in programs whose tasks are jobs.
void body_job_step(Context& context, const SchedulerStepArgs& args) { body_scheduler_step(context, args); }
void body_draft_step(Context& context, const SchedulerStepArgs& args) { body_scheduler_step(context, args); }

}  // namespace distmk
