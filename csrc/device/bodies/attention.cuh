// Split-KV attention over the paged cache, on tensor cores. A query and a softmax weight are each two bf16, high and
// low half, so nothing is lost to rounding but the cache's own. A warp takes CHUNK positions at a time, straight from
// the cache into registers; what the warps have found is merged in shared memory, in a fixed order.
#pragma once
#include "device/heads.cuh"
#include "device/matrix.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace attention {

constexpr uint32_t QUERIES = 8;  // of a block: query heads x token rows; their low halves are the other eight rows
constexpr uint32_t CHUNK = 16;   // positions: one product's depth where weights meet values
constexpr uint32_t MERGE_STRIDE = MAX_HEAD_DIM + 4;  // of a warp's result for a query: accumulator, maximum, sum
constexpr uint32_t NOT_CACHED = ~0u;

struct Work {
  Context& context;
  const AttentionArgs& args;
  AttentionInstance instance;
  BatchRun run;
  uint32_t first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin, end;             // positions of this split
  const int32_t* pages;
  uint32_t page_shift;  // a page holds a power of two of positions

  DISTMK_FN uint32_t line_of(uint32_t position) const {
    const auto page = static_cast<uint32_t>(__ldcg(pages + (position >> page_shift)));
    return ((page * args.num_kv + instance.kv_head) << page_shift) + (position & (args.page_size - 1));
  }
  DISTMK_FN const float* qkv(uint32_t row, uint32_t head_index) const {
    return context.at<float>(args.qkv) + uint64_t{run.row_begin + row} * args.qkv_stride +
           uint64_t{head_index} * args.head_dim;
  }
  DISTMK_FN const float* rope(uint32_t position) const {
    return context.at<float>(args.rope) + uint64_t{position} * args.head_dim;
  }
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - run.num_rows); }
  DISTMK_FN bool is_new(uint32_t position) const { return position >= first_new() && position < end; }

  DISTMK_FN uint32_t first_chunk() const { return begin / CHUNK; }
  DISTMK_FN uint32_t num_chunks() const { return (end + CHUNK - 1) / CHUNK - first_chunk(); }
  // The first warps are busy with queries when the cache is read, so chunks are dealt from the last one on.
  DISTMK_FN uint32_t chunk_turn() const { return NUM_WARPS - 1 - threadIdx.x / 32; }

  // In shared memory, rows of bf16: keys and values of new positions, then the block's queries, high halves first.
  DISTMK_FN uint32_t stride() const { return (args.head_dim + 31) / 32 * 32 + 8; }
  DISTMK_FN __nv_bfloat16* new_key(uint32_t row) const {
    return reinterpret_cast<__nv_bfloat16*>(shared().vector) + row * stride();
  }
  DISTMK_FN __nv_bfloat16* new_value(uint32_t row) const { return new_key(MAX_ROWS + row); }
  DISTMK_FN __nv_bfloat16* query(uint32_t i) const { return new_key(2 * MAX_ROWS + i); }
  // Over the queries once they are done with.
  DISTMK_FN float* merged(uint32_t turn, uint32_t query_index) const {
    return reinterpret_cast<float*>(new_key(2 * MAX_ROWS)) + (turn * QUERIES + query_index) * MERGE_STRIDE;
  }
};

static_assert(2 * MAX_ROWS * (MAX_HEAD_DIM + 8) * sizeof(__nv_bfloat16) +
                      NUM_WARPS * QUERIES * MERGE_STRIDE * sizeof(float) <=
                  VECTOR_BYTES + SCRATCH_BYTES,
              "what warps have found must fit behind the new keys and values");

// The split that owns a new position appends its K and V; a warp a position, from the first that norms no query on.
DISTMK_FN void append(const Work& w, uint32_t first_warp) {
  const uint32_t lane = threadIdx.x % 32, dim = w.args.head_dim, first = max(w.begin, w.first_new());
#pragma unroll 1
  for (uint32_t position = first + (threadIdx.x / 32 - first_warp) % NUM_WARPS; position < w.end;
       position += NUM_WARPS) {
    const uint32_t row = position - w.first_new();
    const uint64_t at = uint64_t{w.line_of(position)} * dim;
    const float* from = w.qkv(row, w.args.num_q + w.args.num_kv + w.instance.kv_head);
    const float4 v = 4 * lane < dim ? __ldcg(reinterpret_cast<const float4*>(from) + lane) : float4{};
    norm_and_rotate(w.qkv(row, w.args.num_q + w.instance.kv_head), w.context.at<float>(w.args.k_norm), w.rope(position),
                    w.args.eps, dim, 1.0f, [&](uint32_t e, float2 pair) {
                      const uint32_t packed = pack_bf16(pair.x, pair.y);
                      *reinterpret_cast<uint32_t*>(w.context.at<__nv_bfloat16>(w.args.k_cache) + at + e) = packed;
                      *reinterpret_cast<uint32_t*>(w.new_key(row) + e) = packed;
                    });
    if (4 * lane >= dim) continue;
    const uint2 packed = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
    reinterpret_cast<uint2*>(w.context.at<__nv_bfloat16>(w.args.v_cache) + at)[lane] = packed;
    reinterpret_cast<uint2*>(w.new_value(row))[lane] = packed;
  }
}

