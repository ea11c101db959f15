// The hot path: bodies of the tasks that every token waits for, inlined into the consumers' loop. The dispatcher
// decides which tasks take it, so that the consumers look nothing up; all others take the cold path (consumers.cuh).
#pragma once
#include "device/core/shared.cuh"

namespace distmk {

// A type with several HOT_VARIANTS defines beside its body, under device/:
//   find_hot_variant  whether there is a variant for these arguments in this iteration, and which
//   run_hot_variant   runs it
// A type with one variant runs its body.
#define DISTMK_DECLARE_HOOKS(id, name, Args)                                                    \
  DISTMK_FN bool find_hot_variant(const RankState& state, const Args& args, uint32_t* variant); \
  DISTMK_FN void run_hot_variant(Context& context, const Args& args, uint32_t variant);
DISTMK_TASK_TYPES_HOT_VARIANTS(DISTMK_DECLARE_HOOKS)
#undef DISTMK_DECLARE_HOOKS

// A type that MAY_IDLE also defines under device/, or in a header that is included there, whether an iteration has
// nothing for the task: it is then complete, whether or not its waits are met. The body does nothing if they are met. A
// warp asks.
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

// After the batch has shrunk, rows are reset: all rows of a Lamport buffer (device/comm/lamport.cuh) must be zero when
// it is used again, for however many rows. That is rare, so it is left to the cold path (consumers.cuh).
DISTMK_FN bool batch_shrank(const Batch* batch) { return batch && batch->num_reset_rows > batch->num_rows; }

// A type with RESETS_ROWS defines beside its body, under device/: it resets, in the columns of `args.reset` that the
// task writes, the rows from batch.num_rows to batch.num_reset_rows.
#define DISTMK_DECLARE_HOOK(id, name, Args) \
  DISTMK_FN void reset_stale_rows(const Context& context, const Args& args, const Batch& batch);
DISTMK_TASK_TYPES_RESETS_ROWS(DISTMK_DECLARE_HOOK)
#undef DISTMK_DECLARE_HOOK

// By all threads that have run the body of a task of that type.
template <uint32_t TYPE>
DISTMK_FN void reset_stale_rows(const Context& context) {
  if constexpr (TraitsOf<TYPE>::RESETS_ROWS) {
    const auto& args = args_of<typename TraitsOf<TYPE>::Args>(*context.task.desc);
    const Batch* batch = context.batch(args.batch);
    if (args.reset && batch_shrank(batch)) reset_stale_rows(context, args, *batch);
  }
}

// A hot type takes the cold path if the transport may be needed, if its body would run one of several instances, or if
// rows have to be reset that only the iteration before had.
template <class Traits>
DISTMK_FN uint32_t path_unless_shrunk(const RankState& state, const typename Traits::Args& args, uint32_t variant,
                                      uint32_t cold) {
  if constexpr (Traits::RESETS_ROWS)
    return batch_shrank(state.batch(args.batch)) ? cold : Traits::CODE_PATH + variant;
  else
    return Traits::CODE_PATH + variant;
}
DISTMK_FN uint32_t code_path_of(const RankState& state, const Action& action) {
  if (action.kind == ActionKind::LEAVE) return CodePath::LEAVE;
  const TaskDesc& task = *action.task.desc;
  const uint32_t cold = CodePath::COLD + task.type;
  if (state.transport || (is_spread(task) && !runs_shares(task.type))) return cold;
  switch (task.type) {
#define DISTMK_CASE(id, name, Args) \
  case id:                          \
    return path_unless_shrunk<TraitsOf<id>>(state, args_of<Args>(task), 0, cold);
    DISTMK_TASK_TYPES_HOT(DISTMK_CASE)
#undef DISTMK_CASE
#define DISTMK_CASE(id, name, Args)                                      \
  case id: {                                                             \
    const auto& args = args_of<Args>(task);                              \
    uint32_t variant;                                                    \
    if (!find_hot_variant(state, args, &variant)) return cold;           \
    return path_unless_shrunk<TraitsOf<id>>(state, args, variant, cold); \
  }
    DISTMK_TASK_TYPES_HOT_VARIANTS(DISTMK_CASE)
#undef DISTMK_CASE
    default:
      return cold;
  }
}

DISTMK_FN uint32_t current_code_path() { return shared().handshake.code_path[handshake_slot(task_number())].get(); }

// A body of the hot path, entered before its task's waits are met. The type with the last paths needs no comparison.
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
