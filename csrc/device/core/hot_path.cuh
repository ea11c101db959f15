// The tasks that every token waits for, where no network lies between: which they are the waiter finds out.
#pragma once
#include "device/attention/attention.cuh"
#include "device/attention/combine.cuh"
#include "device/comm/lamport_shrink.cuh"
#include "device/comm/reduce.cuh"
#include "device/linear/linear.cuh"

namespace distmk {

DISTMK_FN uint32_t code_path_of(const RankState& state, const Action& action) {
  if (action.kind == ActionKind::LEAVE) return CodePath::LEAVE;
  const TaskDesc& task = *action.task.desc;
  const auto type = static_cast<TaskType>(task.type);
  const uint32_t other = CodePath::OTHER + task.type;
  // Of what is spread only attention takes its share by itself.
  if (state.transport || (is_spread(task) && type != TaskType::ATTENTION)) return other;
  const auto unless_shrunk = [&](const auto& args, uint32_t code_path) {
    return batch_shrank(state.batch(args.batch)) ? other : code_path;
  };
  switch (type) {
    case TaskType::ATTENTION:
      return CodePath::ATTENTION;
    case TaskType::COMBINE:
      return unless_shrunk(*reinterpret_cast<const CombineArgs*>(task.args), CodePath::COMBINE);
    case TaskType::SUM:
      return unless_shrunk(*reinterpret_cast<const SumArgs*>(task.args), CodePath::SUM);
    case TaskType::LINEAR: {
      const auto& args = *reinterpret_cast<const LinearArgs*>(task.args);
      const uint32_t rows = linear::num_rows(state, args);
      return linear::is_aligned(state, args, rows) ? unless_shrunk(args, CodePath::LINEAR + rows) : other;
    }
    default:
      return other;
  }
}

DISTMK_FN uint32_t current_code_path() { return shared().handshake.code_path[handshake_slot(task_number())].get(); }

// All of them ask by themselves when their inputs are ready.
DISTMK_FN void run_hot_body(Context& context) {
  const auto* args = context.task.desc->args;
  switch (current_code_path()) {
    default:
      return linear::run_by_rows<true>(context, *reinterpret_cast<const LinearArgs*>(args),
                                       current_code_path() - CodePath::LINEAR);
    case CodePath::ATTENTION:
      return body_attention(context, *reinterpret_cast<const AttentionArgs*>(args));
    case CodePath::COMBINE:
      return body_combine(context, *reinterpret_cast<const CombineArgs*>(args));
    case CodePath::SUM:
      return body_sum(context, *reinterpret_cast<const SumArgs*>(args));
  }
}

}  // namespace distmk
