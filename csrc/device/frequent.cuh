// The tasks that every token waits for, where no network lies between.
#pragma once
#include "device/bodies/attention.cuh"
#include "device/bodies/basic.cuh"
#include "device/bodies/linear.cuh"
#include "device/bodies/merge.cuh"

namespace distmk {

DISTMK_FN bool is_frequent(const RankState& state, const TaskDesc& task) {
  if (state.far) return false;
  const auto type = static_cast<TaskType>(task.type);
  if (type == TaskType::ATTENTION || type == TaskType::MERGE || type == TaskType::SUM) return true;
  return type == TaskType::LINEAR && linear::is_single(state, *reinterpret_cast<const LinearArgs*>(task.args));
}

DISTMK_FN void run_frequent_body(Context& context) {
  const auto* args = context.task.desc->args;
  switch (static_cast<TaskType>(context.task.desc->type)) {
    case TaskType::LINEAR:
      return linear::run<1, true>(context, *reinterpret_cast<const LinearArgs*>(args), 1);
    case TaskType::ATTENTION:
      return body_attention(context, *reinterpret_cast<const AttentionArgs*>(args));
    case TaskType::MERGE:
      return body_merge(context, *reinterpret_cast<const MergeArgs*>(args));
    default:
      return body_sum(context, *reinterpret_cast<const SumArgs*>(args));
  }
}

}  // namespace distmk
