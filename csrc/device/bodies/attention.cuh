// Split-KV attention over the paged cache. A few lanes take a position together, 16 bytes
// of its K and V each; the partial results of all positions are merged in shared memory, in a fixed order.
#pragma once
#include "device/heads.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace attention {

constexpr uint32_t QUERIES = 4;   // of a block: query heads x token rows, kept in registers
constexpr uint32_t ELEMENTS = 8;  // of a head that a lane looks after: 16 bytes of bf16
constexpr uint32_t AHEAD = 4;     // positions a lane has loads in flight for

struct Work {
  Context& context;
  const AttentionArgs& args;
  AttentionInstance instance;
  BatchRun run;
  uint32_t first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin, end;             // positions of this split
  const int32_t* pages;
  uint32_t page_shift;  // a page holds a power of two of positions

  DISTMK_FN uint32_t page_of(uint32_t position) const {
    return static_cast<uint32_t>(__ldcg(pages + (position >> page_shift)));
  }
  DISTMK_FN uint64_t cache_index(uint32_t position, uint32_t page) const {
    const uint64_t line = (uint64_t{page} * args.num_kv + instance.kv_head) << page_shift;
    return (line + (position & (args.page_size - 1))) * args.head_dim;
  }
  DISTMK_FN const float* qkv(uint32_t row, uint32_t head_index) const {
    return context.at<float>(args.qkv) + uint64_t{run.row_begin + row} * args.qkv_stride +
           uint64_t{head_index} * args.head_dim;
  }
  DISTMK_FN const float* rope(uint32_t position) const {
    return context.at<float>(args.rope) + uint64_t{position} * args.head_dim;
  }
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - run.num_rows); }
};

// The split that owns a new position appends its K and V; a warp a position, of those that norm no query meanwhile.
DISTMK_FN void append(const Work& w, uint32_t warp, uint32_t num_warps, float* staged) {
  const uint32_t lane = threadIdx.x % 32, first = max(w.begin, w.first_new());
  auto* k_cache = w.context.at<__nv_bfloat16>(w.args.k_cache);
  auto* v_cache = w.context.at<__nv_bfloat16>(w.args.v_cache);
  for (uint32_t position = first + warp; position < w.end; position += num_warps) {
    const uint32_t row = position - w.first_new();
    const uint64_t at = w.cache_index(position, w.page_of(position));
    const float* v = w.qkv(row, w.args.num_q + w.args.num_kv + w.instance.kv_head);
    float values[2 * MAX_PAIRS];
#pragma unroll
    for (uint32_t i = 0; i < 2 * MAX_PAIRS; ++i)
      if (lane + 32 * i < w.args.head_dim) values[i] = __ldcg(v + lane + 32 * i);
    norm_and_rotate(w.qkv(row, w.args.num_q + w.instance.kv_head), w.context.at<float>(w.args.k_norm), w.rope(position),
                    w.args.eps, w.args.head_dim, 1.0f, staged);
#pragma unroll
    for (uint32_t i = 0; i < 2 * MAX_PAIRS; ++i) {
      const uint32_t e = lane + 32 * i;
      if (e >= w.args.head_dim) break;
      k_cache[at + e] = __float2bfloat16_rn(staged[e]);
      v_cache[at + e] = __float2bfloat16_rn(values[i]);
    }
    __syncwarp();
  }
}

// The queries of a block, normed, rotated and scaled, into shared memory; a warp a query.
DISTMK_FN void stage_queries(const Work& w, uint32_t first_query, uint32_t count, float* queries) {
  const uint32_t warp = threadIdx.x / 32, dim = w.args.head_dim;
  if (warp >= count) return;
  const uint32_t row = (first_query + warp) / w.num_heads, head = w.first_head + (first_query + warp) % w.num_heads;
  norm_and_rotate(w.qkv(row, head), w.context.at<float>(w.args.q_norm), w.rope(w.first_new() + row), w.args.eps, dim,
                  rsqrtf(static_cast<float>(dim)), queries + warp * dim);
}

DISTMK_FN void unpack(const uint4& packed, float (&values)[ELEMENTS]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);  // a bf16 is the upper half of a float
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

struct Partial {
  float maximum, sum, acc[ELEMENTS];

  // Two more positions; a score of minus infinity is one that is not seen.
  DISTMK_FN void add(float score0, float score1, const float (&v0)[ELEMENTS], const float (&v1)[ELEMENTS]) {
    const float higher = fmaxf(maximum, fmaxf(score0, score1));
    if (higher == -INFINITY) return;
    const float keep = __expf(maximum - higher), weight0 = __expf(score0 - higher), weight1 = __expf(score1 - higher);
    maximum = higher;
    sum = sum * keep + (weight0 + weight1);
#pragma unroll
    for (uint32_t e = 0; e < ELEMENTS; ++e) acc[e] = acc[e] * keep + (weight0 * v0[e] + weight1 * v1[e]);
  }

