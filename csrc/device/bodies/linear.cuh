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

// The task's activations as columns of halves in shared memory: column 2 r + h holds half h of row r. All of K where it
// fits, else the block of K that is being multiplied.
struct Activations {
  const float* x;
  const float* norm;
  uint32_t k, k_pitch, x_stride, num_rows;
  bool resident;

  DISTMK_FN uint32_t column_stride() const { return (resident ? k_pitch : BLOCK_K) + X_PAD; }
  DISTMK_FN uint32_t first_of(uint32_t k0) const { return resident ? 0 : k0; }
};

DISTMK_FN Activations activations_of(Context& context, const LinearArgs& args, uint32_t num_rows) {
  const uint32_t whole_bytes = 2 * num_rows * (args.k_pitch + X_PAD) * sizeof(__nv_bfloat16);
  return {context.at<float>(args.x),  context.at<float>(args.norm), args.k, args.k_pitch, args.x_stride, num_rows,
          whole_bytes <= VECTOR_BYTES};
}

// Four activations from `k` on, zeros behind the end.
DISTMK_FN float4 load_four(const float* x, uint32_t k, uint32_t end, bool aligned) {
  if (aligned && k + 4 <= end) return __ldcg(reinterpret_cast<const float4*>(x + k));
  const auto at = [&](uint32_t i) { return i < end ? __ldcg(x + i) : 0.0f; };
  return {at(k), at(k + 1), at(k + 2), at(k + 3)};
}

DISTMK_FN float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Four activations times the norm's weights, as halves.
DISTMK_FN void store_four(const float4& v, const float4& g, __nv_bfloat16* high, uint32_t column_stride) {
  const float2 front = {v.x * g.x, v.y * g.y}, back = {v.z * g.z, v.w * g.w};
  *reinterpret_cast<uint2*>(high) = {half_of(front, 0), half_of(back, 0)};
  *reinterpret_cast<uint2*>(high + column_stride) = {half_of(front, 1), half_of(back, 1)};
}

// A row's squares, those of the columns before `k0` known already.
DISTMK_FN void keep_squares(const Team& team, uint32_t row, uint32_t k0, float squares) {
  for (uint32_t step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  float& sum = shared().squares[row][team.index / 32];
  if (team.index % 32 == 0) sum = k0 ? sum + squares : squares;
}

constexpr uint32_t PIECE = 4 * NUM_CONSUMERS;  // columns that the team loads at once, 16 bytes a thread
constexpr uint32_t IN_FLIGHT = 4;              // pieces: each takes a trip to the second-level cache

// Brings [k0, k1) of all rows into shared memory; `add_squares`: adds up their squares too. Any number of rows, any
// alignment.
static __device__ __noinline__ void stage_any(const Team& team, const Activations& a, uint32_t k0, uint32_t k1,
                                              bool add_squares) {
  const bool aligned = (reinterpret_cast<uint64_t>(a.x) | reinterpret_cast<uint64_t>(a.norm)) % 16 == 0 &&
                       (a.num_rows == 1 || a.x_stride % 4 == 0);
  auto* columns = reinterpret_cast<__nv_bfloat16*>(shared().vector);
  for (uint32_t first = 0; first < a.num_rows; first += IN_FLIGHT) {
    float squares[IN_FLIGHT] = {};
    for (uint32_t k = k0 + 4 * team.index; k < k1; k += PIECE) {
      const float4 g = a.norm ? load_four(a.norm, k, a.k, aligned) : float4{1, 1, 1, 1};
      float4 v[IN_FLIGHT];
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + i < a.num_rows) v[i] = load_four(a.x + uint64_t{first + i} * a.x_stride, k, a.k, aligned);
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        if (first + i >= a.num_rows) break;
        squares[i] += dot(v[i], v[i]);
        store_four(v[i], g, columns + 2 * (first + i) * a.column_stride() + k - k0, a.column_stride());
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i)
      if (add_squares && first + i < a.num_rows) keep_squares(team, first + i, k0, squares[i]);
  }
}

// The same of a single row, which is what most tasks have: all of it is in flight at once.
DISTMK_FN void stage_row(const Team& team, const Activations& a) {
  auto* high = reinterpret_cast<__nv_bfloat16*>(shared().vector);
  float squares = 0;
  for (uint32_t first = 4 * team.index; first < a.k_pitch; first += IN_FLIGHT * PIECE) {
    float4 v[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      v[i] = {0, 0, 0, 0}, g[i] = {1, 1, 1, 1};
      if (k < a.k) v[i] = __ldcg(reinterpret_cast<const float4*>(a.x + k));
      if (a.norm && k < a.k) g[i] = __ldcg(reinterpret_cast<const float4*>(a.norm + k));
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
      const uint32_t k = first + i * PIECE;
      squares += dot(v[i], v[i]);
      if (k < a.k_pitch) store_four(v[i], g[i], high + k, a.column_stride());
    }
  }
  if (a.norm) keep_squares(team, 0, 0, squares);
}

