// What becomes of a linear task's sums: a round of weight rows at a time they are added up over the warps, scaled, and
// stored, pushed or compared.
#pragma once
#include "device/comm/lamport.cuh"
#include "device/core/marks.cuh"
#include "device/linear/activations.cuh"
#include "device/linear/row_epilogue.cuh"
#include "device/sampling/argmax.cuh"

namespace distmk {
namespace linear {

// What becomes of the sums. Thread t looks after weight row t % DEALT_ROWS of each round, for every DEALT_TOKENS-th
// token from t / DEALT_ROWS on, or a later one: rounds turn it on, so that a single token is not always the same
// warps'.
constexpr uint32_t DEALT_ROWS = 64, DEALT_TOKENS = NUM_CONSUMERS / DEALT_ROWS;
static_assert(DEALT_ROWS >= M_BLOCK, "");

template <uint32_t N_TILES>
struct Output {
  static constexpr uint32_t COUNT = N_TILES * N_TILE / DEALT_TOKENS;  // tokens of a thread
  Context& context;
  const LinearArgs& args;
  const float* bias;
  uint32_t num_rows;

  DISTMK_FN Output(Context& c, const LinearArgs& a, uint32_t rows)
      : context(c), args(a), bias(c.at<float>(a.bias)), num_rows(rows) {}

  // Once shared memory is free.
  DISTMK_FN void start() const {
    if (epilogue() != Epilogue::ARGMAX) return;
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) best(i) = {-INFINITY, -1};
  }
  // ARGMAX: of this thread's weight rows. Not in registers, which all other tasks would have to do without.
  DISTMK_FN static Candidate& best(uint32_t i) {
    static_assert(COUNT * NUM_CONSUMERS * sizeof(Candidate) <= WORK_BYTES, "");
    return reinterpret_cast<Candidate*>(shared().work)[i * NUM_CONSUMERS + threadIdx.x];
  }

  DISTMK_FN Epilogue epilogue() const { return static_cast<Epilogue>(args.epilogue); }
  DISTMK_FN static uint32_t token_of(uint32_t i, uint32_t turn = 0) {
    return (threadIdx.x / DEALT_ROWS + turn) % DEALT_TOKENS + i * DEALT_TOKENS;
  }

  DISTMK_FN LamportVector vector_at(uint64_t operand) const {
    return {context.at<__nv_bfloat16>(operand), context.at<__nv_bfloat16>(args.reset)};
  }

  DISTMK_FN static float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
  // Row `i` of a paired group of `m` pairs is gate i, row m + i is up i.
  DISTMK_FN void store_pair(uint32_t token, uint32_t column, float gate, float up) const {
    if (bias) gate += bias[column], up += bias[args.n + column];
    vector_at(args.out).store(uint64_t{token} * args.out_stride + column, swiglu(gate, up));
  }

  DISTMK_FN float residual_at(uint32_t token, uint32_t column) const {
    return __ldcg(context.at<float>(args.out) + uint64_t{token} * args.out_stride + column);
  }

  DISTMK_FN void store(uint32_t i, uint32_t token, uint32_t column, float value, float residual) const {
    if (bias) value += bias[column];
    const uint64_t place = uint64_t{token} * args.out_stride + column;
    switch (epilogue()) {
      case Epilogue::PUSH:
        for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
          if (float* out = context.peer<float>(rank, args.out)) publish(out + uint64_t{token} * args.n + column, value);
        break;
      case Epilogue::ARGMAX:
        if (args.logits) context.at<float>(args.logits)[uint64_t{token} * args.logits_stride + column] = value;
        best(i) = better_of(best(i), {value, static_cast<int32_t>(args.first_token + column)});
        break;
      case Epilogue::ADD:
        value += residual;
        [[fallthrough]];
      default:
        if (args.out_bf16)  // first: others look for it
          vector_at(args.out_bf16).store(uint64_t{token} * args.out_bf16_stride + column, value);
        publish(context.at<float>(args.out) + place, value);
        if (float* reset = args.out_bf16 ? nullptr : context.at<float>(args.reset)) publish_store(reset + place, 0.0f);
    }
  }
};

// A round of up to M_TILES_PER_BLOCK groups of weight rows.
template <uint32_t N_TILES>
struct Round {
  using Sums = float[M_TILES_PER_BLOCK][N_TILES][4];
  uint32_t first_row, end_row;  // of the slab
  uint32_t turn;
  float residual[Output<N_TILES>::COUNT];

