// What an attention instance works on, and what it stages in shared memory: keys and values of new positions, queries.
#pragma once
#include "device/attention/qk_norm_rope.cuh"
#include "device/core/bf16.cuh"
#include "runtime/splits.h"

namespace distmk {
namespace attention {

constexpr uint32_t QUERIES = 8;  // of a block: query heads x token rows; their low halves are the product's other rows
constexpr uint32_t QUERY_STEP = 64;  // elements; a head's last ones may be fewer
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr uint32_t COMBINED_QUERIES = 4;  // at once, for want of shared memory
constexpr uint32_t CHUNK = SPLIT_STEP;    // positions: one product's depth where weights meet values
static_assert(CHUNK == 16, "");
static_assert(NUM_WARPS * CHUNK == POSITIONS_PER_PASS, "");
constexpr uint32_t COMBINE_STRIDE = MAX_HEAD_DIM + 4;  // of a warp's result for a query: accumulator, maximum, sum

// What is known of an instance ahead, so that the compiler knows it, too (device/attention/decode_row.cuh): of ONE_ROW,
// that its run is a single row and its heads have HEAD_DIM elements; of LONE, that this is the batch's only row as
// well, merged by those who multiply it.
enum class Known { NOTHING, ONE_ROW, LONE };
template <Known KNOWN, uint32_t HEAD_DIM>
struct WorkOf : AttentionSplit {
  static constexpr bool ONE_ROW = KNOWN != Known::NOTHING, LONE = KNOWN == Known::LONE;
  static constexpr uint32_t DIM = HEAD_DIM;  // at most, where nothing is known
  Context& context;
  const AttentionArgs& args;

  // Asked for anew: what follows from a number that it knows the compiler would keep, in all other tasks, too.
  DISTMK_FN static uint32_t lane() { return opaque(threadIdx.x) % 32; }
  DISTMK_FN uint32_t head_dim() const { return ONE_ROW ? DIM : args.head_dim; }

  // The caches, asked for where they are read: kept in registers, they would lie on the stack.
  DISTMK_FN __nv_bfloat16* keys() const { return context.at<__nv_bfloat16>(args.k_cache); }
  DISTMK_FN __nv_bfloat16* values() const { return context.at<__nv_bfloat16>(args.v_cache); }
  DISTMK_FN float* floats(uint64_t operand) const { return context.at<float>(operand); }
  DISTMK_FN uint32_t line_of(uint32_t position) const {
    const uint32_t shift = 31 - __clz(static_cast<int>(args.page_size));  // a power of two of positions
    const int32_t* pages = context.at<int32_t>(args.page_table) + uint64_t(run.slot) * args.max_pages;
    const auto page = static_cast<uint32_t>(__ldcg(pages + (position >> shift)));
    return ((page * args.num_kv + instance.kv_head) << shift) + (position & (args.page_size - 1));
  }
  DISTMK_FN const float* qkv(uint32_t row, uint32_t head_index) const {
    return context.at<float>(args.qkv) + uint64_t{run.row_begin + row} * args.qkv_stride +
           uint64_t{head_index} * head_dim();
  }
  DISTMK_FN const float* rope(uint32_t position) const {
    return context.at<float>(args.rope) + uint64_t{position} * head_dim();
  }
  // Of the run, that a query belongs to. Divisions are slow.
  DISTMK_FN uint32_t row_of(uint32_t query) const { return ONE_ROW || run.num_rows == 1 ? 0 : query / num_heads; }
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - (ONE_ROW ? 1 : run.num_rows)); }
  // An old one, and this split's.
  DISTMK_FN bool is_cached(uint32_t position) const { return position >= begin && position < min(end, first_new()); }
  // New, and this split's: what another split has staged is not here.
  DISTMK_FN bool is_new(uint32_t position) const {
    return position >= first_new() && position >= begin && position < end;
  }