// The queries of a block, normed, rotated and scaled; a warp a query.
DISTMK_FN void stage_queries(const Work& w, uint32_t first_query, uint32_t count) {
  const uint32_t i = threadIdx.x / 32, dim = w.args.head_dim;
  if (i >= count) return;
  const uint32_t row = (first_query + i) / w.num_heads, head = w.first_head + (first_query + i) % w.num_heads;
  norm_and_rotate(w.qkv(row, head), w.context.at<float>(w.args.q_norm), w.rope(w.first_new() + row), w.args.eps, dim,
                  rsqrtf(static_cast<float>(dim)), [&](uint32_t e, float2 pair) {
                    *reinterpret_cast<uint32_t*>(w.query(i) + e) = pack_bf16(pair.x, pair.y);
                    *reinterpret_cast<uint32_t*>(w.query(QUERIES + i) + e) =
                        pack_bf16(low_half(pair.x), low_half(pair.y));
                  });
}

// A chunk as this lane holds it: of two columns of positions, and of four positions that weights meet together.
struct Tile {
  uint4 k[2][MAX_HEAD_DIM / 32], v[4][MAX_HEAD_DIM / 64];
};

DISTMK_FN uint32_t group_of_lane() { return threadIdx.x % 32 / 4; }
DISTMK_FN uint32_t place_in_group() { return threadIdx.x % 4; }
DISTMK_FN uint32_t key_place(uint32_t i) { return 8 * i + group_of_lane(); }                     // i < 2
DISTMK_FN uint32_t value_place(uint32_t i) { return 2 * place_in_group() + i % 2 + i / 2 * 8; }  // i < 4
DISTMK_FN uint32_t key_element(uint32_t j) { return 32 * j + 8 * place_in_group(); }
DISTMK_FN uint32_t value_element(uint32_t j) { return 64 * j + 8 * group_of_lane(); }

// Lines of the cache, a lane a position of the chunk; of positions that it does not hold, none.
DISTMK_FN uint32_t look_up(const Work& w, uint32_t chunk) {
  const uint32_t position = chunk * CHUNK + threadIdx.x % CHUNK;
  return position >= w.begin && position < min(w.end, w.first_new()) ? w.line_of(position) : NOT_CACHED;
}

DISTMK_FN uint4 load_cached(const __nv_bfloat16* cache, uint32_t line, uint32_t element, uint32_t dim) {
  if (line == NOT_CACHED || element >= dim) return {0, 0, 0, 0};
  return __ldcg(reinterpret_cast<const uint4*>(cache + uint64_t{line} * dim + element));
}

DISTMK_FN void load_keys(const Work& w, uint32_t lines, Tile& tile) {
  const auto* cache = w.context.at<__nv_bfloat16>(w.args.k_cache);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t line = __shfl_sync(~0u, lines, key_place(i));
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j)
      tile.k[i][j] = load_cached(cache, line, key_element(j), w.args.head_dim);
  }
}

DISTMK_FN void load_values(const Work& w, uint32_t lines, Tile& tile) {
  const auto* cache = w.context.at<__nv_bfloat16>(w.args.v_cache);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t line = __shfl_sync(~0u, lines, value_place(i));
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j)
      tile.v[i][j] = load_cached(cache, line, value_element(j), w.args.head_dim);
  }
}

// New positions are not read back from the cache but from where they were staged.
DISTMK_FN void patch_keys(const Work& w, uint32_t chunk, Tile& tile) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t position = chunk * CHUNK + key_place(i);
    if (!w.is_new(position)) continue;
    const __nv_bfloat16* from = w.new_key(position - w.first_new());
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j)
      if (key_element(j) < w.args.head_dim) tile.k[i][j] = *reinterpret_cast<const uint4*>(from + key_element(j));
  }
}

DISTMK_FN void patch_values(const Work& w, uint32_t chunk, Tile& tile) {
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t position = chunk * CHUNK + value_place(i);
    if (!w.is_new(position)) continue;
    const __nv_bfloat16* from = w.new_value(position - w.first_new());
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j)
      if (value_element(j) < w.args.head_dim) tile.v[i][j] = *reinterpret_cast<const uint4*>(from + value_element(j));
  }
}

