// Task types: their bodies, what else the runtime asks of them, and the dispatch from a descriptor to both. A type's
// traits are generated from its dataclass (TaskTraits in abi.h), so this file and its users name no type.
#pragma once
#include "runtime/context.h"

namespace distmk {

// Every task type defines its body, in host/bodies and under device/.
#define DISTMK_DECLARE_BODY(id, name, Args) DISTMK_BODY void body_##name(Context& context, const Args& args);
DISTMK_TASK_TYPES(DISTMK_DECLARE_BODY)
#undef DISTMK_DECLARE_BODY

// A type that COUNTS_WORK_ITEMS also defines, in both places, how many instances it has in an iteration (at most
// max_instances).
#define DISTMK_DECLARE_HOOK(id, name, Args) \
  DISTMK_BODY uint32_t num_work_items(const Context& context, const Args& args);
DISTMK_TASK_TYPES_COUNTS_WORK_ITEMS(DISTMK_DECLARE_HOOK)
#undef DISTMK_DECLARE_HOOK

template <uint32_t TYPE>
using TraitsOf = TaskTraits<static_cast<TaskType>(TYPE)>;

template <class Args>
DISTMK_FN const Args& args_of(const TaskDesc& task) {
  return *reinterpret_cast<const Args*>(task.args);
}

// Instances that a massive launch has in this iteration. The body of a spread task counts them itself.
DISTMK_FN uint32_t num_instances([[maybe_unused]] const Context& context, const TaskDesc& task) {
  switch (task.type) {
#define DISTMK_CASE(id, name, Args) \
  case id:                          \
    return num_work_items(context, args_of<Args>(task));
    DISTMK_TASK_TYPES_COUNTS_WORK_ITEMS(DISTMK_CASE)
#undef DISTMK_CASE
  }
  return task.max_instances;
}

// The body of a type that workers run.
template <uint32_t TYPE>
DISTMK_FN void run_body_of(Context& context) {
#define DISTMK_IF(id, name, Args) \
  if constexpr (id == TYPE && !TraitsOf<id>::RUNS_ON_SCHEDULER) body_##name(context, args_of<Args>(*context.task.desc));
  DISTMK_TASK_TYPES(DISTMK_IF)
#undef DISTMK_IF
}
DISTMK_FN void run_body(Context& context) {
  switch (context.task.desc->type) {
#define DISTMK_CASE(id, name, Args) \
  case id:                          \
    return run_body_of<id>(context);
    DISTMK_TASK_TYPES(DISTMK_CASE)
#undef DISTMK_CASE
  }
}

// The body of a type that schedulers run. If there is only one such type, nothing is compared.
DISTMK_FN void run_scheduler_body(Context& context) {
#define DISTMK_COUNT(id, name, Args) +1
  constexpr uint32_t NUM_TYPES = DISTMK_TASK_TYPES_RUNS_ON_SCHEDULER(DISTMK_COUNT);
#undef DISTMK_COUNT
#define DISTMK_IF(id, name, Args) \
  if (NUM_TYPES == 1 || context.task.desc->type == id) return body_##name(context, args_of<Args>(*context.task.desc));
  DISTMK_TASK_TYPES_RUNS_ON_SCHEDULER(DISTMK_IF)
#undef DISTMK_IF
}

}  // namespace distmk
