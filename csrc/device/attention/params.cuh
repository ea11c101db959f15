// Parameters of one attention instance: O = softmax(scale Q K^T) V for a GQA group over one split of the KV positions
// (split-KV). Q: [rows of a run x query heads of one KV head, head_dim]; K, V: [positions of the split, head_dim] in
// the paged cache. This file has the instance's index arithmetic, its shared memory, and access to the dispatcher's
// work assignment.
#pragma once
#include "device/core/bf16.cuh"
#include "device/core/shared.cuh"
#include "runtime/kv_cache.h"
#include "runtime/splits.h"

namespace distmk {
namespace attention {

constexpr uint32_t HEAD_DIM_STEP = 64;  // step of the loops over a head, in elements; Q is zero-padded to it
// Queries (row x head) that are multiplied together: their bf16 high and low halves are the 16 rows of an m16n8k16
// product.
constexpr uint32_t Q_TILE = 8;
static_assert(KV_TILE == 16, "the depth of one mma of P V");
static_assert(NUM_WARPS * KV_TILE == POSITIONS_PER_PASS, "");

// The kinds of instances, each compiled by itself. DECODE_ROW: its run has one row, and its heads have HEAD_DIM
// elements. BATCH1_ROW: that row is also the whole batch, and its combine is fused into the consumer GEMV
// (linear/fused_combine.cuh). OFF_HOT_PATH: it belongs to a general_attention task, which has no work assignment and
// may have capped scores and large heads.
enum class InstanceKind { GENERAL, DECODE_ROW, BATCH1_ROW, OFF_HOT_PATH };

template <InstanceKind KIND, uint32_t HEAD_DIM>
struct ParamsOf : AttentionSplit {
  static constexpr bool ONE_ROW = KIND == InstanceKind::DECODE_ROW || KIND == InstanceKind::BATCH1_ROW,
                        BATCH1 = KIND == InstanceKind::BATCH1_ROW, ON_HOT_PATH = KIND != InstanceKind::OFF_HOT_PATH;
  static constexpr uint32_t DIM = HEAD_DIM;  // with ONE_ROW exactly, otherwise at most
  // Registers and shared memory are laid out for MAX_DIM elements, in PARTS parts. A warp that takes a head alone has
  // four elements of each part in every lane.
  static constexpr uint32_t MAX_DIM = DIM <= HOT_HEAD_DIM ? HOT_HEAD_DIM : DIM, PARTS = MAX_DIM / HOT_HEAD_DIM;
  // Whether registers have room for both the keys and the values of a tile.
  static constexpr bool HOLDS_TILE = PARTS == 1;
  // All warps' partials of QUERIES_PER_COMBINE queries fit in shared memory at once. One partial is the accumulator,
  // the maximum, the sum and padding.
  static constexpr uint32_t QUERIES_PER_COMBINE = PARTS == 1 ? 4 : 1, SMEM_PARTIAL_FLOATS = MAX_DIM + 4;
  Context& context;
  const AttentionArgs& args;

  // Opaque, because the compiler would otherwise keep values derived from threadIdx in registers across all tasks of
  // the kernel.
  DISTMK_FN static uint32_t lane() { return opaque(threadIdx.x) % 32; }
  DISTMK_FN uint32_t head_dim() const { return ONE_ROW ? DIM : args.head_dim; }

  // Addresses are computed where they are used, because no registers are left to keep them in.
  DISTMK_FN __nv_bfloat16* k_cache() const { return context.at<__nv_bfloat16>(args.k_cache); }
  DISTMK_FN __nv_bfloat16* v_cache() const { return context.at<__nv_bfloat16>(args.v_cache); }
  DISTMK_FN float* f32(uint64_t operand) const { return context.at<float>(operand); }
  // Row of a position in the caches. kv_row() and swizzle() repeat cache_row() and cache_swizzle() of
  // runtime/kv_cache.h, and qk_norm_rope.cuh repeats over_rms() and RoPE. With one more call, the compiler would
  // generate different code for all of attention.
  DISTMK_FN uint32_t kv_row(uint32_t position) const {
    const uint32_t shift = 31 - __clz(static_cast<int>(args.page_size));  // a page has a power of two of positions
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

  // The run's row that a query belongs to. The condition avoids a slow division.
  DISTMK_FN uint32_t row_of(uint32_t query) const { return ONE_ROW || run.num_rows == 1 ? 0 : query / num_heads; }
  DISTMK_FN uint32_t num_queries() const { return num_heads * static_cast<uint32_t>(run.num_rows); }
  // The first position of this iteration. From here on, K and V come from shared memory and are appended to the cache.
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - (ONE_ROW ? 1 : run.num_rows)); }
  // Both functions cover this split only, because another split's new positions are in another worker's shared memory.
  DISTMK_FN bool is_cached(uint32_t position) const { return position >= begin && position < min(end, first_new()); }
  DISTMK_FN bool is_new(uint32_t position) const {
    return position >= first_new() && position >= begin && position < end_of_positions();
  }
  // One past the split's last position. A fixed split may end behind the sequence; the paths of decode rows take no
  // fixed splits.
  DISTMK_FN uint32_t end_of_positions() const { return ONE_ROW ? end : min(end, static_cast<uint32_t>(run.kv_len)); }