  // With the partial of the lane `step` away, which holds the same elements of other positions.
  DISTMK_FN void merge(uint32_t step) {
    const float other = __shfl_xor_sync(~0u, maximum, step), higher = fmaxf(maximum, other);
    const float mine = maximum > -INFINITY ? __expf(maximum - higher) : 0.0f;
    const float theirs = other > -INFINITY ? __expf(other - higher) : 0.0f;
    sum = sum * mine + __shfl_xor_sync(~0u, sum, step) * theirs;
#pragma unroll
    for (uint32_t e = 0; e < ELEMENTS; ++e) acc[e] = acc[e] * mine + __shfl_xor_sync(~0u, acc[e], step) * theirs;
    maximum = higher;
  }
};

// The pages of a thread's next positions, `step` apart: looked up while it is busy with those before.
struct PagesAhead {
  uint32_t page[AHEAD];

  DISTMK_FN void look_up(const Work& w, uint32_t position, uint32_t step) {
#pragma unroll
    for (uint32_t a = 0; a < AHEAD; ++a)
      if (position + a * step < w.end) page[a] = w.page_of(position + a * step);
  }
};

// One block of queries over this thread's positions. Query i of the block is head i % num_heads of row i / num_heads.
// `lanes` (a power of two) take a position together; `pages` are those of its first.
DISTMK_FN void attend(const Work& w, uint32_t first_query, uint32_t count, const float* queries, uint32_t lanes,
                      PagesAhead pages, Partial (&part)[QUERIES]) {
  const uint32_t dim = w.args.head_dim, first_element = threadIdx.x % lanes * ELEMENTS;
  const uint32_t group = threadIdx.x / lanes, num_groups = NUM_CONSUMERS / lanes;
  const bool here = first_element < dim;
  const auto* k_cache = w.context.at<__nv_bfloat16>(w.args.k_cache) + first_element;
  const auto* v_cache = w.context.at<__nv_bfloat16>(w.args.v_cache) + first_element;
  uint32_t last[QUERIES];  // position that a query may still see
#pragma unroll
  for (uint32_t i = 0; i < QUERIES; ++i) {
    part[i] = {-INFINITY, 0, {}};
    last[i] = w.first_new() + (first_query + i) / w.num_heads;
  }
  // Every lane goes round as often as its warp's first, for the shuffles.
  const uint32_t warp_first = threadIdx.x / 32 * (32 / lanes);
  for (uint32_t base = w.begin; base + warp_first < w.end; base += num_groups * AHEAD) {
    uint4 k[AHEAD], v[AHEAD];
#pragma unroll
    for (uint32_t a = 0; a < AHEAD; ++a) {
      const uint32_t position = base + a * num_groups + group;
      k[a] = v[a] = uint4{0, 0, 0, 0};
      if (!here || position >= w.end) continue;
      const uint64_t at = w.cache_index(position, pages.page[a]);
      k[a] = __ldcg(reinterpret_cast<const uint4*>(k_cache + at));
      v[a] = __ldcg(reinterpret_cast<const uint4*>(v_cache + at));
    }
    pages.look_up(w, base + num_groups * AHEAD + group, num_groups);
#pragma unroll
    for (uint32_t a = 0; a < AHEAD; a += 2) {
      if (base + a * num_groups + warp_first >= w.end) break;
      const uint32_t position = base + a * num_groups + group;
      float first[ELEMENTS], second[ELEMENTS], scores[QUERIES][2];
      unpack(k[a], first);
      unpack(k[a + 1], second);
#pragma unroll
      for (uint32_t i = 0; i < QUERIES; ++i) {
        // Behind the last query there is room, of which nobody reads the sums; lanes behind the head add zeros.
        const float* q = queries + i * dim + (here ? first_element : 0);
        scores[i][0] = scores[i][1] = 0;
#pragma unroll
        for (uint32_t e = 0; e < ELEMENTS; ++e) {
          scores[i][0] += q[e] * first[e];
          scores[i][1] += q[e] * second[e];
        }
      }
      for (uint32_t step = lanes / 2; step; step >>= 1)
#pragma unroll
        for (uint32_t i = 0; i < QUERIES; ++i) {
          scores[i][0] += __shfl_xor_sync(~0u, scores[i][0], step);
          scores[i][1] += __shfl_xor_sync(~0u, scores[i][1], step);
        }
      unpack(v[a], first);
      unpack(v[a + 1], second);
#pragma unroll
      for (uint32_t i = 0; i < QUERIES; ++i) {
        const uint32_t seen_end = min(w.end, last[i] + 1);
        part[i].add(position < seen_end ? scores[i][0] : -INFINITY,
                    position + num_groups < seen_end ? scores[i][1] : -INFINITY, first, second);
      }
    }
  }
  for (uint32_t step = lanes; step < 32; step <<= 1)
#pragma unroll
    for (uint32_t i = 0; i < QUERIES; ++i) part[i].merge(step);
}

