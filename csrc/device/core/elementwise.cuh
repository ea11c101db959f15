// Bodies of the elementwise tasks, which exist to test and measure the runtime.
#pragma once
#include "platform/platform.h"
#include "runtime/context.h"

namespace distmk {

DISTMK_FN void body_nop(Context&, const NopArgs&) {}

DISTMK_FN void body_affine(Context& context, const AffineArgs& args) {
  const auto* src = context.at<float>(args.src);
  auto* dst = context.at<float>(args.dst);
  for (uint32_t i = context.team.index; i < args.num; i += context.team.size)
    dst[i] = __ldcg(src + i) * args.scale + args.shift;
}

// Each thread computes several elements at once: each sine depends on the one before it, and a worker has too few warps
// to hide that latency.
DISTMK_FN void body_sine(Context& context, const SineArgs& args) {
  constexpr uint32_t AT_ONCE = 4;
  const auto* src = context.at<float>(args.src);
  auto* dst = context.at<float>(args.dst);
  const uint32_t step = context.team.size;
  for (uint32_t first = context.team.index; first < args.num; first += AT_ONCE * step) {
    float values[AT_ONCE] = {};
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; ++i)
      if (first + i * step < args.num) values[i] = __ldcg(src + first + i * step);
    DISTMK_NO_UNROLL
    for (uint32_t n = 0; n < args.times; ++n)
#pragma unroll
      for (uint32_t i = 0; i < AT_ONCE; ++i) values[i] = sinf(values[i]);
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; ++i)
      if (first + i * step < args.num) dst[first + i * step] = values[i];
  }
}

}  // namespace distmk
