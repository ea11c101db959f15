// Element-wise tasks on the host.
#include <cmath>

#include "runtime/context.h"

namespace distmk {

void body_nop(Context&, const NopArgs&) {}

void body_affine(Context& context, const AffineArgs& args) {
  const float* src = context.at<float>(args.src);
  float* dst = context.at<float>(args.dst);
  for (uint32_t i = 0; i < args.num; ++i) dst[i] = src[i] * args.scale + args.shift;
}

void body_sine(Context& context, const SineArgs& args) {
  const float* src = context.at<float>(args.src);
  float* dst = context.at<float>(args.dst);
  for (uint32_t i = 0; i < args.num; ++i) {
    float value = src[i];
    for (uint32_t n = 0; n < args.times; ++n) value = std::sin(value);
    dst[i] = value;
  }
}

}  // namespace distmk
