// Helpers for bodies that go row by row in a job iteration: a worker's rows, and arithmetic on four columns at a time.
#pragma once
#include "device/core/bf16.cuh"
#include "device/core/vectors.cuh"
#include "runtime/job_batch.h"

namespace distmk {
namespace jobs {

// The vector functions take four columns, or one column if rows are not aligned to 16 bytes.
DISTMK_FN void load_if(bool wanted, const float* p, float4& v) {
  v = wanted ? __ldcg(reinterpret_cast<const float4*>(p)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
}
DISTMK_FN void load_if(bool wanted, const float* p, float& v) { v = wanted ? __ldcg(p) : 0.0f; }
DISTMK_FN float4 sum(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DISTMK_FN float sum(float a, float b) { return a + b; }
// x + y * scale * weight
DISTMK_FN float add_product(float x, float y, float scale, float weight) { return x + y * scale * weight; }
DISTMK_FN float4 add_product(const float4& x, const float4& y, float scale, const float4& weight) {
  return {add_product(x.x, y.x, scale, weight.x), add_product(x.y, y.y, scale, weight.y),
          add_product(x.z, y.z, scale, weight.z), add_product(x.w, y.w, scale, weight.w)};
}
DISTMK_FN void store_scaled(__nv_bfloat16* to, const float4& v, float scale) {
  *reinterpret_cast<uint2*>(to) = {pack_bf16(v.x * scale, v.y * scale), pack_bf16(v.z * scale, v.w * scale)};
}
DISTMK_FN void store_scaled(__nv_bfloat16* to, float v, float scale) { *to = __float2bfloat16_rn(v * scale); }
DISTMK_FN float product(float a, float b) { return a * b; }
DISTMK_FN float4 product(const float4& a, const float4& b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
// Stores pairs of columns in two places, or one column in the first.
DISTMK_FN void store_pairs(__nv_bfloat16* to, uint64_t first, uint64_t second, const float4& v, float scale) {
  *reinterpret_cast<uint32_t*>(to + first) = pack_bf16(v.x * scale, v.y * scale);
  *reinterpret_cast<uint32_t*>(to + second) = pack_bf16(v.z * scale, v.w * scale);
}
DISTMK_FN void store_pairs(__nv_bfloat16* to, uint64_t first, uint64_t, float v, float scale) {
  store_scaled(to + first, v, scale);
}

// A worker's rows: first, first + step, ... below `end`. 2^`log_parts` workers share each row.
struct WorkerRows {
  uint32_t first, step, count;

  DISTMK_FN WorkerRows(const Context& context, uint32_t end, uint32_t log_parts = 0) {
    first = context.instance >> log_parts;
    step = context.rank_state.program->num_workers;
    count = first < end ? (end - first + step - 1) / step : 0;
  }
  DISTMK_FN uint32_t at(uint32_t i) const { return first + i * step; }
};

}  // namespace jobs
}  // namespace distmk