// Merges the warps' partial results of a block and writes them out.
DISTMK_FN void write_block(const Work& w, uint32_t first_query, uint32_t count, uint32_t lanes,
                           Partial (&part)[QUERIES], float* merged) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = 2 + w.args.head_dim;
#pragma unroll
  for (uint32_t i = 0; i < QUERIES; ++i) {
    if (i >= count) break;
    float* mine = merged + (warp * QUERIES + i) * stride;
    if (lane == 0) mine[0] = part[i].maximum, mine[1] = part[i].sum;
    if (lane < lanes && lane * ELEMENTS < w.args.head_dim)
#pragma unroll
      for (uint32_t e = 0; e < ELEMENTS; ++e) mine[2 + lane * ELEMENTS + e] = part[i].acc[e];
  }
  w.context.team.sync();
  // Two warps a query.
  constexpr uint32_t LANES = NUM_CONSUMERS / QUERIES;
  const uint32_t i = threadIdx.x / LANES, query = first_query + i;
  if (i < count) {
    float maximum = -INFINITY, weight[NUM_WARPS];
#pragma unroll
    for (uint32_t other = 0; other < NUM_WARPS; ++other) {
      weight[other] = merged[(other * QUERIES + i) * stride];
      maximum = fmaxf(maximum, weight[other]);
    }
#pragma unroll
    for (uint32_t other = 0; other < NUM_WARPS; ++other)
      weight[other] = weight[other] > -INFINITY ? __expf(weight[other] - maximum) : 0.0f;
    const uint64_t row =
        (uint64_t{w.first_head} + query % w.num_heads) * MAX_ROWS + w.run.row_begin + query / w.num_heads;
    float* out = w.context.at<float>(w.args.part) + (row * w.args.max_splits + w.instance.split) * stride;
    for (uint32_t d = threadIdx.x % LANES; d < stride; d += LANES) {
      float sum = 0;
#pragma unroll
      for (uint32_t other = 0; other < NUM_WARPS; ++other)
        sum += merged[(other * QUERIES + i) * stride + d] * weight[other];
      out[d] = d ? sum : maximum;  // maximum, sum, accumulator
    }
  }
  w.context.team.sync();
}

DISTMK_FN void run_instance(Context& context, const AttentionArgs& args, const Batch& batch, uint32_t index) {
  const AttentionInstance instance = attention_instance(args, batch, index);
  Work w{context, args, instance, batch.runs[instance.run]};
  const uint32_t model_kv = args.kv_begin + instance.kv_head;
  const uint32_t first = max(model_kv * args.group, args.q_begin),
                 last = min((model_kv + 1) * args.group, args.q_begin + args.num_q);
  w.first_head = first - args.q_begin;
  w.num_heads = last - first;
  const auto kv_len = static_cast<uint32_t>(w.run.kv_len);
  w.begin = split_begin(kv_len, instance.split, instance.num_splits);
  w.end = split_begin(kv_len, instance.split + 1, instance.num_splits);
  w.page_shift = 31 - __clz(static_cast<int>(args.page_size));
  w.pages = context.at<int32_t>(args.page_table) + uint64_t(w.run.slot) * args.max_pages;

  float* queries = reinterpret_cast<float*>(shared().vector);
  float* merged = queries + QUERIES * args.head_dim;
  uint32_t lanes = 1;  // that take a position together
  while (lanes * ELEMENTS < args.head_dim) lanes *= 2;
  const uint32_t num_groups = NUM_CONSUMERS / lanes;
  PagesAhead pages;
  pages.look_up(w, w.begin + threadIdx.x / lanes, num_groups);
  const uint32_t num_queries = w.num_heads * static_cast<uint32_t>(w.run.num_rows), warp = threadIdx.x / 32;
  for (uint32_t block = 0; block < num_queries; block += QUERIES) {
    const uint32_t count = min(QUERIES, num_queries - block);
    stage_queries(w, block, count, queries);
    // What is appended is read by all warps of this block, and by no other this iteration.
    if (block == 0 && warp >= QUERIES)
      append(w, warp - QUERIES, NUM_WARPS - QUERIES, reinterpret_cast<float*>(shared().scratch) + warp * args.head_dim);
    context.team.sync();
    Partial part[QUERIES];
    attend(w, block, count, queries, lanes, pages, part);
    write_block(w, block, count, lanes, part, merged);
  }
}

}  // namespace attention

DISTMK_FN void body_attention(Context& context, const AttentionArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  uint32_t instance = context.instance;
  do attention::run_instance(context, args, batch, instance);
  while (context.next_of_share(instance));
}

}  // namespace distmk
