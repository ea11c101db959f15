// The tasks that every token waits for, where no network lies between: which they are the waiter finds out.
#pragma once
#include "device/attention/attention.cuh"
#include "device/attention/combine.cuh"
#include "device/comm/lamport_shrink.cuh"
#include "device/comm/reduce.cuh"
#include "device/linear/linear.cuh"

namespace distmk {

DISTMK_FN uint32_t route_of(const RankState& state, const Action& action) {
  if (action.kind == ActionKind::LEAVE) return Route::LEAVE;
  const TaskDesc& task = *action.task.desc;
  const auto type = static_cast<TaskType>(task.type);
  const uint32_t other = Route::OTHER + task.type;
  // Of what is spread only attention takes its share by itself.
  if (state.far || (is_spread(task) && type != TaskType::ATTENTION)) return other;
  const auto unless_fewer = [&](const auto& args, uint32_t route) {
    return has_fewer_rows(state.batch(args.batch)) ? other : route;
  };
  switch (type) {
    case TaskType::ATTENTION:
      return Route::ATTENTION;
    case TaskType::MERGE:
      return unless_fewer(*reinterpret_cast<const MergeArgs*>(task.args), Route::MERGE);
    case TaskType::SUM:
      return unless_fewer(*reinterpret_cast<const SumArgs*>(task.args), Route::SUM);
    case TaskType::LINEAR: {
      const auto& args = *reinterpret_cast<const LinearArgs*>(task.args);
      const uint32_t rows = linear::num_rows(state, args);
      return linear::is_aligned(state, args, rows) ? unless_fewer(args, Route::LINEAR + rows) : other;
    }
    default:
      return other;
  }
}

DISTMK_FN uint32_t current_route() { return shared().handoff.route[task_place(task_number())].get(); }

// All of them ask by themselves when their inputs are ready.
DISTMK_FN void run_frequent_body(Context& context) {
  const auto* args = context.task.desc->args;
  switch (current_route()) {
    default:
      return linear::run_by_rows<true>(context, *reinterpret_cast<const LinearArgs*>(args),
                                       current_route() - Route::LINEAR);
    case Route::ATTENTION:
      return body_attention(context, *reinterpret_cast<const AttentionArgs*>(args));
    case Route::MERGE:
      return body_merge(context, *reinterpret_cast<const MergeArgs*>(args));
    case Route::SUM:
      return body_sum(context, *reinterpret_cast<const SumArgs*>(args));
  }
}

}  // namespace distmk
