// The append_kv task of a job iteration: QK-norm and RoPE of the rows' queries and keys, and the append of keys and
// values to the KV cache. A worker looks up the destinations of its rows before the rows are there, copies the rows to
// shared memory, and then processes all their heads together. A head takes some lanes of a warp.
#pragma once
#include "device/core/bf16.cuh"
#include "device/core/marks.cuh"
#include "device/core/shared.cuh"
#include "device/jobs/row_vectors.cuh"
#include "device/jobs/runs.cuh"
#include "runtime/rms.h"
#include "runtime/rope.h"

namespace distmk {
namespace jobs {

constexpr uint32_t APPENDED_ROWS = 64;  // rows at once, if they fit in shared memory

struct AppendedRow {
  uint32_t row, position, cache_row;  // cache_row: of KV head 0
};
struct AppendState {
  BatchRun runs[MAX_SEQUENCES];
  AppendedRow rows[APPENDED_ROWS];
};

DISTMK_FN float4 unpack_bf16(const uint2& v) {
  return {low_of_pair(v.x), high_of_pair(v.x), low_of_pair(v.y), high_of_pair(v.y)};
}
DISTMK_FN float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
DISTMK_FN float4 scaled(const float4& a, float by) { return {a.x * by, a.y * by, a.z * by, a.w * by}; }

// A lane's part of a head: four elements of each half, which RoPE pairs.
struct HeadPart {
  uint2 first, second;
};

// The lanes of a head. Their number is a power of two, and the first head_dim / 8 lanes have elements.
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

// The norm weights for a lane's elements of a query or key head.
struct HeadNorm {
  bool wanted;
  float4 first, second;

  DISTMK_FN HeadNorm(const Context& context, uint64_t operand, uint32_t e, uint32_t half) : wanted(operand) {
    if (!wanted || e >= half) return;
    const float* from = context.at<float>(operand) + e;
    first = *reinterpret_cast<const float4*>(from), second = *reinterpret_cast<const float4*>(from + half);
  }
};

// y = RoPE(x / rms(x) * norm). All lanes of a warp call it, `has_elements` or not.
DISTMK_FN void norm_and_rotate(const HeadLanes& lanes, HeadPart& part, bool has_elements, const HeadNorm& norm,
                               const float* rope, uint32_t dim, float eps) {
  const uint32_t e = 4 * lanes.index, half = dim / 2;
  float4 a = unpack_bf16(part.first), b = unpack_bf16(part.second);
  const float squares = lanes.sum(has_elements ? dot(a, a) + dot(b, b) : 0.0f);
  if (!has_elements) return;
  if (norm.wanted) {
    const float scale = over_rms(squares, dim, eps);
    a = scaled(product(a, norm.first), scale);
    b = scaled(product(b, norm.second), scale);
  }
  const float4 cosine = *reinterpret_cast<const float4*>(rope + e),
               sine = *reinterpret_cast<const float4*>(rope + half + e);
  part.first = {pack_bf16(rotated_first(a.x, b.x, cosine.x, sine.x), rotated_first(a.y, b.y, cosine.y, sine.y)),
                pack_bf16(rotated_first(a.z, b.z, cosine.z, sine.z), rotated_first(a.w, b.w, cosine.w, sine.w))};
  part.second = {pack_bf16(rotated_second(a.x, b.x, cosine.x, sine.x), rotated_second(a.y, b.y, cosine.y, sine.y)),
                 pack_bf16(rotated_second(a.z, b.z, cosine.z, sine.z), rotated_second(a.w, b.w, cosine.w, sine.w))};
}

// A head of a row: a query, a key or a value.
struct AppendedHead {
  const AppendedRow& row;
  uint32_t index;  // queries first, then keys, then values

  DISTMK_FN void store(const Context& context, const AppendKvArgs& args, uint32_t e, const HeadPart& part) const {
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
      if (swizzles_cache(dim, args.page_size)) swizzle = cache_swizzle(p);
    }
    *reinterpret_cast<uint2*>(to + (e ^ swizzle)) = part.first;
    *reinterpret_cast<uint2*>(to + (e + dim / 2 ^ swizzle)) = part.second;
  }
};

// The heads of a row that a worker processes, the same in all its rows. While there are fewer rows than workers,
// several workers share a row: a row takes one worker so long that the others would wait for it.
struct HeadShare {
  uint32_t log_parts = 0, first, count;

  DISTMK_FN HeadShare(const Context& context, const AppendKvArgs& args, uint32_t num_rows) {
    const uint32_t num_heads = args.num_q + 2 * args.num_kv, num_workers = context.rank_state.program->num_workers;
    while (num_rows << (log_parts + 1) <= num_workers && 2u << log_parts <= num_heads) ++log_parts;
    const uint32_t part = context.instance & ((1u << log_parts) - 1);
    first = num_heads * part >> log_parts;
    count = (num_heads * (part + 1) >> log_parts) - first;
  }
};

// Rows in shared memory: queries, keys and values of each row, then the RoPE of each row.
struct AppendBuffers {
  uint32_t row_bytes, rope_bytes, at_once;

