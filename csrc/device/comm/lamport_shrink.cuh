// An iteration of fewer rows than the one before leaves zero what that left of the others, too: places of vectors that
// arrive must be zero in all rows when there are more again. It seldom happens, so who writes a vector does it beside
// the consumers' loop.
#pragma once
#include "device/comm/lamport.cuh"
#include "runtime/splits.h"

namespace distmk {

DISTMK_FN bool batch_shrank(const Batch* batch) { return batch && batch->num_reset_rows > batch->num_rows; }

// Rows that the last iteration had more, of columns that arrive: those that a body has not cleared.
template <class T>
DISTMK_FN void reset_rows(const Context& context, const Batch& batch, T* columns, uint32_t num_cols, uint32_t stride) {
  DISTMK_NO_UNROLL
  for (uint32_t row = batch.num_rows; row < batch.num_reset_rows; ++row) {
    DISTMK_NO_UNROLL
    for (uint32_t i = context.team.index; i < num_cols; i += context.team.size)
      publish_store(columns + uint64_t{row} * stride + i, 0);
  }
}
// Of all columns that a task clears.
template <class T, class Args>
DISTMK_FN void reset_columns(const Context& context, const Args& args, const Batch& batch, uint32_t num_cols,
                             uint32_t stride) {
  reset_rows(context, batch, context.at<T>(args.reset), num_cols, stride);
}

DISTMK_FN void reset_stale_rows(const Context& context, const LinearArgs& args, const Batch& batch) {
  if (args.out_bf16)
    reset_columns<__nv_bfloat16>(context, args, batch, args.n, args.out_bf16_stride);
  else if (args.epilogue == static_cast<uint32_t>(Epilogue::SWIGLU))
    reset_columns<__nv_bfloat16>(context, args, batch, args.n, args.out_stride);
  else
    reset_columns<float>(context, args, batch, args.n, args.out_stride);
}
DISTMK_FN void reset_stale_rows(const Context& context, const EmbedArgs& args, const Batch& batch) {
  reset_columns<__nv_bfloat16>(context, args, batch, args.n, args.out_bf16_stride);
}
DISTMK_FN void reset_stale_rows(const Context& context, const SumArgs& args, const Batch& batch) {
  reset_columns<__nv_bfloat16>(context, args, batch, args.num, args.out_bf16_stride);
}
DISTMK_FN void reset_stale_rows(const Context& context, const CombineArgs& args, const Batch& batch) {
  DISTMK_NO_UNROLL
  for (uint32_t i = 0; i < args.num_slices; ++i) {
    const CombineSlice slice(args, i);
    auto* columns = context.at<__nv_bfloat16>(args.reset) + slice.head * args.head_dim + slice.begin;
    reset_rows(context, batch, columns, slice.end - slice.begin, args.out_stride);
  }
}

// By all who have run the body of a task of that type.
template <TaskType TYPE>
DISTMK_FN void reset_stale_rows(const Context& context) {
  const auto clear = [&](const auto& args) {
    const Batch* batch = context.batch(args.batch);
    if (args.reset && batch_shrank(batch)) reset_stale_rows(context, args, *batch);
  };
  const auto* args = context.task.desc->args;
  if constexpr (TYPE == TaskType::LINEAR)
    clear(*reinterpret_cast<const LinearArgs*>(args));
  else if constexpr (TYPE == TaskType::EMBED)
    clear(*reinterpret_cast<const EmbedArgs*>(args));
  else if constexpr (TYPE == TaskType::SUM)
    clear(*reinterpret_cast<const SumArgs*>(args));
  else if constexpr (TYPE == TaskType::COMBINE)
    clear(*reinterpret_cast<const CombineArgs*>(args));
}

}  // namespace distmk
