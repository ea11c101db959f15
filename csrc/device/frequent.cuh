// The tasks that every token waits for, where no network lies between.
#pragma once
#include "device/bodies/attention.cuh"
#include "device/bodies/basic.cuh"
#include "device/bodies/linear.cuh"
#include "device/bodies/merge.cuh"

namespace distmk {

DISTMK_FN bool is_frequent(const RankState& state, const TaskDesc& task) {
  if (state.far) return false;
  switch (static_cast<TaskType>(task.type)) {
    case TaskType::ATTENTION:
    case TaskType::MERGE:
    case TaskType::SUM:
      return true;
    case TaskType::LINEAR: {
      const auto& args = *reinterpret_cast<const LinearArgs*>(task.args);
      return linear::is_aligned(state, args, linear::num_rows(state, args));
    }
    default:
      return false;
  }
}

DISTMK_FN void run_frequent_body(Context& context) {
  const auto* args = context.task.desc->args;
  switch (static_cast<TaskType>(context.task.desc->type)) {
    case TaskType::LINEAR: {
      const auto& linear_args = *reinterpret_cast<const LinearArgs*>(args);
      return linear::run_by_rows<true>(context, linear_args, linear::num_rows(context.rank_state, linear_args));
    }
    case TaskType::ATTENTION:
      return body_attention(context, *reinterpret_cast<const AttentionArgs*>(args));
    case TaskType::MERGE:
      return body_merge(context, *reinterpret_cast<const MergeArgs*>(args));
    default:
      return body_sum(context, *reinterpret_cast<const SumArgs*>(args));
  }
}

}  // namespace distmk