DISTMK_FN void stage_all(const Team& team, const Activations& a) {
  const uint64_t addresses = reinterpret_cast<uint64_t>(a.x) | reinterpret_cast<uint64_t>(a.norm);
  if (a.num_rows == 1 && (addresses | (a.k * sizeof(float))) % 16 == 0)
    stage_row(team, a);
  else
    stage_any(team, a, 0, a.k_pitch, a.norm != nullptr);
}

DISTMK_FN void load_matrices(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

DISTMK_FN void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where this lane reads what it gives to the tensor core.
template <uint32_t TILES>
struct Lane {
  uint32_t row,
      chunk[4];  // of a tile of weights: its row, and the 16-byte chunks of four steps, as they were exchanged
  uint32_t columns[TILES];  // of the activations, in bytes

  DISTMK_FN explicit Lane(const Activations& x) {
    const uint32_t lane = threadIdx.x % 32;
    row = lane % 16;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) chunk[i] = ((2 * i + lane / 16) ^ (row % 8)) * 16;
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
      // A column that belongs to no token only spoils its own sums, which nobody reads.
      const uint32_t column = tile * 8 + lane % 8, present = column < 2 * x.num_rows ? column : 0;
      columns[tile] = shared_address(shared().vector) + present * x.column_stride() * 2 + lane / 8 * 16;
    }
  }
};

// One tile (a stage of the ring) into the sums of its row group; `k` counts from the first staged activation. 64
// columns of weights at a time, even and odd steps into sums of their own: a product waits for the last one into the
// same.
template <uint32_t TILES>
DISTMK_FN void multiply_tile(const char* stage, uint32_t tile_k, uint32_t k, const Lane<TILES>& lane,
                             float (&sums)[TILES][4]) {
  const uint32_t rows = shared_address(stage) + lane.row * tile_k * 2;
  float odd[TILES][4] = {};
#pragma unroll 4
  for (uint32_t at = 0; at < tile_k; at += 64) {
    uint32_t a[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) load_matrices(rows + at * 2 + lane.chunk[i], a[i]);
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
      uint32_t b[2][4];  // of two steps each
      load_matrices(lane.columns[tile] + (k + at) * 2, b[0]);
      load_matrices(lane.columns[tile] + (k + at) * 2 + 64, b[1]);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        multiply(a[2 * i], b[i][0], b[i][1], sums[tile]);
        multiply(a[2 * i + 1], b[i][2], b[i][3], odd[tile]);
      }
    }
  }