  // The best candidates are kept from round to round, so there a token always is the same threads'.
  DISTMK_FN Round(const Output<N_TILES>& out, uint32_t first, uint32_t end)
      : first_row(first), end_row(end), turn(out.epilogue() == Epilogue::ARGMAX ? 0 : first / M_BLOCK) {
    if (N_TILES == 1) load_residual(out);
  }
  DISTMK_FN void load_residual(const Output<N_TILES>& out) {
    const uint32_t column = first_row + threadIdx.x % DEALT_ROWS;
    const bool adds = out.epilogue() == Epilogue::ADD && column < end_row;
#pragma unroll
    for (uint32_t i = 0; i < Output<N_TILES>::COUNT; ++i)
      residual[i] =
          adds && out.token_of(i, turn) < out.num_rows ? out.residual_at(out.token_of(i, turn), column) : 0.0f;
  }

  // Whether this warp's threads look after a token of a tile. What is pushed of a single row each token's threads take
  // to another rank.
  template <bool ROW>
  DISTMK_FN bool has_token(const Output<N_TILES>& out, uint32_t tile) const {
    const bool shares = ROW && out.epilogue() == Epilogue::PUSH;
    return out.token_of(tile * N_TILE / DEALT_TOKENS, turn) < (shares ? out.context.num_ranks() : out.num_rows);
  }

  // A warp's sums of a tile of tokens, where the others find them.
  DISTMK_FN void write_sums(const Sums& sums, uint32_t tile, uint32_t num_tokens, float* buffer) const {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_token = lane % 4 * 2;
    float* out = buffer + (warp * N_TILE + first_token) * PARTIAL_SUM_STRIDE + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (first_token + i % 2 >= num_tokens) continue;
#pragma unroll
      for (uint32_t g = 0; g < M_TILES_PER_BLOCK; ++g)
        out[i % 2 * PARTIAL_SUM_STRIDE + g * M_TILE + i / 2 * 8] = sums[g][tile][i];
    }
  }

  // Of a single row.
  DISTMK_FN void find(RowGoal& goal, const Output<N_TILES>& out) const {
    const uint32_t row = threadIdx.x % DEALT_ROWS, in_group = row % M_TILE, begin = first_row + row - in_group;
    if (begin + in_group >= end_row) return;
    const bool paired = out.epilogue() == Epilogue::SWIGLU;
    const uint32_t up_rows = min(M_TILE, end_row - begin) / 2;
    if (paired && in_group >= up_rows) return;
    goal.up_rows = paired ? up_rows : 0;
    goal.find(out.context, out.args, (paired ? begin / 2 : begin) + in_group, out.token_of(0, turn));
  }
  // Adds up the warps' sums of a single row and hands each value on.
  DISTMK_FN void finish_row(const Output<N_TILES>& out, const RowGoal& goal, const float* buffer) const {
    const float scale = out.args.normalized ? norm_scale(out.args, 0) : 1.0f;
    const uint32_t row = threadIdx.x % DEALT_ROWS;
    float value = total(buffer, row) * scale + goal.bias;
    if (goal.up_rows) value = out.swiglu(value, total(buffer, row + goal.up_rows) * scale + goal.up_bias);
    value += residual[0];
    goal.store(value);
    if (out.epilogue() != Epilogue::PUSH || first_row + row >= end_row) return;
#pragma unroll 1
    for (uint32_t rank = out.token_of(0, turn) + DEALT_TOKENS; rank < out.context.num_ranks(); rank += DEALT_TOKENS)
      if (float* there = out.context.template peer<float>(rank, out.args.out)) publish(there + first_row + row, value);
  }

  // Adds up the warps' sums of a tile of tokens and hands each value on.
  DISTMK_FN void finish(const Output<N_TILES>& out, uint32_t tile, const float* buffer) const {
    const uint32_t row = threadIdx.x % DEALT_ROWS, in_group = row % M_TILE, begin = first_row + row - in_group;
    if (begin + in_group >= end_row) return;
    const uint32_t group_rows = min(M_TILE, end_row - begin);
    const bool paired = out.epilogue() == Epilogue::SWIGLU;
    if (paired && in_group >= group_rows / 2) return;
    constexpr uint32_t PER_TILE = N_TILE / DEALT_TOKENS;
#pragma unroll
    for (uint32_t n = 0; n < PER_TILE; ++n) {
      const uint32_t i = tile * PER_TILE + n, token = out.token_of(i, turn);
      if (token >= out.num_rows) break;
      const float scale = out.args.normalized ? norm_scale(out.args, token) : 1.0f;
      const float* sums = buffer + (token % N_TILE) * PARTIAL_SUM_STRIDE;
      const float value = total(sums, row) * scale;
      if (paired)
        out.store_pair(token, begin / 2 + in_group, value, total(sums, row + group_rows / 2) * scale);
      else
        out.store(i, token, begin + in_group, value, residual[i]);
    }
  }

