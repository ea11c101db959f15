// The body for GPUs and the emulator: all 256 consumer threads of a worker run it. `__ldcg` reads past L1, which may
// still have values from before another worker wrote them.
#pragma once
#include "runtime/context.h"

namespace distmk {

DISTMK_FN void body_axpy(Context& context, const AxpyArgs& args) {
  const float* x = context.at<float>(args.x);
  float* y = context.at<float>(args.y);
  for (uint32_t i = context.team.index; i < args.num; i += context.team.size)
    y[i] = __ldcg(y + i) + args.a * __ldcg(x + i);
  if (!args.copy) return;
  context.team.sync();  // other threads copy what this one has written
  context.push(args.copy_rank, args.copy, y, args.num * sizeof(float));
}

}  // namespace distmk
