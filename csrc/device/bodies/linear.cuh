// Linear layers on tensor cores: rows of weights are the m dimension, tokens the n dimension. A token's float32
// activation is split into a high and a low bf16, which take two columns of the same product, so that up to four tokens
// cost no more than one and nothing is lost to rounding but the weights' own.
#pragma once
#include "device/shared.cuh"
#include "runtime/context.h"

namespace distmk {
namespace linear {

constexpr uint32_t X_PAD = 8;  // bf16 elements between columns, so that a fragment's columns lie in different banks

DISTMK_FN uint32_t pack_bf16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// High (part 0) or low (part 1) halves of two activations.
DISTMK_FN uint32_t half_of(float2 v, uint32_t part) {
  const float a = __bfloat162float(__float2bfloat16_rn(v.x)), b = __bfloat162float(__float2bfloat16_rn(v.y));
  return part ? pack_bf16(v.x - a, v.y - b) : pack_bf16(a, b);
}

// The task's activations: in shared memory as columns of halves where they fit, else read again for every tile.
struct Activations {
  const float* x;
  const float* norm;
  uint32_t k, x_stride, num_rows;
  const __nv_bfloat16* columns;  // null: too large
  uint32_t column_stride;

  DISTMK_FN float2 at(uint32_t row, uint32_t k0) const {
    float2 v = {0, 0};
    const float* p = x + uint64_t{row} * x_stride + k0;
    if (k0 < k) v.x = __ldcg(p) * (norm ? norm[k0] : 1.0f);
    if (k0 + 1 < k) v.y = __ldcg(p + 1) * (norm ? norm[k0 + 1] : 1.0f);
    return v;
  }

