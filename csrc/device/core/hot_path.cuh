// The hot path: bodies of the tasks that every token waits for, inlined into the consumers' loop. The dispatcher
// decides which tasks take it, so that the consumers look nothing up. All other tasks take the cold path
// (consumers.cuh).
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

// A type with several HOT_VARIANTS defines two hooks beside its body, under device/:
//   find_hot_variant  whether a variant exists for these arguments in this iteration, and which
//   run_hot_variant   runs it
// A type with one variant runs its body.
#define DISTMK_DECLARE_HOOKS(id, name, Args)                                                    \
  DISTMK_FN bool find_hot_variant(const RankState& state, const Args& args, uint32_t* variant); \
  DISTMK_FN void run_hot_variant(Context& context, const Args& args, uint32_t variant);
DISTMK_TASK_TYPES_HOT_VARIANTS(DISTMK_DECLARE_HOOKS)
#undef DISTMK_DECLARE_HOOKS

// A type that MAY_IDLE also defines is_idle, under device/ or in a header that is included there: whether this
// iteration has no work for the task. Such a task is complete even if its waits are not met, and its body does nothing
// if they are met. A whole warp calls it.
#define DISTMK_DECLARE_HOOK(id, name, Args) \
  DISTMK_FN bool is_idle(const RankState& state, const Team& warp, const Args& args);
DISTMK_TASK_TYPES_MAY_IDLE(DISTMK_DECLARE_HOOK)
#undef DISTMK_DECLARE_HOOK
template <uint32_t TYPE>
DISTMK_FN bool has_nothing_to_do(const RankState& state, const TaskDesc& task) {
  if constexpr (TraitsOf<TYPE>::MAY_IDLE)
    return is_idle(state, {threadIdx.x % 32, 32}, args_of<typename TraitsOf<TYPE>::Args>(task));
  return false;
}

// Whether the previous iteration had more rows than this one. Its extra rows must then be zeroed, because a Lamport
// buffer (device/comm/lamport.cuh) must be all zero before its next use, for any number of rows. That is rare, so the
// cold path does it (consumers.cuh).
DISTMK_FN bool batch_shrank(const Batch* batch) { return batch && batch->num_reset_rows > batch->num_rows; }

// A type with RESETS_ROWS defines this hook beside its body, under device/. It zeroes rows batch.num_rows to
// batch.num_reset_rows in the columns of `args.lamport_reset` that the task writes.
#define DISTMK_DECLARE_HOOK(id, name, Args) \
  DISTMK_FN void reset_stale_rows(const Context& context, const Args& args, const Batch& batch);
DISTMK_TASK_TYPES_RESETS_ROWS(DISTMK_DECLARE_HOOK)
#undef DISTMK_DECLARE_HOOK

// Called by all threads that have run the body of a task of this type.
template <uint32_t TYPE>
DISTMK_FN void reset_stale_rows(const Context& context) {
  if constexpr (TraitsOf<TYPE>::RESETS_ROWS) {
    const auto& args = args_of<typename TraitsOf<TYPE>::Args>(*context.task.desc);
    const Batch* batch = context.batch(args.batch);
    if (args.lamport_reset && batch_shrank(batch)) reset_stale_rows(context, args, *batch);
  }
}

// The hot path, or the cold one if rows must be zeroed that only the previous iteration had.
template <class Traits>
DISTMK_FN uint32_t hot_path_or_cold(const RankState& state, const typename Traits::Args& args, uint32_t variant,
                                    uint32_t cold) {
  if constexpr (Traits::RESETS_ROWS)
    return batch_shrank(state.batch(args.batch)) ? cold : Traits::CODE_PATH + variant;
  else
    return Traits::CODE_PATH + variant;
}

// A hot type takes the cold path in four cases. The transport may be needed; the task is spread, and its body runs only
// one instance; no variant exists for its arguments; or rows must be zeroed (hot_path_or_cold).
DISTMK_FN uint32_t code_path_of(const RankState& state, const Action& action) {
  if (action.kind == ActionKind::LEAVE) return CodePath::LEAVE;
  const TaskDesc& task = *action.task.desc;
  const uint32_t cold = CodePath::COLD + task.type;
  if (state.transport || (is_spread(task) && !loops_over_instances(task.type))) return cold;
  switch (task.type) {
#define DISTMK_CASE(id, name, Args) \
  case id:                          \
    return hot_path_or_cold<TraitsOf<id>>(state, args_of<Args>(task), 0, cold);
    DISTMK_TASK_TYPES_HOT(DISTMK_CASE)
#undef DISTMK_CASE
#define DISTMK_CASE(id, name, Args)                                    \
  case id: {                                                           \
    const auto& args = args_of<Args>(task);                            \
    uint32_t variant;                                                  \
    if (!find_hot_variant(state, args, &variant)) return cold;         \
    return hot_path_or_cold<TraitsOf<id>>(state, args, variant, cold); \
  }
    DISTMK_TASK_TYPES_HOT_VARIANTS(DISTMK_CASE)
#undef DISTMK_CASE
    default:
      return cold;
  }
}

DISTMK_FN uint32_t current_code_path() { return shared().handshake.code_path[handshake_slot(task_number())].get(); }

// Runs the current task's hot body, which is entered before the task's waits are met. The type with the highest code
// paths needs no comparison.
DISTMK_FN void run_hot_body(Context& context) {
  const TaskDesc& task = *context.task.desc;
  const uint32_t code_path = current_code_path();
  switch (code_path) {
    default:
#define DISTMK_IF(id, name, Args)                                               \
  if (TraitsOf<id>::CODE_PATH + TraitsOf<id>::HOT_VARIANTS == CodePath::COLD || \
      code_path - TraitsOf<id>::CODE_PATH < TraitsOf<id>::HOT_VARIANTS)         \
    return run_hot_variant(context, args_of<Args>(task), current_code_path() - TraitsOf<id>::CODE_PATH);
      DISTMK_TASK_TYPES_HOT_VARIANTS(DISTMK_IF)
#undef DISTMK_IF
      return;
#define DISTMK_CASE(id, name, Args) \
  case TraitsOf<id>::CODE_PATH:     \
    return body_##name(context, args_of<Args>(task));
      DISTMK_TASK_TYPES_HOT(DISTMK_CASE)
#undef DISTMK_CASE
  }
}

}  // namespace distmk