// Scores of the block's queries. Which element is which column of the product is free, as long as queries and keys
// agree: so a lane takes 16 bytes of a key at once.
DISTMK_FN void multiply_keys(const Work& w, const Tile& tile, float (&scores)[2][4]) {
  const __nv_bfloat16 *high = w.query(group_of_lane()), *low = w.query(QUERIES + group_of_lane());
#pragma unroll
  for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j) {
    if (32 * j >= w.args.head_dim) break;
    const uint32_t element = key_element(j);
    uint4 h = {0, 0, 0, 0}, l = h;
    if (element < w.args.head_dim) {
      h = *reinterpret_cast<const uint4*>(high + element);
      l = *reinterpret_cast<const uint4*>(low + element);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      multiply({h.x, l.x, h.y, l.y}, tile.k[i][j].x, tile.k[i][j].y, scores[i]);
      multiply({h.z, l.z, h.w, l.w}, tile.k[i][j].z, tile.k[i][j].w, scores[i]);
    }
  }
}

// What a warp has found over the positions it took.
struct Partial {
  float maximum = -INFINITY, sum = 0;    // of query group_of_lane(); the sum: of this lane's positions, until the end
  float acc[MAX_HEAD_DIM / 16][4] = {};  // of queries 2 t and 2 t + 1, t the place in the group

  // Scores to weights, as columns of a product, high and low halves; the query sees [seen_begin, seen_end).
  DISTMK_FN void weigh(uint32_t chunk, uint32_t seen_begin, uint32_t seen_end, const float (&scores)[2][4],
                       uint32_t (&weights)[2][2]) {
    float s[2][2], top = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t position = chunk * CHUNK + 8 * i + 2 * place_in_group() + e;
        const bool seen = position >= seen_begin && position < seen_end;
        s[i][e] = seen ? scores[i][e] + scores[i][2 + e] : -INFINITY;
        top = fmaxf(top, s[i][e]);
      }
    for (uint32_t step = 1; step < 4; step <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float higher = fmaxf(maximum, top), base = higher > -INFINITY ? higher : 0.0f;
    const float keep = __expf(maximum - base);
    maximum = higher;
    sum *= keep;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float a = __expf(s[i][0] - base), b = __expf(s[i][1] - base);
      sum += a + b;
      weights[0][i] = pack_bf16(a, b);
      weights[1][i] = pack_bf16(low_half(a), low_half(b));
    }
    const float keeps[2] = {__shfl_sync(~0u, keep, 8 * place_in_group()),
                            __shfl_sync(~0u, keep, 8 * place_in_group() + 4)};
#pragma unroll
    for (uint32_t n = 0; n < MAX_HEAD_DIM / 16; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) acc[n][i] *= keeps[i % 2];
  }

  // Values are the rows here. A lane's 16 bytes are eight of them, two a product.
  DISTMK_FN void add_values(const Tile& tile, uint32_t dim, const uint32_t (&weights)[2][2]) {
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j) {
      if (64 * j >= dim) break;
      const uint32_t words[4][4] = {{tile.v[0][j].x, tile.v[0][j].y, tile.v[0][j].z, tile.v[0][j].w},
                                    {tile.v[1][j].x, tile.v[1][j].y, tile.v[1][j].z, tile.v[1][j].w},
                                    {tile.v[2][j].x, tile.v[2][j].y, tile.v[2][j].z, tile.v[2][j].w},
                                    {tile.v[3][j].x, tile.v[3][j].y, tile.v[3][j].z, tile.v[3][j].w}};
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;  // bf16 of two positions
        const uint32_t rows[4] = {
            __byte_perm(words[0][n], words[1][n], LOWER), __byte_perm(words[0][n], words[1][n], UPPER),
            __byte_perm(words[2][n], words[3][n], LOWER), __byte_perm(words[2][n], words[3][n], UPPER)};
        multiply(rows, weights[0][0], weights[0][1], acc[4 * j + n]);
        multiply(rows, weights[1][0], weights[1][1], acc[4 * j + n]);
      }
    }
  }

  // This lane's share of the first `count` queries' results; query i's go to `out` + i * MERGE_STRIDE.
  DISTMK_FN void write(float* out, uint32_t count) {
    for (uint32_t step = 1; step < 4; step <<= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (place_in_group() == 0 && group_of_lane() < count)
      *reinterpret_cast<float2*>(out + group_of_lane() * MERGE_STRIDE + MAX_HEAD_DIM) = {maximum, sum};
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t query = 2 * place_in_group() + e;
      if (query >= count) break;
#pragma unroll
      for (uint32_t n = 0; n < MAX_HEAD_DIM / 16; n += 2)
        *reinterpret_cast<float4*>(out + query * MERGE_STRIDE + n / 4 * 64 + 8 * group_of_lane() + n % 4 * 2) = {
            acc[n][e], acc[n][2 + e], acc[n + 1][e], acc[n + 1][2 + e]};
    }
  }
};