 private:
  // Over the warps.
  DISTMK_FN static float total(const float* sums, uint32_t weight_row) {
    float sum = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) sum += sums[warp * N_TILE * PARTIAL_SUM_STRIDE + weight_row];
    return sum;
  }
  DISTMK_FN static float norm_scale(const LinearArgs& args, uint32_t token) {
    float squares = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) squares += shared().squares[token][warp];
    return rsqrtf(__fdividef(squares, static_cast<float>(args.k)) + args.eps);
  }
};

// The best candidate of each sampled token, over the threads that look after it.
template <uint32_t N_TILES>
DISTMK_FN void write_candidates(const Output<N_TILES>& out) {
  auto* all = reinterpret_cast<Candidate*>(shared().scratch);
  const uint32_t warp = opaque(threadIdx.x / 32), lane = threadIdx.x % 32;  // or its place would be kept on the stack
  constexpr uint32_t WARPS_A_TOKEN = DEALT_ROWS / 32;
#pragma unroll
  for (uint32_t i = 0; i < Output<N_TILES>::COUNT; ++i) {
    Candidate best = out.best(i);
    for (uint32_t step = 16; step; step >>= 1) best = better_of(best, exchanged(best, step));
    if (lane == 0) all[out.token_of(i) * WARPS_A_TOKEN + warp % WARPS_A_TOKEN] = best;
  }
  out.context.team.sync();
  const uint32_t token = threadIdx.x;
  if (token >= MAX_ROWS) return;
  Candidate best = {-INFINITY, -1};
  const Batch* batch = out.context.batch(out.args.batch);
  if (token < out.num_rows && (!batch || batch->rows[token].sample))
    for (uint32_t i = 0; i < WARPS_A_TOKEN; ++i) best = better_of(best, all[token * WARPS_A_TOKEN + i]);
  out.context.template at<Candidate>(out.args.out)[token] = best;
}

// Of a block: its first column that is this warp's.
DISTMK_FN uint32_t first_column() { return threadIdx.x / 32 * K_TILE; }

// Whether this warp has no tile in a row's last block. Stages that it passes by it does not wait for; if it passed by
// as many as the ring has, it would take what is still to come there for what comes a lap later.
DISTMK_FN bool passes_by(const LinearArgs& args) { return first_column() > (args.k_pitch - 1) % K_BLOCK; }

// The end of a round: each warp leaves its sums, those that look after a token wait for all of them, as do those that
// have passed by some of its stages, the others go on.
// Up to half a tile of tokens leaves room for two rounds. `rows`: of the slab. From when all sums of its last round are
// there the loader holds, if somebody waits for the task's events, until the clerk has signalled, not sooner.
// `ROW`: a single row, for which there are goals.
template <uint32_t N_TILES, bool ROW>
DISTMK_FN void reduce_split_k(Round<N_TILES>& round, const typename Round<N_TILES>::Sums& sums,
                              const Output<N_TILES>& out, uint32_t& turn, uint32_t rows) {
  if (N_TILES > 1) round.load_residual(out);
  SplitKBuffers& buffers = shared().sums;
  const bool two = out.num_rows <= N_TILE / 2;
#pragma unroll
  for (uint32_t tile = 0; tile < N_TILES; ++tile, ++turn) {
    const uint32_t last = turn - (two ? 2 : 1), slot = buffers.slot(turn);
    float* buffer = reinterpret_cast<float*>(shared().scratch) + (two ? slot * (N_TILE / 2) * PARTIAL_SUM_STRIDE : 0);
    barrier_wait(&buffers.empty[buffers.slot(last)], buffers.parity(last));
    round.write_sums(sums, tile, min(N_TILE, out.num_rows - tile * N_TILE), buffer);
    warp_arrive(&buffers.full[slot]);
    const bool finishes = round.template has_token<ROW>(out, tile);
    const bool holds = finishes && round.end_row == rows && throttles_loader(out.context.rank_state, out.args);
    const uint32_t last_of = holds ? shared().num_slabs[threadIdx.x / 32].get() + 1 : 0;
    RowGoal goal;
    if constexpr (ROW) {
      if (finishes) round.find(goal, out);
    }
    if (finishes || passes_by(out.args)) barrier_wait(&buffers.full[slot], buffers.parity(turn));
    if (finishes) {
      mark(Mark::MET);
      if (last_of && threadIdx.x % 32 == 0) shared().ring.throttle.set(last_of);
      if constexpr (ROW)
        round.finish_row(out, goal, buffer);
      else
        round.finish(out, tile, buffer);
      mark(Mark::STORED);
    }
    warp_arrive(&buffers.empty[slot]);
  }
}

}  // namespace linear
}  // namespace distmk
