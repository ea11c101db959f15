// Linear layers on tensor cores: rows of weights are the m dimension, tokens the n dimension. A token's float32
// activation is split into a high and a low bf16, which take two columns of the same product, so that up to four tokens
// cost no more than one and nothing is lost to rounding but the weights' own.
#pragma once
#include "device/tensor_core.cuh"

namespace distmk {
namespace linear {

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
    if (team.leader() && round + ROUND_GROUPS >= groups) shared().ring.hold = 1;  // until this task has signalled
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
