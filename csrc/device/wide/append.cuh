// QK-norm and RoPE of a wide iteration's rows, and the append of their keys and values to the KV cache. A worker takes
// the heads of all its rows together, some lanes of a warp a head, so that many loads are in flight.
#pragma once
#include "device/core/bf16.cuh"
#include "device/wide/runs.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t APPENDED_ROWS = 64;   // at once
constexpr uint32_t HEADS_IN_FLIGHT = 4;  // of a lane

struct AppendedRow {
  uint32_t row, position, cache_row;  // the last: of KV head 0
};
struct AppendState {
  BatchRun runs[MAX_ROWS];
  AppendedRow rows[APPENDED_ROWS];
};
static_assert(sizeof(AppendState) <= WORK_BYTES, "");

DISTMK_FN float4 unpack_bf16(const uint2& v) {
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
          __uint_as_float(v.y & 0xffff0000u)};
}
DISTMK_FN float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
DISTMK_FN float4 product(const float4& a, const float4& b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DISTMK_FN float4 scaled(const float4& a, float by) { return {a.x * by, a.y * by, a.z * by, a.w * by}; }

// What a lane has of a head: four elements of each half, which RoPE pairs.
struct HeadPart {
  uint2 first, second;
};

// The lanes of a head: 2^n of them, of which the first head_dim / 8 have elements.
struct HeadLanes {
  uint32_t size, index;

  DISTMK_FN explicit HeadLanes(uint32_t head_dim) {
    size = 1;
    while (8 * size < head_dim) size *= 2;
    index = threadIdx.x % size;
  }
  DISTMK_FN float sum(float v) const {
    for (uint32_t step = 1; step < size; step *= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
  }
};

// y = RoPE(x / rms(x) * norm); `norm` null: none. By all lanes of a warp, `has_elements` or not.
DISTMK_FN void norm_and_rotate(const HeadLanes& lanes, HeadPart& part, bool has_elements, const float* norm,
                               const float* rope, uint32_t dim, float eps) {
  const uint32_t e = 4 * lanes.index, half = dim / 2;
  float4 a = unpack_bf16(part.first), b = unpack_bf16(part.second);
  const float squares = lanes.sum(has_elements ? dot(a, a) + dot(b, b) : 0.0f);
  if (!has_elements) return;
  if (norm) {
    const float scale = rsqrtf(__fdividef(squares, static_cast<float>(dim)) + eps);
    a = scaled(product(a, *reinterpret_cast<const float4*>(norm + e)), scale);
    b = scaled(product(b, *reinterpret_cast<const float4*>(norm + half + e)), scale);
  }
  const float4 cosine = *reinterpret_cast<const float4*>(rope + e),
               sine = *reinterpret_cast<const float4*>(rope + half + e);
  part.first = {pack_bf16(a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y),
                pack_bf16(a.z * cosine.z - b.z * sine.z, a.w * cosine.w - b.w * sine.w)};
  part.second = {pack_bf16(b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y),
                 pack_bf16(b.z * cosine.z + a.z * sine.z, b.w * cosine.w + a.w * sine.w)};
}

// A head of a row: a query, a key or a value.
struct AppendedHead {
  const AppendedRow& row;
  uint32_t index;  // queries first, then keys, then values

  DISTMK_FN const __nv_bfloat16* source(const Context& context, const WideAppendArgs& args) const {
    return context.at<__nv_bfloat16>(args.qkv) + uint64_t{row.row} * args.qkv_stride + uint64_t{index} * args.head_dim;
  }
  DISTMK_FN void store(const Context& context, const WideAppendArgs& args, uint32_t e, const HeadPart& part) const {
    const uint32_t dim = args.head_dim;
    __nv_bfloat16* to;
    uint32_t swizzle = 0;
    if (index < args.num_q) {
      to = context.at<__nv_bfloat16>(args.q) + uint64_t{row.row} * args.q_stride + uint64_t{index} * dim;
    } else {
      const bool is_key = index < args.num_q + args.num_kv;
      const uint32_t kv_head = index - args.num_q - (is_key ? 0 : args.num_kv), p = row.position;
      to = context.at<__nv_bfloat16>(is_key ? args.k_cache : args.v_cache) +
           uint64_t{row.cache_row + kv_head * args.page_size} * dim;
      if (swizzles_cache(dim, args.page_size)) swizzle = 8 * (p % 8 ^ p % 2 * 4);
    }
    *reinterpret_cast<uint2*>(to + (e ^ swizzle)) = part.first;
    *reinterpret_cast<uint2*>(to + (e + dim / 2 ^ swizzle)) = part.second;
  }
};

// All heads of `num_rows` rows of the state.
DISTMK_FN void append_rows(const Context& context, const WideAppendArgs& args, const AppendState& state,
                           uint32_t num_rows) {
  const uint32_t dim = args.head_dim, heads = args.num_q + 2 * args.num_kv, num_heads = num_rows * heads;
  const HeadLanes lanes(dim);
  const uint32_t e = 4 * lanes.index, step = NUM_CONSUMERS / lanes.size;
  const float *q_norm = args.q_norm ? context.at<float>(args.q_norm) : nullptr,
              *k_norm = args.k_norm ? context.at<float>(args.k_norm) : nullptr, *rope = context.at<float>(args.rope);
  for (uint32_t first = 0; first < num_heads; first += HEADS_IN_FLIGHT * step) {
    const auto head_at = [&](uint32_t i) { return first + i * step + context.team.index / lanes.size; };
    HeadPart parts[HEADS_IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < HEADS_IN_FLIGHT; ++i) {
      const uint32_t at = min(head_at(i), num_heads - 1), in_half = e < dim / 2 ? e : 0;
      const __nv_bfloat16* from = AppendedHead{state.rows[at / heads], at % heads}.source(context, args) + in_half;
      parts[i] = {__ldcg(reinterpret_cast<const uint2*>(from)), __ldcg(reinterpret_cast<const uint2*>(from + dim / 2))};
    }
#pragma unroll
    for (uint32_t i = 0; i < HEADS_IN_FLIGHT; ++i) {
      const uint32_t at = min(head_at(i), num_heads - 1);
      const bool has_elements = head_at(i) < num_heads && e < dim / 2;
      const AppendedHead head{state.rows[at / heads], at % heads};
      HeadPart part = parts[i];
      const bool rotates = has_elements && head.index < args.num_q + args.num_kv;
      norm_and_rotate(lanes, part, rotates, head.index < args.num_q ? q_norm : k_norm,
                      rope + uint64_t{head.row.position} * dim, dim, args.eps);
      if (has_elements) head.store(context, args, e, part);
    }
  }
}

}  // namespace wide

DISTMK_FN void body_wide_append(Context& context, const WideAppendArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  const uint32_t num_rows = batch.num_wide_rows, num_runs = batch.num_wide_runs;
  const uint32_t num_workers = context.rank_state.program->num_workers, thread = context.team.index;
  if (context.instance >= num_rows) return;
  auto& state = *reinterpret_cast<wide::AppendState*>(shared().work);
  wide::load_runs(context, args.batch, num_runs, state.runs);
  context.team.sync();
  const uint32_t own_rows = (num_rows - context.instance + num_workers - 1) / num_workers;
  for (uint32_t first = 0; first < own_rows; first += wide::APPENDED_ROWS) {
    const uint32_t in_group = min(own_rows - first, wide::APPENDED_ROWS);
    if (thread < in_group) {
      const uint32_t row = context.instance + (first + thread) * num_workers;
      const WideRow found = wide_row(state.runs, num_runs, row);
      state.rows[thread] = {row, found.position, wide::cache_row(context, args, found.slot, 0, found.position)};
    }
    context.team.sync();
    wide::append_rows(context, args, state, in_group);
    if (first + in_group < own_rows) context.team.sync();
  }
  fence_copies();  // the caches are also read by bulk copies
}

}  // namespace distmk