// One block of queries over this warp's chunks, of which the first is on its way.
DISTMK_FN void attend(const Work& w, uint32_t first_query, Tile& tile, Partial& partial) {
  const uint32_t num_chunks = w.num_chunks();
  const uint32_t last = w.first_new() + (first_query + group_of_lane()) / w.num_heads;  // position this query may see
#pragma unroll 1
  for (uint32_t turn = w.chunk_turn(); turn < num_chunks; turn += NUM_WARPS) {
    const uint32_t chunk = w.first_chunk() + turn;
    const bool has_new = (chunk + 1) * CHUNK > w.first_new();
    const uint32_t next_lines = look_up(w, chunk + NUM_WARPS);
    if (has_new) patch_keys(w, chunk, tile);
    float scores[2][4] = {};
    multiply_keys(w, tile, scores);
    load_keys(w, next_lines, tile);
    uint32_t weights[2][2];
    partial.weigh(chunk, w.begin, min(w.end, last + 1), scores, weights);
    if (has_new) patch_values(w, chunk, tile);
    partial.add_values(tile, w.args.head_dim, weights);
    load_values(w, next_lines, tile);
  }
}

// Merges the warps' results for a query and writes them out; a warp a query, four elements a lane.
DISTMK_FN void write_query(const Work& w, uint32_t query, uint32_t index) {
  const uint32_t lane = threadIdx.x % 32, active = min(NUM_WARPS, w.num_chunks()), dim = w.args.head_dim;
  float2 mine = {-INFINITY, 0};  // maximum and sum of one warp
  if (lane < active) mine = *reinterpret_cast<const float2*>(w.merged(lane, index) + MAX_HEAD_DIM);
  float maximum = mine.x;
  for (uint32_t step = NUM_WARPS / 2; step; step >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  const float weight = mine.x > -INFINITY ? __expf(mine.x - maximum) : 0.0f;
  float sum = mine.y * weight;
  for (uint32_t step = NUM_WARPS / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  float4 acc = {0, 0, 0, 0};
  for (uint32_t turn = 0; turn < active; ++turn) {
    const float4 more = *reinterpret_cast<const float4*>(w.merged(turn, index) + 4 * lane);
    const float share = __shfl_sync(~0u, weight, turn);
    acc.x += more.x * share, acc.y += more.y * share, acc.z += more.z * share, acc.w += more.w * share;
  }
  const uint64_t row =
      (uint64_t{w.first_head} + query % w.num_heads) * MAX_ROWS + w.run.row_begin + query / w.num_heads;
  float* out = w.context.at<float>(w.args.part) + (row * w.args.max_splits + w.instance.split) * (2 + dim);
  if (lane == 0) *reinterpret_cast<float2*>(out) = {maximum, sum};
  if (4 * lane >= dim) return;
  out += 2 + 4 * lane;
  *reinterpret_cast<float2*>(out) = {acc.x, acc.y};
  *reinterpret_cast<float2*>(out + 2) = {acc.z, acc.w};
}

DISTMK_FN Work work_of(Context& context, const AttentionArgs& args, const Batch& batch, uint32_t index) {
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
  return w;
}

// False: the launch was over before its inputs were there.
DISTMK_FN bool run_instance(Context& context, const AttentionArgs& args, const Batch& batch, uint32_t index) {
  const Work w = work_of(context, args, batch, index);
  const Team& team = context.team;
  const uint32_t num_queries = w.num_heads * static_cast<uint32_t>(w.run.num_rows), warp = threadIdx.x / 32;
  const bool has_chunk = w.chunk_turn() < w.num_chunks();
#pragma unroll 1
  for (uint32_t block = 0; block < num_queries; block += QUERIES) {
    const uint32_t count = min(QUERIES, num_queries - block);
    Tile tile;
    if (has_chunk) {
      const uint32_t lines = look_up(w, w.first_chunk() + w.chunk_turn());
      load_keys(w, lines, tile);
      load_values(w, lines, tile);
    }
    if (!context.inputs_ready()) return false;  // old positions were there before
    stage_queries(w, block, count);
    // What is appended is read by all warps of this instance, and by no other this iteration.
    if (block == 0) append(w, count);
    team.sync();
    Partial partial;
    attend(w, block, tile, partial);
    team.sync();
    if (has_chunk) partial.write(w.merged(w.chunk_turn(), 0), count);
    team.sync();
    if (warp < count) write_query(w, block + warp, warp);
    team.sync();
  }
  return true;
}

}  // namespace attention

DISTMK_FN void body_attention(Context& context, const AttentionArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  uint32_t instance = context.instance;
  while (attention::run_instance(context, args, batch, instance) && context.next_of_share(instance)) {
  }
}

}  // namespace distmk