#pragma unroll
  for (uint32_t tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums[tile][i] += odd[tile][i];
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

  DISTMK_FN float residual_at(uint32_t row, uint32_t column) const {
    return __ldcg(context.at<float>(args.out) + uint64_t{row} * args.out_stride + column);
  }

  DISTMK_FN void store(uint32_t row, uint32_t column, float value, float residual) {
    if (bias) value += bias[column];
    const uint64_t place = uint64_t{row} * args.out_stride + column;
    switch (static_cast<Epilogue>(args.epilogue)) {
      case Epilogue::ADD:
        context.at<float>(args.out)[place] = residual + value;
        break;
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

// A round's values as they are dealt to the threads: thread t looks after token row t % WIDTH only, and after every
// STEP-th row of weights.
template <uint32_t TILES>
struct Dealt {
  static constexpr uint32_t WIDTH = TILES * 4, STEP = NUM_CONSUMERS / WIDTH;
  static constexpr uint32_t COUNT = (ROUND_GROUPS * TILE_ROWS + STEP - 1) / STEP;  // a thread's
  uint32_t first_group, num_groups;
  float residual[COUNT];

  DISTMK_FN Dealt(const Output& out, uint32_t group, uint32_t groups) : first_group(group), num_groups(groups) {
    const uint32_t row = threadIdx.x % WIDTH;
    const bool adds = out.args.epilogue == static_cast<uint32_t>(Epilogue::ADD) && row < out.num_rows;
#pragma unroll
    for (uint32_t n = 0; n < COUNT; ++n) {
      const uint32_t i = threadIdx.x / WIDTH + n * STEP, column = first_group * TILE_ROWS + i;
      residual[n] = adds && i < num_groups * TILE_ROWS && column < out.args.n ? out.residual_at(row, column) : 0.0f;
    }
  }

  // Adds up the warps' sums and hands each value on.
  DISTMK_FN void finish(Output& out) const {
    const uint32_t rows_total = slab_rows(out.args), row = threadIdx.x % WIDTH;
    const auto* sums = reinterpret_cast<const float*>(shared().scratch);
    const bool paired = out.args.epilogue == static_cast<uint32_t>(Epilogue::SWIGLU);
    if (row >= out.num_rows) return;
    float scale = 1.0f;
    if (out.args.norm) {
      float squares = 0;
      for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) squares += shared().squares[row][warp];
      scale = rsqrtf(squares / static_cast<float>(out.args.k) + out.args.eps);
    }
    const auto total = [&](uint32_t weight_row) {
      float sum = 0;
#pragma unroll
      for (uint32_t warp = 0; warp < NUM_WARPS; ++warp)
        sum += sums[(warp * ROUND_GROUPS * TILE_ROWS + weight_row) * WIDTH + row];
      return sum * scale;
    };
#pragma unroll
    for (uint32_t n = 0; n < COUNT; ++n) {
      const uint32_t i = threadIdx.x / WIDTH + n * STEP;
      if (i >= num_groups * TILE_ROWS) break;
      const uint32_t begin = (first_group + i / TILE_ROWS) * TILE_ROWS, in_group = i % TILE_ROWS;
      const uint32_t group_rows = min(TILE_ROWS, rows_total - begin);
      if (paired && in_group < group_rows / 2)
        out.store_pair(row, begin / 2 + in_group, total(i), total(i + group_rows / 2));
      else if (!paired && in_group < group_rows)
        out.store(row, begin + in_group, total(i), residual[n]);
    }
  }
};

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

// The slab comes in rounds of ROUND_GROUPS row groups, a round in blocks of BLOCK_K columns, a block group by group,
// tile by tile; tiles go round the warps.
template <uint32_t TILES>
DISTMK_FN void run(Context& context, const LinearArgs& args, uint32_t num_rows) {
  const Team& team = context.team;
  const uint32_t warp = threadIdx.x / 32, lane_index = threadIdx.x % 32, groups = num_groups(args);
  const Activations x = activations_of(context, args, num_rows);
  const Lane<TILES> lane(x);
  Output out{context, args, context.batch(args.batch), context.at<float>(args.bias), num_rows};
  const uint32_t k_pitch = args.k_pitch;
  uint32_t stage_number = shared().next_stage;
  if (x.resident) stage_all(team, x);
#pragma unroll 1
  for (uint32_t round = 0; round < groups; round += ROUND_GROUPS) {
    const uint32_t in_round = min(ROUND_GROUPS, groups - round);
    const Dealt<TILES> dealt(out, round, in_round);
    float sums[ROUND_GROUPS][TILES][4] = {};
    if (x.resident) team.sync();  // the activations are there, and the last round's sums were read
#pragma unroll 1
    for (uint32_t block = 0; block < k_pitch; block += BLOCK_K) {
      const uint32_t block_end = min(block + BLOCK_K, k_pitch);
      const uint32_t chunks = (block_end - block + TILE_K - 1) / TILE_K;
      if (!x.resident) {
        team.sync();
        stage_any(team, x, block, block_end, args.norm && round == 0);
        team.sync();
      }
#pragma unroll
      for (uint32_t g = 0; g < ROUND_GROUPS; ++g) {
        if (g >= in_round) break;
        const uint32_t chunk = (warp - stage_number) % NUM_WARPS;  // this warp's tile of the group, if it has one
        if (chunk < chunks) {
          const uint32_t number = stage_number + chunk, slot = slot_of(number), k = block + chunk * TILE_K;
          barrier_wait(&shared().ring.full[slot], parity_of(number));
          multiply_tile<TILES>(shared().slots + slot * STAGE_BYTES, min(TILE_K, k_pitch - k), k - x.first_of(block),
                               lane, sums[g]);
          __syncwarp();
          if (lane_index == 0) barrier_arrive(&shared().ring.empty[slot]);
        }
        stage_number += chunks;
      }
    }
    auto* scratch = reinterpret_cast<float*>(shared().scratch);
#pragma unroll
    for (uint32_t g = 0; g < ROUND_GROUPS; ++g) {
#pragma unroll
      for (uint32_t tile = 0; tile < TILES; ++tile) {
        // High and low half of a token are neighbouring columns: one thread holds both.
        const uint32_t at = (warp * ROUND_GROUPS + g) * TILE_ROWS + lane_index / 4, token = tile * 4 + lane_index % 4;
        scratch[at * (TILES * 4) + token] = sums[g][tile][0] + sums[g][tile][1];
        scratch[(at + 8) * (TILES * 4) + token] = sums[g][tile][2] + sums[g][tile][3];
      }
    }
    team.sync();
    dealt.finish(out);
  }
  if (args.epilogue == static_cast<uint32_t>(Epilogue::ARGMAX)) {
    team.sync();
    write_candidates<TILES>(out);
  }
  if (team.leader()) shared().next_stage = stage_number;
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
