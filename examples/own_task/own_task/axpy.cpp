// The body for the host twin: one thread runs it.
#include "runtime/context.h"

namespace distmk {

void body_axpy(Context& context, const AxpyArgs& args) {
  const float* x = context.at<float>(args.x);
  float* y = context.at<float>(args.y);
  for (uint32_t i = 0; i < args.num; ++i) y[i] += args.a * x[i];
  if (args.copy) context.push(args.copy_rank, args.copy, y, args.num * sizeof(float));
}

}  // namespace distmk
