// What a warp does with one head: its norm and its rotation.
#pragma once
#include "device/shared.cuh"

namespace distmk {
namespace attention {

DISTMK_FN float warp_sum(float value) {
  for (uint32_t step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

constexpr uint32_t MAX_PAIRS = 4;  // of a lane: head_dim up to 256

// Norm and rotation of one head, by a warp, times `scale`; pairs are (e, e + dim / 2). All loads go out before the
// first is used.
DISTMK_FN void norm_and_rotate(const float* src, const float* norm, const float* rope, float eps, uint32_t dim,
                               float scale, float* staged) {
  const uint32_t lane = threadIdx.x % 32, half = dim / 2;
  float2 value[MAX_PAIRS], weight[MAX_PAIRS], turn[MAX_PAIRS];
#pragma unroll
  for (uint32_t i = 0; i < MAX_PAIRS; ++i) {
    const uint32_t e = lane + 32 * i;
    value[i] = {0, 0}, weight[i] = {1, 1};
    if (e >= half) continue;
    value[i] = {__ldcg(src + e), __ldcg(src + e + half)};
    if (norm) weight[i] = {__ldcg(norm + e), __ldcg(norm + e + half)};
    turn[i] = {__ldcg(rope + e), __ldcg(rope + e + half)};  // cosine and sine
  }
  if (norm) {
    float squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < MAX_PAIRS; ++i) squares += value[i].x * value[i].x + value[i].y * value[i].y;
    scale *= rsqrtf(warp_sum(squares) / static_cast<float>(dim) + eps);
  }
#pragma unroll
  for (uint32_t i = 0; i < MAX_PAIRS; ++i) {
    const uint32_t e = lane + 32 * i;
    if (e >= half) continue;
    const float a = value[i].x * weight[i].x * scale, b = value[i].y * weight[i].y * scale;
    staged[e] = a * turn[i].x - b * turn[i].y;
    staged[e + half] = b * turn[i].x + a * turn[i].y;
  }
  __syncwarp();
}

}  // namespace attention
}  // namespace distmk
