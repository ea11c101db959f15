// Split-KV attention over the paged cache, and the merge of its splits. A warp takes every NUM_WARPS-th position of the
// split for a block of queries at a time; the warps' results are merged in shared memory, in warp order.
#pragma once
#include "device/bodies/basic.cuh"
#include "device/shared.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace attention {

constexpr uint32_t QUERIES = 4;            // of a block: query heads x token rows, kept in registers
constexpr uint32_t MAX_LANE_ELEMENTS = 8;  // head_dim up to 256
constexpr uint32_t AHEAD = 4;              // positions a warp has loads in flight for

struct Head {
  uint32_t dim, elements;  // elements a lane: lane, lane + 32, ...
  DISTMK_FN explicit Head(uint32_t head_dim) : dim(head_dim), elements((head_dim + 31) / 32) {}
};

DISTMK_FN float warp_sum(float value) {
  for (uint32_t step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Norm and rotation of one head, by a warp; lane holds elements lane + 32 i. Pairs are (e, e + dim / 2).
DISTMK_FN void norm_and_rotate(const float* src, const float* norm, const float* rope, float eps, const Head& head,
                               float* staged) {
  const uint32_t lane = threadIdx.x % 32, half = head.dim / 2;
  float squares = 0;
  for (uint32_t e = lane; e < head.dim; e += 32) {
    const float v = __ldcg(src + e);
    squares += v * v;
    staged[e] = v;
  }
  __syncwarp();
  const float scale = norm ? rsqrtf(warp_sum(squares) / static_cast<float>(head.dim) + eps) : 1.0f;
  for (uint32_t e = lane; e < half; e += 32) {
    const float a = staged[e] * scale * (norm ? norm[e] : 1.0f);
    const float b = staged[e + half] * scale * (norm ? norm[e + half] : 1.0f);
    const float cosine = rope[e], sine = rope[half + e];
    staged[e] = a * cosine - b * sine;
    staged[e + half] = b * cosine + a * sine;
  }
  __syncwarp();
}

struct Work {
  Context& context;
  const AttentionArgs& args;
  Head head;
  AttentionInstance instance;
  BatchRun run;
  uint32_t first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin, end;             // positions of this split
  const int32_t* pages;

  DISTMK_FN uint64_t cache_index(uint32_t position) const {
    const auto page = static_cast<uint64_t>(__ldcg(pages + position / args.page_size));
    return ((page * args.num_kv + instance.kv_head) * args.page_size + position % args.page_size) * head.dim;
  }
  DISTMK_FN const float* qkv(uint32_t row, uint32_t head_index) const {
    return context.at<float>(args.qkv) + uint64_t{run.row_begin + row} * args.qkv_stride +
           uint64_t{head_index} * head.dim;
  }
  DISTMK_FN const float* rope(uint32_t position) const {
    return context.at<float>(args.rope) + uint64_t{position} * head.dim;
  }
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - run.num_rows); }
};

// The split that owns a new position appends its K and V; a warp a position.
DISTMK_FN void append(const Work& w, float* staged) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = max(w.begin, w.first_new());
  auto* k_cache = w.context.at<__nv_bfloat16>(w.args.k_cache);
  auto* v_cache = w.context.at<__nv_bfloat16>(w.args.v_cache);
  for (uint32_t position = first + warp; position < w.end; position += NUM_WARPS) {
    const uint32_t row = position - w.first_new();
    const uint64_t at = w.cache_index(position);
    norm_and_rotate(w.qkv(row, w.args.num_q + w.instance.kv_head), w.context.at<float>(w.args.k_norm), w.rope(position),
                    w.args.eps, w.head, staged);
    const float* v = w.qkv(row, w.args.num_q + w.args.num_kv + w.instance.kv_head);
    for (uint32_t e = lane; e < w.head.dim; e += 32) {
      k_cache[at + e] = __float2bfloat16_rn(staged[e]);
      v_cache[at + e] = __float2bfloat16_rn(__ldcg(v + e));
    }
    __syncwarp();
  }
}

struct Partial {
  float maximum, sum, acc[MAX_LANE_ELEMENTS];
};

// One block of queries over this warp's positions. Query i of the block is head i % num_heads of row i / num_heads.
template <uint32_t ELEMENTS>
DISTMK_FN void attend(const Work& w, uint32_t first_query, uint32_t count, const float* queries,
                      Partial (&part)[QUERIES]) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* k_cache = w.context.at<__nv_bfloat16>(w.args.k_cache);
  const auto* v_cache = w.context.at<__nv_bfloat16>(w.args.v_cache);
  float q[QUERIES][MAX_LANE_ELEMENTS];
