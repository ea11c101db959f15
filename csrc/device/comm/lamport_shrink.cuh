// An iteration of fewer rows than the one before leaves zero what that left of the others, too: places of vectors that
// arrive must be zero in all rows when there are more again. It seldom happens, so who writes a vector does it beside
// the consumers' loop.
#pragma once
#include "device/comm/lamport.cuh"
#include "runtime/splits.h"

namespace distmk {

DISTMK_FN bool has_fewer_rows(const Batch* batch) { return batch && batch->num_cleared > batch->num_rows; }

// Rows that the last iteration had more, of columns that arrive: those that a body has not cleared.
template <class T>
DISTMK_FN void clear_rows(const Context& context, const Batch& batch, T* columns, uint32_t num_cols, uint32_t stride) {
  DISTMK_ROLLED
  for (uint32_t row = batch.num_rows; row < batch.num_cleared; ++row) {
    DISTMK_ROLLED
    for (uint32_t i = context.team.index; i < num_cols; i += context.team.size)
      store_arriving(columns + uint64_t{row} * stride + i, 0);
  }
}
// Of all columns that a task clears.
template <class T, class Args>
DISTMK_FN void clear_columns(const Context& context, const Args& args, const Batch& batch, uint32_t num_cols,
                             uint32_t stride) {
  clear_rows(context, batch, context.at<T>(args.cleared), num_cols, stride);
}

DISTMK_FN void clear_more(const Context& context, const LinearArgs& args, const Batch& batch) {
  if (args.rounded)
    clear_columns<__nv_bfloat16>(context, args, batch, args.n, args.rounded_stride);
  else if (args.epilogue == static_cast<uint32_t>(Epilogue::SWIGLU))
    clear_columns<__nv_bfloat16>(context, args, batch, args.n, args.out_stride);
  else
    clear_columns<float>(context, args, batch, args.n, args.out_stride);
}
DISTMK_FN void clear_more(const Context& context, const EmbedArgs& args, const Batch& batch) {
  clear_columns<__nv_bfloat16>(context, args, batch, args.n, args.rounded_stride);
}
DISTMK_FN void clear_more(const Context& context, const SumArgs& args, const Batch& batch) {
  clear_columns<__nv_bfloat16>(context, args, batch, args.num, args.rounded_stride);
}
DISTMK_FN void clear_more(const Context& context, const MergeArgs& args, const Batch& batch) {
  DISTMK_ROLLED
  for (uint32_t i = 0; i < args.num_slices; ++i) {
    const MergeSlice slice(args, i);
    auto* columns = context.at<__nv_bfloat16>(args.cleared) + slice.head * args.head_dim + slice.begin;
    clear_rows(context, batch, columns, slice.end - slice.begin, args.out_stride);
  }
}

// By all who have run the body of a task of that type.
template <TaskType TYPE>
DISTMK_FN void clear_more(const Context& context) {
  const auto clear = [&](const auto& args) {
    const Batch* batch = context.batch(args.batch);
    if (args.cleared && has_fewer_rows(batch)) clear_more(context, args, *batch);
  };
  const auto* args = context.task.desc->args;
  if constexpr (TYPE == TaskType::LINEAR)
    clear(*reinterpret_cast<const LinearArgs*>(args));
  else if constexpr (TYPE == TaskType::EMBED)
    clear(*reinterpret_cast<const EmbedArgs*>(args));
  else if constexpr (TYPE == TaskType::SUM)
    clear(*reinterpret_cast<const SumArgs*>(args));
  else if constexpr (TYPE == TaskType::MERGE)
    clear(*reinterpret_cast<const MergeArgs*>(args));
}

}  // namespace distmk