  DISTMK_FN bool fuses_combine() const { return BATCH1 || distmk::fuses_combine(args, num_rows, run); }
  // A head's partial of a split, for a combine that is fused into the consumer GEMV.
  DISTMK_FN __nv_bfloat16* fused_partial_at(uint64_t operand, uint32_t query, uint32_t split) const {
    return context.at<__nv_bfloat16>(operand) +
           fused_partial_begin(first_head + query, split, args.max_kv_splits, head_dim());
  }

  // Swizzle of the caches (runtime/kv_cache.h).
  DISTMK_FN uint32_t swizzle(uint32_t position) const {
    return !ONE_ROW && (args.head_dim % 64 || args.page_size % 8) ? 0 : 8 * (position % 8 ^ position % 2 * 4);
  }

  // KV tiles are KV_TILE positions, aligned to KV_TILE. Step 0 is the split's last tile, so tiles with new positions
  // are the first of their warps. Step s belongs to warp NUM_WARPS - 1 - s % NUM_WARPS. A short split so has its tiles
  // in the last warps: the first ones are busy with Q when the cache is read.
  DISTMK_FN uint32_t kv_tile_bytes() const { return KV_TILE * head_dim() * sizeof(__nv_bfloat16); }  // of K or of V
  DISTMK_FN uint32_t num_tiles() const { return (end + KV_TILE - 1) / KV_TILE - begin / KV_TILE; }
  // Number of tiles whose first position is in the split.
  DISTMK_FN uint32_t num_whole_tiles() const { return (end + KV_TILE - 1) / KV_TILE - (begin + KV_TILE - 1) / KV_TILE; }
  DISTMK_FN uint32_t tile_at(uint32_t step) const { return (end - 1) / KV_TILE - step; }
  DISTMK_FN uint32_t first_step() const { return NUM_WARPS - 1 - own_warp(); }

  // Shared memory holds K and then V of new positions, bf16 [rows, new_kv_stride()], and then Q. The warps' partials
  // overwrite Q; with ONE_ROW they follow it.
  DISTMK_FN uint32_t new_kv_stride() const { return (head_dim() + 31) / 32 * 32 + 8; }
  DISTMK_FN __nv_bfloat16* new_k(uint32_t row) const {
    return shared().at<Overlay::SPLIT_ROWS, __nv_bfloat16>() + row * new_kv_stride();
  }
  DISTMK_FN __nv_bfloat16* new_v(uint32_t row) const { return new_k(NEW_ROWS + row); }
  // Q [Q_TILE, padded_head_dim()]: one word with two elements' bf16 high halves, then one with their low halves. A row
  // has four words of padding: eight lanes that read 16 bytes each of two queries then meet no bank twice.
  DISTMK_FN uint32_t* query(uint32_t i) const {
    return reinterpret_cast<uint32_t*>(new_k(2 * NEW_ROWS)) + i * (padded_head_dim() + 4);
  }
  DISTMK_FN uint32_t padded_head_dim() const {
    return (head_dim() + HEAD_DIM_STEP - 1) / HEAD_DIM_STEP * HEAD_DIM_STEP;
  }
  // The partial of the warp whose first step is `step`.
  DISTMK_FN float* warp_partial(uint32_t step, uint32_t query_index) const {
    return reinterpret_cast<float*>(query(ONE_ROW ? Q_TILE : 0)) +
           (step * QUERIES_PER_COMBINE + query_index) * SMEM_PARTIAL_FLOATS;
  }