#pragma unroll
  for (uint32_t i = 0; i < QUERIES; ++i) {
    part[i].maximum = -INFINITY;
    part[i].sum = 0;
#pragma unroll
    for (uint32_t e = 0; e < MAX_LANE_ELEMENTS; ++e) {
      const uint32_t d = lane + 32 * e;
      part[i].acc[e] = 0;
      q[i][e] = i < count && d < w.head.dim ? queries[i * w.head.dim + d] : 0.0f;
    }
  }
  // Loads of several positions go out before the first is used: a trip to memory each would take longer than the rest.
  for (uint32_t first = w.begin + warp; first < w.end; first += NUM_WARPS * AHEAD) {
    __nv_bfloat16 k[AHEAD][MAX_LANE_ELEMENTS], v[AHEAD][MAX_LANE_ELEMENTS];
#pragma unroll
    for (uint32_t a = 0; a < AHEAD; ++a) {
      const uint32_t position = first + a * NUM_WARPS;
      const uint64_t at = position < w.end ? w.cache_index(position) : 0;
#pragma unroll
      for (uint32_t e = 0; e < ELEMENTS; ++e) {
        const uint32_t d = lane + 32 * e;
        const bool here = position < w.end && d < w.head.dim;
        k[a][e] = here ? __ldcg(k_cache + at + d) : __float2bfloat16_rn(0.0f);
        v[a][e] = here ? __ldcg(v_cache + at + d) : __float2bfloat16_rn(0.0f);
      }
    }
#pragma unroll
    for (uint32_t a = 0; a < AHEAD; ++a) {
      const uint32_t position = first + a * NUM_WARPS;
      if (position >= w.end) break;
#pragma unroll
      for (uint32_t i = 0; i < QUERIES; ++i) {
        if (i >= count) break;
        const uint32_t row = (first_query + i) / w.num_heads;
        if (position > w.first_new() + row) continue;  // causal
        float score = 0;
#pragma unroll
        for (uint32_t e = 0; e < ELEMENTS; ++e) score += q[i][e] * __bfloat162float(k[a][e]);
        score = warp_sum(score);
        const float maximum = fmaxf(part[i].maximum, score);
        const float keep = __expf(part[i].maximum - maximum), weight = __expf(score - maximum);
        part[i].maximum = maximum;
        part[i].sum = part[i].sum * keep + weight;
#pragma unroll
        for (uint32_t e = 0; e < ELEMENTS; ++e)
          part[i].acc[e] = part[i].acc[e] * keep + weight * __bfloat162float(v[a][e]);
      }
    }
  }
}

// Merges the warps' partial results of a block and writes them out.
DISTMK_FN void write_block(const Work& w, uint32_t first_query, uint32_t count, Partial (&part)[QUERIES],
                           float* merged) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = 2 + w.head.dim;
#pragma unroll
  for (uint32_t i = 0; i < QUERIES; ++i) {
    if (i >= count) break;
    float* mine = merged + (warp * QUERIES + i) * stride;
    if (lane == 0) mine[0] = part[i].maximum, mine[1] = part[i].sum;
#pragma unroll
    for (uint32_t e = 0; e < MAX_LANE_ELEMENTS; ++e)
      if (lane + 32 * e < w.head.dim) mine[2 + lane + 32 * e] = part[i].acc[e];
  }
  w.context.team.sync();
  for (uint32_t i = warp; i < count; i += NUM_WARPS) {
    const uint32_t query = first_query + i, row = query / w.num_heads, head = w.first_head + query % w.num_heads;
    float maximum = -INFINITY, sum = 0;
    for (uint32_t other = 0; other < NUM_WARPS; ++other)
      maximum = fmaxf(maximum, merged[(other * QUERIES + i) * stride]);
    float* out = w.context.at<float>(w.args.part) +
                 ((uint64_t{head} * MAX_ROWS + w.run.row_begin + row) * w.args.max_splits + w.instance.split) * stride;
    for (uint32_t d = lane; d < w.head.dim + 1; d += 32) {  // the sum, then the accumulator
      sum = 0;
      for (uint32_t other = 0; other < NUM_WARPS; ++other) {
        const float* theirs = merged + (other * QUERIES + i) * stride;
        if (theirs[0] > -INFINITY) sum += theirs[1 + d] * __expf(theirs[0] - maximum);
      }
      out[1 + d] = sum;
    }
    if (lane == 0) out[0] = maximum;
  }
  w.context.team.sync();
}

}  // namespace attention

