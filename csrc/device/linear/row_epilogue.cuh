// Where a linear task puts a single row's values. Behind the last warp's sums everybody waits for one instruction after
// another, so all that does not need them is worked out before.
#pragma once
#include "device/comm/lamport.cuh"
#include "runtime/context.h"

namespace distmk {
namespace linear {

// Of one weight row's value. Nowhere, as it is made; one by one, or the compiler would load zeros from memory.
struct RowGoal {
  __nv_bfloat16 *out_bf16, *cleared_rounded;
  float *out, *reset;
  float bias, up_bias;
  uint32_t up_rows;  // SWIGLU: so many rows behind a gate's sum is its up's

  DISTMK_FN RowGoal() {
    out_bf16 = cleared_rounded = nullptr;
    out = reset = nullptr;
    bias = up_bias = 0.0f;
    up_rows = 0;
  }
  // PUSH: on `rank`, if a pointer reaches it.
  DISTMK_FN void find(const Context& context, const LinearArgs& args, uint32_t column, uint32_t rank) {
    if (const float* biases = context.at<float>(args.bias)) {
      bias = biases[column];
      if (up_rows) up_bias = biases[args.n + column];
    }
    const auto at = [&](auto* begin) { return begin ? begin + column : nullptr; };
    switch (static_cast<Epilogue>(args.epilogue)) {
      case Epilogue::PUSH:
        out = at(context.peer<float>(rank, args.out));
        break;
      case Epilogue::SWIGLU:
        find_rounded(context, args, args.out, column);
        break;
      default:
        out = at(context.at<float>(args.out));
        if (args.out_bf16)
          find_rounded(context, args, args.out_bf16, column);
        else
          reset = at(context.at<float>(args.reset));
    }
  }
  DISTMK_FN void store(float value) const {
    if (out_bf16) LamportVector{out_bf16, cleared_rounded}.store(0, value);  // first: others look for it
    if (out) publish(out, value);
    if (reset) publish_store(reset, 0.0f);
  }

 private:
  DISTMK_FN void find_rounded(const Context& context, const LinearArgs& args, uint64_t operand, uint32_t column) {
    out_bf16 = context.at<__nv_bfloat16>(operand) + column;
    auto* before = context.at<__nv_bfloat16>(args.reset);
    cleared_rounded = before ? before + column : nullptr;
  }
};

}  // namespace linear
}  // namespace distmk