 private:
  static constexpr uint32_t NEW_ROWS = ONE_ROW ? 1 : MAX_ROWS;
};
using Params = ParamsOf<InstanceKind::GENERAL, HOT_HEAD_DIM>;
template <uint32_t HEAD_DIM>
using OffHotPathParams = ParamsOf<InstanceKind::OFF_HOT_PATH, HEAD_DIM>;
template <uint32_t HEAD_DIM>
using DecodeRowParams = ParamsOf<InstanceKind::DECODE_ROW, HEAD_DIM>;
template <uint32_t HEAD_DIM>
using Batch1RowParams = ParamsOf<InstanceKind::BATCH1_ROW, HEAD_DIM>;

// Whether K and V of new positions fit in shared memory together with Q and the warps' partials.
template <class P>
constexpr bool fits() {
  constexpr uint32_t NEW_KV_BYTES = 2 * (P::ONE_ROW ? 1 : MAX_ROWS) * (P::MAX_DIM + 8) * sizeof(__nv_bfloat16),
                     Q_BYTES = Q_TILE * (P::MAX_DIM + 4) * sizeof(uint32_t),
                     PARTIALS_BYTES = NUM_WARPS * P::QUERIES_PER_COMBINE * P::SMEM_PARTIAL_FLOATS * sizeof(float);
  return NEW_KV_BYTES + (P::ONE_ROW                 ? Q_BYTES + PARTIALS_BYTES
                         : Q_BYTES > PARTIALS_BYTES ? Q_BYTES
                                                    : PARTIALS_BYTES) <=
         overlay_bytes(Overlay::SPLIT_ROWS);
}
static_assert(fits<Params>() && fits<DecodeRowParams<HOT_HEAD_DIM>>() && fits<OffHotPathParams<MAX_HEAD_DIM>>(), "");

DISTMK_FN AttentionSplit split_of(const Context& context, const AttentionArgs& args, uint32_t index) {
  const Batch& batch = *context.batch(args.batch);
  const AttentionInstance instance = attention_instance(args, batch, index);
  const BatchRun run = batch.runs[instance.run];
  const QueryHeads<false> heads(args, instance.kv_head);
  return {instance,
          run,
          heads.first,
          heads.num,
          split_begin(args, run, instance.split, instance.num_splits),
          split_begin(args, run, instance.split + 1, instance.num_splits),
          batch.num_rows};
}

// The consumers' side of the work assignment (work_assignment.cuh). Round r of worker w in a spread task is instance w
// + r * num_workers. The dispatcher has prepared round 0.

// KvPath of round 0 of this warp's current task.
DISTMK_FN uint32_t assigned_path() { return shared().attention_assignment.kv_path[handshake_slot(task_number())]; }
DISTMK_FN uint32_t kv_path(uint32_t round) { return round ? UNASSIGNED : assigned_path(); }
DISTMK_FN uint32_t count_instances(const Context& context, const AttentionArgs& args) {
  return assigned_path() ? shared().attention_assignment.num_instances
                         : num_attention_instances(args, *context.batch(args.batch));
}
// The round that this warp is in; 0 between tasks.
DISTMK_FN uint32_t own_round() { return shared().attention_assignment.rounds[own_warp()]; }
DISTMK_FN void set_own_round(uint32_t round) {
  __syncwarp();
  if (own_thread() % 32 == 0) shared().attention_assignment.rounds[own_warp()] = round;
  __syncwarp();
}
// A task that is not spread has round 0 only.
DISTMK_FN uint32_t instance_of(const Context& context, uint32_t round) {
  const uint32_t first = shared().handshake.action[handshake_slot(task_number())].instance;
  return round ? first + round * context.rank_state.program->num_workers : first;
}
// Cache rows of a step's tile, one position per lane (threadIdx.x % KV_TILE). A position that is not cached gets row 0.
template <class P>
DISTMK_FN uint32_t look_up_kv_rows(const P& p, uint32_t step) {
  const uint32_t position = p.tile_at(step) * KV_TILE + own_thread() % KV_TILE;
  return step < p.num_tiles() && p.is_cached(position) ? p.kv_row(position) : 0;
}
// Cache rows of a step's tile from the dispatcher's assignment, without a look-up. A position that is not cached gets
// any row.
DISTMK_FN uint32_t assigned_kv_rows(uint32_t step) {
  return shared().attention_assignment.lines[step] + own_thread() % KV_TILE;
}

}  // namespace attention
}  // namespace distmk