DISTMK_FN void body_attention(Context& context, const AttentionArgs& args) {
  using namespace attention;
  const Batch& batch = *context.at<Batch>(args.batch);
  const AttentionInstance instance = attention_instance(args, batch, context.instance);
  Work w{context, args, Head(args.head_dim), instance, batch.runs[instance.run]};
  const uint32_t model_kv = args.kv_begin + instance.kv_head;
  const uint32_t first = max(model_kv * args.group, args.q_begin),
                 last = min((model_kv + 1) * args.group, args.q_begin + args.num_q);
  w.first_head = first - args.q_begin;
  w.num_heads = last - first;
  const auto kv_len = static_cast<uint32_t>(w.run.kv_len);
  w.begin = split_begin(kv_len, instance.split, instance.num_splits);
  w.end = split_begin(kv_len, instance.split + 1, instance.num_splits);
  w.pages = context.at<int32_t>(args.page_table) + uint64_t(w.run.slot) * args.max_pages;

  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* staged = reinterpret_cast<float*>(shared().scratch) + warp * args.head_dim;
  append(w, staged);
  context.team.sync();  // what was appended is read by all warps of this block, and by no other this iteration
  float* queries = reinterpret_cast<float*>(shared().vector);
  float* merged = queries + QUERIES * args.head_dim;
  const uint32_t num_queries = w.num_heads * static_cast<uint32_t>(w.run.num_rows);
  const float scale = rsqrtf(static_cast<float>(args.head_dim));
  for (uint32_t block = 0; block < num_queries; block += QUERIES) {
    const uint32_t count = min(QUERIES, num_queries - block);
    for (uint32_t i = warp; i < count; i += NUM_WARPS) {
      const uint32_t row = (block + i) / w.num_heads, head = w.first_head + (block + i) % w.num_heads;
      norm_and_rotate(w.qkv(row, head), context.at<float>(args.q_norm), w.rope(w.first_new() + row), args.eps, w.head,
                      staged);
      for (uint32_t e = lane; e < args.head_dim; e += 32) queries[i * args.head_dim + e] = staged[e] * scale;
      __syncwarp();
    }
    context.team.sync();
    Partial part[QUERIES];
    if (args.head_dim <= 64)
      attend<2>(w, block, count, queries, part);
    else if (args.head_dim <= 128)
      attend<4>(w, block, count, queries, part);
    else
      attend<MAX_LANE_ELEMENTS>(w, block, count, queries, part);
    write_block(w, block, count, part, merged);
  }
}

DISTMK_FN void body_merge(Context& context, const MergeArgs& args) {
  const Batch& batch = *context.at<Batch>(args.batch);
  const uint32_t stride = 2 + args.head_dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t r = 0; r < batch.num_runs; ++r) {
    const BatchRun run = batch.runs[r];
    const uint32_t splits = num_splits(batch, run, args.num_kv, args.num_workers, args.min_split, args.max_splits);
    for (uint32_t i = warp; i < args.num_heads * run.num_rows; i += NUM_WARPS) {
      const uint32_t head = i % args.num_heads, row = run.row_begin + i / args.num_heads;
      const float* parts = context.at<float>(args.part) + (uint64_t{head} * MAX_ROWS + row) * args.max_splits * stride;
      float maximum = -INFINITY;
      for (uint32_t s = 0; s < splits; ++s) maximum = fmaxf(maximum, __ldcg(parts + s * stride));
      float total = 0;
      for (uint32_t s = 0; s < splits; ++s)
        total += __ldcg(parts + s * stride + 1) * __expf(__ldcg(parts + s * stride) - maximum);
      float* out = context.at<float>(args.out) + uint64_t{row} * args.out_stride + head * args.head_dim;
      for (uint32_t d = lane; d < args.head_dim; d += 32) {
        float acc = 0;
        for (uint32_t s = 0; s < splits; ++s)
          acc += __ldcg(parts + s * stride + 2 + d) * __expf(__ldcg(parts + s * stride) - maximum);
        out[d] = acc / total;
      }
    }
  }
}

}  // namespace distmk