  DISTMK_FN bool fuses_combine() const { return LONE || distmk::fuses_combine(args, num_rows, run); }
  // Where a head's result is of a split, if those who multiply it merge it.
  DISTMK_FN __nv_bfloat16* fused_partial_at(uint64_t operand, uint32_t query, uint32_t split) const {
    return context.at<__nv_bfloat16>(operand) +
           fused_partial_begin(first_head + query, split, args.max_splits, head_dim());
  }

  // In the caches, 16-byte pieces of a position are exchanged by its number in the page, so that a warp that reads a
  // chunk in shared memory, keys of two positions or values of four at a time, meets no bank twice: what an element's
  // place is xored with. Pages of fewer than eight positions and odd heads are left alone.
  DISTMK_FN uint32_t exchanged(uint32_t position) const {
    return !ONE_ROW && (args.head_dim % 64 || args.page_size % 8) ? 0 : 8 * (position % 8 ^ position % 2 * 4);
  }

  // Of a chunk's keys, or values.
  DISTMK_FN uint32_t chunk_bytes() const { return CHUNK * head_dim() * sizeof(__nv_bfloat16); }
  DISTMK_FN uint32_t num_queries() const { return num_heads * static_cast<uint32_t>(run.num_rows); }
  DISTMK_FN uint32_t num_chunks() const { return (end + CHUNK - 1) / CHUNK - begin / CHUNK; }
  // Chunks are taken from the last one on, so that those with new positions are their warps' first.
  DISTMK_FN uint32_t chunk_of(uint32_t turn) const { return (end - 1) / CHUNK - turn; }
  // The first warps are busy with queries when the cache is read, so turns are dealt from the last one on.
  DISTMK_FN uint32_t chunk_turn() const { return NUM_WARPS - 1 - own_warp(); }

  // In shared memory, rows of bf16: keys and values of new positions, then the block's queries.
  DISTMK_FN uint32_t stride() const { return (head_dim() + 31) / 32 * 32 + 8; }
  DISTMK_FN __nv_bfloat16* new_key(uint32_t row) const {
    return reinterpret_cast<__nv_bfloat16*>(shared().work) + row * stride();
  }
  DISTMK_FN __nv_bfloat16* new_value(uint32_t row) const { return new_key(NEW_ROWS + row); }
  // Two elements' high halves, then their low ones; up to whole steps, where they are zero. Eight lanes that take 16
  // bytes of two queries' meet no bank twice.
  DISTMK_FN uint32_t* query(uint32_t i) const {
    return reinterpret_cast<uint32_t*>(new_key(2 * NEW_ROWS)) + i * (query_elements() + 4);
  }
  DISTMK_FN uint32_t query_elements() const { return (head_dim() + QUERY_STEP - 1) / QUERY_STEP * QUERY_STEP; }
  // Over the queries once they are done with; of ONE_ROW, behind them.
  DISTMK_FN float* combined(uint32_t turn, uint32_t query_index) const {
    return reinterpret_cast<float*>(query(ONE_ROW ? QUERIES : 0)) +
           (turn * COMBINED_QUERIES + query_index) * COMBINE_STRIDE;
  }

 private:
  static constexpr uint32_t NEW_ROWS = ONE_ROW ? 1 : MAX_ROWS;
};
using Work = WorkOf<Known::NOTHING, MAX_HEAD_DIM>;
template <uint32_t HEAD_DIM>
using RowWork = WorkOf<Known::ONE_ROW, HEAD_DIM>;
template <uint32_t HEAD_DIM>
using LoneWork = WorkOf<Known::LONE, HEAD_DIM>;

constexpr uint32_t COMBINED_BYTES = NUM_WARPS * COMBINED_QUERIES * COMBINE_STRIDE * sizeof(float);
static_assert(2 * MAX_ROWS * (MAX_HEAD_DIM + 8) * sizeof(__nv_bfloat16) + COMBINED_BYTES <= WORK_BYTES + SCRATCH_BYTES,
              "what warps have found must fit behind the new keys and values");
