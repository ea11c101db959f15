// The tasks that every token waits for, where no network lies between.
#pragma once
#include "device/bodies/attention.cuh"
#include "device/bodies/basic.cuh"
#include "device/bodies/linear.cuh"
#include "device/bodies/merge.cuh"

namespace distmk {

// OFTEN_WITH_ROWS: of several token rows, up to a tile of them, or MANY.
enum class Frequency { SELDOM, OFTEN, OFTEN_WITH_ROWS, OFTEN_WITH_MANY_ROWS };

DISTMK_FN Frequency frequency_of(const RankState& state, const TaskDesc& task) {
  if (state.far) return Frequency::SELDOM;
  switch (static_cast<TaskType>(task.type)) {
    case TaskType::ATTENTION:
    case TaskType::MERGE:
    case TaskType::SUM:
      return Frequency::OFTEN;
    case TaskType::LINEAR: {
      const auto& args = *reinterpret_cast<const LinearArgs*>(task.args);
      const uint32_t num_rows = linear::num_rows(state, args);
      const linear::Rows rows = linear::kind_of_rows(state, args, num_rows);
      if (rows != linear::Rows::ALIGNED) return rows == linear::Rows::ONE ? Frequency::OFTEN : Frequency::SELDOM;
      return num_rows <= TILE_TOKENS ? Frequency::OFTEN_WITH_ROWS : Frequency::OFTEN_WITH_MANY_ROWS;
    }
    default:
      return Frequency::SELDOM;
  }
}

template <uint32_t TILES>
DISTMK_FN void run_rows_body(Context& context) {
  const auto& args = *reinterpret_cast<const LinearArgs*>(context.task.desc->args);
  linear::run<TILES, linear::Rows::ALIGNED>(context, args, linear::num_rows(context.rank_state, args));
}

DISTMK_FN void run_frequent_body(Context& context) {
  const auto* args = context.task.desc->args;
  switch (static_cast<TaskType>(context.task.desc->type)) {
    case TaskType::LINEAR:
      return linear::run<1, linear::Rows::ONE>(context, *reinterpret_cast<const LinearArgs*>(args), 1);
    case TaskType::ATTENTION:
      return body_attention(context, *reinterpret_cast<const AttentionArgs*>(args));
    case TaskType::MERGE:
      return body_merge(context, *reinterpret_cast<const MergeArgs*>(args));
    default:
      return body_sum(context, *reinterpret_cast<const SumArgs*>(args));
  }
}

}  // namespace distmk