  DISTMK_FN explicit AppendBuffers(const AppendKvArgs& args) {
    row_bytes = (args.num_q + 2 * args.num_kv) * args.head_dim * 2, rope_bytes = args.head_dim * 4;
    at_once = min(overlay_bytes(Overlay::APPENDED_HEADS) / (row_bytes + rope_bytes), APPENDED_ROWS);
  }
  DISTMK_FN char* row(uint32_t i) const { return shared().at<Overlay::APPENDED_HEADS>() + i * row_bytes; }
  DISTMK_FN char* rope(uint32_t i) const {
    return shared().at<Overlay::APPENDED_HEADS>() + at_once * row_bytes + i * rope_bytes;
  }
};

// Copies the worker's heads of its rows `first` to first + num_rows to shared memory unchanged.
DISTMK_FN void copy_rows(const Context& context, const AppendKvArgs& args, const AppendBuffers& buffers,
                         const WorkerRows& rows, const HeadShare& heads, uint32_t first, uint32_t num_rows) {
  const uint32_t begin = heads.first * args.head_dim * 2, end = begin + heads.count * args.head_dim * 2;
  const char* qkv = context.at<char>(args.qkv);
  const bool by_chunks = is_aligned(qkv) && args.qkv_stride % 8 == 0;
  for (uint32_t i = 0; i < num_rows; ++i) {
    const char* from = qkv + uint64_t{rows.at(first + i)} * args.qkv_stride * 2;
    char* to = buffers.row(i);
    if (by_chunks)
      for (uint32_t at = begin + context.team.index * 16; at < end; at += NUM_CONSUMERS * 16)
        copy_chunk(shared_address(to + at), from + at, true);
    else
      for (uint32_t at = begin + context.team.index * 8; at < end; at += NUM_CONSUMERS * 8)
        *reinterpret_cast<uint2*>(to + at) = __ldcg(reinterpret_cast<const uint2*>(from + at));
  }
}

// Looks up the rows' positions in their sequences and their cache rows, and copies their RoPE. A warp takes a row.
DISTMK_FN void look_up_rows(const Context& context, const AppendKvArgs& args, const AppendBuffers& buffers,
                            const WorkerRows& rows, uint32_t first, uint32_t num_rows, AppendState& state) {
  const uint32_t num_runs = context.batch(args.batch)->num_job_runs, lane = threadIdx.x % 32;
  for (uint32_t i = threadIdx.x / 32; i < num_rows; i += NUM_WARPS) {
    const uint32_t row = rows.at(first + i);
    const JobRow found = job_row(state.runs, num_runs, row);
    const char* rope = context.at<char>(args.rope) + uint64_t{found.position} * buffers.rope_bytes;
    for (uint32_t at = lane * 16; at < buffers.rope_bytes; at += 32 * 16)
      copy_chunk(shared_address(buffers.rope(i) + at), rope + at, true);
    if (lane == 0)
      state.rows[i] = {row, found.position,
                       cache_row(context.at<int32_t>(args.page_table), args, found.slot, 0, found.position)};
  }
}

// Processes the worker's heads of the `num_rows` rows in the buffers.
DISTMK_FN void append_rows(const Context& context, const AppendKvArgs& args, const AppendBuffers& buffers,
                           const AppendState& state, const HeadShare& heads, uint32_t num_rows, const HeadLanes& lanes,
                           const HeadNorm& q_norm, const HeadNorm& k_norm) {
  const uint32_t dim = args.head_dim, e = 4 * lanes.index, step = NUM_CONSUMERS / lanes.size;
  uint32_t row = 0, in_share = context.team.index / lanes.size;
#pragma unroll 2
  for (uint32_t first = 0; first < num_rows * heads.count; first += step, in_share += step) {
    for (; in_share >= heads.count; in_share -= heads.count) ++row;
    const uint32_t index = heads.first + in_share;
    const uint32_t in_buffers = min(row, num_rows - 1);
    const bool has_elements = row < num_rows && e < dim / 2;
    const auto* from =
        reinterpret_cast<const uint2*>(buffers.row(in_buffers) + (index * dim + (e < dim / 2 ? e : 0)) * 2);
    HeadPart part{from[0], from[dim / 8]};
    const bool rotates = has_elements && index < args.num_q + args.num_kv;
    HeadNorm norm = k_norm;  // a copy, because registers have no address
    if (index < args.num_q) norm = q_norm;
    norm_and_rotate(lanes, part, rotates, norm, reinterpret_cast<const float*>(buffers.rope(in_buffers)), dim,
                    args.eps);
    if (has_elements) AppendedHead{state.rows[row], index}.store(context, args, e, part);
  }
}

}  // namespace jobs

DISTMK_FN void body_append_kv(Context& context, const AppendKvArgs& args) {
  if (!context.begin_prologue()) return;
  const Batch& batch = *context.batch(args.batch);
  const jobs::HeadLanes lanes(args.head_dim);
  const jobs::HeadShare heads(context, args, batch.num_job_rows);
  const jobs::WorkerRows rows(context, batch.num_job_rows, heads.log_parts);
  if (!rows.count) return;
  auto& state = *shared().at<Overlay::APPEND_STATE, jobs::AppendState>();
  const jobs::AppendBuffers buffers(args);
  const uint32_t e = 4 * lanes.index, half = args.head_dim / 2;
  jobs::load_runs(context, args.batch, batch.num_job_runs, state.runs);
  const jobs::HeadNorm q_norm(context, args.q_norm, e, half), k_norm(context, args.k_norm, e, half);
  context.team.sync();
  for (uint32_t first = 0; first < rows.count; first += buffers.at_once) {
    const uint32_t in_group = min(rows.count - first, buffers.at_once);
    if (first) context.team.sync();  // all warps are done with the last rows
    jobs::look_up_rows(context, args, buffers, rows, first, in_group, state);
    mark(Mark::PREPARED);
    if (!context.inputs_ready()) return jobs::end_copies();
    jobs::copy_rows(context, args, buffers, rows, heads, first, in_group);
    mark(Mark::INPUTS);
    commit_copies();
    await_copies<0>();
    context.team.sync();
    mark(Mark::MET);
    jobs::append_rows(context, args, buffers, state, heads, in_group, lanes, q_norm, k_norm);
  }
}

}  // namespace distmk