static_assert(2 * (MAX_HEAD_DIM + 8) * sizeof(__nv_bfloat16) + QUERIES * (MAX_HEAD_DIM + 4) * sizeof(uint32_t) +
                      COMBINED_BYTES <=
                  WORK_BYTES + SCRATCH_BYTES,
              "and behind a single new one's and the queries");

// Keys and values of new positions of the split that owns them; a warp one of them, from the first that norms no query
// on.
template <class W>
DISTMK_FN void stage_new(const W& w, uint32_t first_warp, bool polls) {
  const uint32_t lane = w.lane(), dim = w.head_dim(), first = max(w.begin, w.first_new());
#pragma unroll 1
  for (uint32_t i = (threadIdx.x / 32 - first_warp) % NUM_WARPS; first + i / 2 < w.end; i += NUM_WARPS) {
    const uint32_t position = first + i / 2, row = position - w.first_new();
    const float* key = w.qkv(row, w.args.num_q + w.instance.kv_head);
    if (i % 2 == 0) {
      norm_and_rotate(w.context, polls, key, w.floats(w.args.k_norm), w.rope(position), w.args.eps, dim, 1.0f,
                      [&](uint32_t e, float2 pair) {
                        *reinterpret_cast<uint32_t*>(w.new_key(row) + e) = pack_bf16(pair.x, pair.y);
                      });
      continue;
    }
    const auto* value = reinterpret_cast<const uint4*>(key + uint64_t{w.args.num_kv} * dim);
    const bool here = 4 * lane < dim;
    uint4 v;
    w.context.poll(polls, [&] {
      v = poll_load(value + (here ? lane : 0));
      return v.x && v.y && v.z && v.w;
    });
    if (here)
      reinterpret_cast<uint2*>(w.new_value(row))[lane] = {pack_bf16(__uint_as_float(v.x), __uint_as_float(v.y)),
                                                          pack_bf16(__uint_as_float(v.z), __uint_as_float(v.w))};
  }
}

// New positions of this split from where they were staged to the cache, where `line_of` knows their lines; a warp a
// position.
template <class W, class LineOf>
DISTMK_FN void append(const W& w, const LineOf& line_of) {
  const uint32_t lane = w.lane(), dim = w.head_dim(), first = max(w.begin, w.first_new());
  if (4 * lane >= dim) return;
#pragma unroll 1
  for (uint32_t position = first + threadIdx.x / 32; position < w.end; position += NUM_WARPS) {
    const uint32_t row = position - w.first_new();
    const uint64_t at = uint64_t{line_of(position)} * dim + (4 * lane ^ w.exchanged(position));
    const auto copy = [&](__nv_bfloat16* cache, const __nv_bfloat16* from) {
      *reinterpret_cast<uint2*>(cache + at) = reinterpret_cast<const uint2*>(from)[lane];
    };
    copy(w.keys(), w.new_key(row));
    copy(w.values(), w.new_value(row));
  }
}

// The queries of a block, normed, rotated and scaled, so that weights are powers of two; a warp a query.
template <class W>
DISTMK_FN void stage_queries(const W& w, uint32_t first_query, uint32_t count, bool polls) {
  const uint32_t i = threadIdx.x / 32, dim = w.head_dim();
  if (i >= count) return;
  const uint32_t row = w.row_of(first_query + i), head = w.first_head + first_query + i - row * w.num_heads;
  const auto keep = [&](uint32_t e, float2 pair) {
    const Halves halves(pair.x, pair.y);
    *reinterpret_cast<uint2*>(w.query(i) + e) = {halves.high, halves.low};
  };
  norm_and_rotate(w.context, polls, w.qkv(row, head), w.floats(w.args.q_norm), w.rope(w.first_new() + row), w.args.eps,
                  dim, rsqrtf(static_cast<float>(dim)) * LOG2_E, keep);
  if (const uint32_t e = dim + w.lane() * 2; e < w.query_elements()) keep(e, {0, 0});
}

}  // namespace attention
}  // namespace distmk