  // Two values of column `column` at `k0`, as a tensor-core operand.
  DISTMK_FN uint32_t fragment(uint32_t column, uint32_t k0) const {
    return column < 2 * num_rows ? half_of(at(column / 2, k0), column % 2) : 0;
  }
};

constexpr uint32_t IN_FLIGHT =
    4;  // 16-byte loads a thread: one at a time would cost a trip to the second-level cache each

// Four activations from `k` on, zeros behind the end.
DISTMK_FN float4 load_four(const float* x, uint32_t k, uint32_t end, bool aligned) {
  if (aligned && k + 4 <= end) return __ldcg(reinterpret_cast<const float4*>(x + k));
  float4 v = {0, 0, 0, 0};
  float* out = &v.x;
  for (uint32_t i = 0; i < 4 && k + i < end; ++i) out[i] = __ldcg(x + k + i);
  return v;
}

// One row: its halves into `columns` (null: nowhere), times the norm's weight; returns this thread's share of the
// squares.
DISTMK_FN float take_row(const Team& team, const Activations& a, const float* x, uint32_t k_pitch,
                         __nv_bfloat16* high) {
  const bool aligned = reinterpret_cast<uint64_t>(x) % 16 == 0 && reinterpret_cast<uint64_t>(a.norm) % 16 == 0;
  __nv_bfloat16* low = high + a.column_stride;
  float squares = 0;
  for (uint32_t first = 4 * team.index; first < k_pitch; first += 4 * IN_FLIGHT * team.size) {
    float4 v[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + 4 * i * team.size;
      v[i] = load_four(x, k, a.k, aligned);
      g[i] = a.norm ? load_four(a.norm, k, a.k, aligned) : float4{1, 1, 1, 1};
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + 4 * i * team.size;
      squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
      if (!high || k >= k_pitch) continue;
      const float2 front = {v[i].x * g[i].x, v[i].y * g[i].y}, back = {v[i].z * g[i].z, v[i].w * g[i].w};
      *reinterpret_cast<uint2*>(high + k) = {half_of(front, 0), half_of(back, 0)};
      *reinterpret_cast<uint2*>(low + k) = {half_of(front, 1), half_of(back, 1)};
    }
  }
  return squares;
}

// Reads the activations once: their mean square for the norm, and the halves into shared memory.
DISTMK_FN Activations take_in(Context& context, const LinearArgs& args, uint32_t num_rows) {
  const Team& team = context.team;
  Activations a{context.at<float>(args.x), context.at<float>(args.norm), args.k, args.x_stride, num_rows, nullptr,
                args.k_pitch + X_PAD};
  auto* columns = reinterpret_cast<__nv_bfloat16*>(shared().vector);
  const bool fits = 2ull * num_rows * a.column_stride * sizeof(__nv_bfloat16) <= VECTOR_BYTES;
  for (uint32_t row = 0; row < num_rows; ++row) {
    const float* x = a.x + uint64_t{row} * a.x_stride;
    float squares = take_row(team, a, x, args.k_pitch, fits ? columns + 2 * uint64_t{row} * a.column_stride : nullptr);
    if (!a.norm) continue;
    for (uint32_t step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
    if (team.index % 32 == 0) shared().squares[row][team.index / 32] = squares;
  }
  if (fits) a.columns = columns;
  team.sync();
  return a;
}

DISTMK_FN void load_rows(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

DISTMK_FN void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values of shared memory, or zeros where the column belongs to no token.
DISTMK_FN uint32_t load_pair(uint32_t address, bool present) {
  uint32_t v = 0;
  if (present) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// One tile (a stage of the ring) into the sums of its row group. `COLS` 0: as many as `tile_k` says.
template <uint32_t TILES, uint32_t COLS>
DISTMK_FN void multiply_tile(const char* stage, uint32_t tile_k, const Activations& x, uint32_t k0,
                             float (&sums)[TILES][4]) {
  const uint32_t lane = threadIdx.x % 32, row = lane % 16, cols = COLS ? COLS : tile_k;
  const uint32_t row_address = shared_address(stage) + row * cols * sizeof(__nv_bfloat16);
  uint32_t column_address[TILES];
  bool present[TILES];
#pragma unroll
  for (uint32_t tile = 0; tile < TILES; ++tile) {
    const uint32_t column = tile * 8 + lane / 4;
    present[tile] = column < 2 * x.num_rows;
    column_address[tile] = shared_address(x.columns + column * x.column_stride + k0 + lane % 4 * 2);
  }
#pragma unroll 8
  for (uint32_t k = 0; k < cols; k += 16) {
    uint32_t a[4];
    load_rows(row_address + ((k / 8 + lane / 16) ^ (row % 8)) * 16, a);
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile)
      multiply(a, load_pair(column_address[tile] + k * 2, present[tile]),
               load_pair(column_address[tile] + k * 2 + 16, present[tile]), sums[tile]);
  }
}

// The same where the activations do not fit into shared memory.
template <uint32_t TILES>
DISTMK_FN void multiply_tile_far(const char* stage, uint32_t tile_k, const Activations& x, uint32_t k0,
                                 float (&sums)[TILES][4]) {
  const uint32_t lane = threadIdx.x % 32, row = lane % 16;
  const uint32_t row_address = shared_address(stage) + row * tile_k * sizeof(__nv_bfloat16);
  for (uint32_t k = 0; k < tile_k; k += 16) {
    uint32_t a[4];
    load_rows(row_address + ((k / 8 + lane / 16) ^ (row % 8)) * 16, a);
    const uint32_t at = k0 + k + lane % 4 * 2;
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
      const uint32_t column = tile * 8 + lane / 4;
      multiply(a, x.fragment(column, at), x.fragment(column, at + 8), sums[tile]);
    }
  }
}

template <uint32_t TILES>
DISTMK_FN void multiply_any(const char* stage, uint32_t tile_k, const Activations& x, uint32_t k0,
                            float (&sums)[TILES][4]) {
  if (!x.columns)
    multiply_tile_far<TILES>(stage, tile_k, x, k0, sums);
  else if (tile_k == TILE_K)
    multiply_tile<TILES, TILE_K>(stage, tile_k, x, k0, sums);
  else
    multiply_tile<TILES, 0>(stage, tile_k, x, k0, sums);
}

// What becomes of the sums.
struct Output {
  Context& context;
  const LinearArgs& args;
  const Batch* batch;
  const float* bias;
  uint32_t num_rows;
  Candidate best = {-INFINITY, -1};  // ARGMAX: of the token row this thread looks after

  // Row `i` of a paired group of `m` pairs is gate i, row m + i is up i.
  DISTMK_FN void store_pair(uint32_t row, uint32_t column, float gate, float up) {
    if (bias) gate += bias[column], up += bias[args.n + column];
    context.at<float>(args.out)[uint64_t{row} * args.out_stride + column] = gate / (1.0f + __expf(-gate)) * up;
  }

  DISTMK_FN void store(uint32_t row, uint32_t column, float value) {
    if (bias) value += bias[column];
    const uint64_t place = uint64_t{row} * args.out_stride + column;
    switch (static_cast<Epilogue>(args.epilogue)) {
      case Epilogue::ADD: {
        float* out = context.at<float>(args.out) + place;
        *out = __ldcg(out) + value;
        break;
      }
      case Epilogue::PUSH:
        for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
          if (float* out = context.peer<float>(rank, args.out)) out[uint64_t{row} * args.n + column] = value;
        break;
      case Epilogue::ARGMAX: {
        const auto token = static_cast<int32_t>(args.first_token + column);
        if (args.logits) context.at<float>(args.logits)[uint64_t{row} * args.logits_stride + column] = value;
        if (best.token < 0 || value > best.value || (value == best.value && token < best.token)) best = {value, token};
        break;
      }
      default:
        context.at<float>(args.out)[place] = value;
    }
  }
};

// Adds up the warps' sums of a round and hands each value on. Thread t looks after token row t % num_rows only.
template <uint32_t TILES>
DISTMK_FN void finish_round(Output& out, uint32_t first_group, uint32_t groups) {
  const uint32_t rows_total = slab_rows(out.args);
  const auto* sums = reinterpret_cast<const float*>(shared().scratch);
  constexpr uint32_t WIDTH = TILES * 4;
  const bool paired = out.args.epilogue == static_cast<uint32_t>(Epilogue::SWIGLU);
  const uint32_t row = threadIdx.x % WIDTH;
  if (row >= out.num_rows) return;
  float scale = 1.0f;
  if (out.args.norm) {
    float squares = 0;
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) squares += shared().squares[row][warp];
    scale = rsqrtf(squares / static_cast<float>(out.args.k) + out.args.eps);
  }
  const auto total = [&](uint32_t weight_row) {
    float sum = 0;
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp)
      sum += sums[(warp * ROUND_GROUPS * TILE_ROWS + weight_row) * WIDTH + row];
    return sum * scale;
  };
  for (uint32_t i = threadIdx.x / WIDTH; i < groups * TILE_ROWS; i += NUM_CONSUMERS / WIDTH) {
    const uint32_t begin = (first_group + i / TILE_ROWS) * TILE_ROWS, in_group = i % TILE_ROWS;
    const uint32_t group_rows = min(TILE_ROWS, rows_total - begin);
    if (paired && in_group < group_rows / 2)
      out.store_pair(row, begin / 2 + in_group, total(i), total(i + group_rows / 2));
    else if (!paired && in_group < group_rows)
      out.store(row, begin + in_group, total(i));
  }
}

// The best candidate of each sampled row, over the threads that look after it.
template <uint32_t TILES>
DISTMK_FN void write_candidates(Output& out) {
  constexpr uint32_t WIDTH = TILES * 4;
  auto* all = reinterpret_cast<Candidate*>(shared().scratch);
  all[threadIdx.x] = out.best;
  out.context.team.sync();
  if (threadIdx.x >= MAX_ROWS) return;
  Candidate best = {-INFINITY, -1};
  const uint32_t row = threadIdx.x;
  if (row < out.num_rows && (!out.batch || out.batch->rows[row].sample)) {
    for (uint32_t t = row; t < NUM_CONSUMERS; t += WIDTH) {
      const Candidate& other = all[t];
      if (other.token < 0) continue;
      if (best.token < 0 || other.value > best.value || (other.value == best.value && other.token < best.token))
        best = other;
    }
  }
  out.context.at<Candidate>(out.args.out)[row] = best;
}

template <uint32_t TILES>
DISTMK_FN void run(Context& context, const LinearArgs& args, uint32_t num_rows) {
  const Team& team = context.team;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t first_stage = shared().next_stage, chunks = num_chunks(args), groups = num_groups(args);
  const Activations x = take_in(context, args, num_rows);
  Output out{context, args, context.batch(args.batch), context.at<float>(args.bias), num_rows};
  auto* sums = reinterpret_cast<float*>(shared().scratch);
  uint32_t stage = first_stage;
  for (uint32_t round = 0; round < groups; round += ROUND_GROUPS) {
    const uint32_t in_round = min(ROUND_GROUPS, groups - round);
#pragma unroll
    for (uint32_t g = 0; g < ROUND_GROUPS; ++g) {
      if (g >= in_round) break;
      float acc[TILES][4] = {};
      // Stages go round the warps; this warp's next one at or after `stage`.
      for (uint32_t chunk = (warp - stage) % NUM_WARPS; chunk < chunks; chunk += NUM_WARPS) {
        const uint32_t slot = slot_of(stage + chunk);
        barrier_wait(&shared().ring.full[slot], parity_of(stage + chunk));
        const uint32_t k0 = chunk * TILE_K;
        multiply_any<TILES>(shared().slots + slot * STAGE_BYTES, min(TILE_K, args.k_pitch - k0), x, k0, acc);
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared().ring.empty[slot]);
      }
      stage += chunks;
#pragma unroll
      for (uint32_t tile = 0; tile < TILES; ++tile) {
        // High and low half of a token are neighbouring columns: one thread holds both.
        const uint32_t at = (warp * ROUND_GROUPS + g) * TILE_ROWS + lane / 4, token = tile * 4 + lane % 4;
        sums[at * (TILES * 4) + token] = acc[tile][0] + acc[tile][1];
        sums[(at + 8) * (TILES * 4) + token] = acc[tile][2] + acc[tile][3];
      }
    }
    team.sync();
    finish_round<TILES>(out, round, in_round);
    team.sync();
  }
  if (args.epilogue == static_cast<uint32_t>(Epilogue::ARGMAX)) write_candidates<TILES>(out);
  if (team.leader()) shared().next_stage = stage;
}

}  // namespace linear

DISTMK_FN void body_linear(Context& context, const LinearArgs& args) {
  const Batch* batch = context.batch(args.batch);
  const uint32_t num_rows = batch ? batch->num_rows : 1;
  if (num_rows <= 4)
    linear::run<1>(context, args, num_rows);
  else if (num_rows <= 8)
    linear::run<2>(context, args, num_rows);
  else
    linear::run<4>(context, args, num_rows);
  if (args.epilogue == static_cast<uint32_t>(Epilogue::PUSH))
    context.push_far(args.out, uint64_t{num_rows} * args.n * sizeof(float));
}

}  // namespace distmk
