// What a warp does with one head: its norm and its rotation.
#pragma once
#include "device/comm/lamport.cuh"
#include "device/core/shared.cuh"

namespace distmk {
namespace attention {

DISTMK_FN float warp_sum(float value) {
  for (uint32_t step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

constexpr uint32_t MAX_HEAD_DIM = 128;  // four elements a lane

// Norm and rotation of one head, by a warp, times `scale`; pairs are (e, e + dim / 2). A lane hands on elements e and
// e + 1, e even, as keep(e, both). All loads go out before the first is used; `src` is perhaps still `arriving`.
template <class Keep>
DISTMK_FN void norm_and_rotate(const Context& context, bool polls, const float* src, const float* norm,
                               const float* rope, float eps, uint32_t dim, float scale, const Keep& keep) {
  const uint32_t e = threadIdx.x % 32 * 2, half = dim / 2;
  const bool here = e < half;
  const auto load = [&](const float* from) {
    return from && here ? __ldcg(reinterpret_cast<const float2*>(from)) : float2{1, 1};
  };
  const float2 cosine = load(rope + e), sine = load(rope + e + half);
  const float2 norm_a = load(norm ? norm + e : nullptr), norm_b = load(norm ? norm + e + half : nullptr);
  float2 a, b;
  context.poll(polls, [&] {
    const float* from = src + (here ? e : 0);
    a = poll_load(reinterpret_cast<const float2*>(from));
    b = poll_load(reinterpret_cast<const float2*>(from + half));
    const auto there = [](const float2& v) { return __float_as_uint(v.x) && __float_as_uint(v.y); };
    return there(a) && there(b);
  });
  if (norm) {
    const float squares = warp_sum(here ? a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y : 0.0f);
    scale *= rsqrtf(__fdividef(squares, static_cast<float>(dim)) + eps);
  }
  if (!here) return;
  a = {a.x * norm_a.x * scale, a.y * norm_a.y * scale};
  b = {b.x * norm_b.x * scale, b.y * norm_b.y * scale};
  keep(e, float2{a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y});
  keep(e + half, float2{b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y});
}

}  // namespace attention
}  // namespace distmk
