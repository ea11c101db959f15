// Epilogue of linear layers: reduces the warps' partial accumulators (split-K within the CTA), then stores. n: token,
// m: weight row of the slab, which is a column of the output.
//   value[n, m] = scale[n] * sum over warps of partial[warp][n][m] + bias[m]     scale: 1 / rms of token n, where
//   normalized STORE, ADD   out[n, m] = value, or += value, in float32; out_bf16, if any, gets the same in bf16 SWIGLU
//   out[n, m] = silu(value[n, gate m]) * value[n, up m], in bf16 PUSH         out[n, m] = value on every rank, in
//   float32 ARGMAX       out[n] = largest value and its token id; logits[n, m] = value, if wanted
// With `reset`, out (out_bf16, if any) of an earlier iteration is zeroed at the same elements
// (device/comm/lamport.cuh).
#pragma once
#include "device/comm/lamport.cuh"
#include "device/core/marks.cuh"
#include "device/linear/mainloop.cuh"
#include "device/sampling/argmax.cuh"

namespace distmk {
namespace linear {

// Thread t stores weight row t % M_BLOCK of each M block, for one group of tokens: those that are the group's number
// modulo TOKEN_GROUPS. Groups rotate from M block to M block, so that a single token is not always the same two warps'
// work.
constexpr uint32_t TOKEN_GROUPS = NUM_CONSUMERS / M_BLOCK;
static_assert(NUM_CONSUMERS % M_BLOCK == 0 && M_BLOCK % 32 == 0 && N_TILE % TOKEN_GROUPS == 0, "");

DISTMK_FN uint32_t thread_row() { return threadIdx.x % M_BLOCK; }
// The thread's i-th token.
DISTMK_FN uint32_t thread_token(uint32_t i, uint32_t rotation) {
  return (threadIdx.x / M_BLOCK + rotation) % TOKEN_GROUPS + i * TOKEN_GROUPS;
}

// Whether the loader is throttled while the task's triggers fire: where the tasks behind it wait for their events,
// instead of polling its elements. Behind queries, keys and values, too, which measured faster.
DISTMK_FN bool throttles_loader(const RankState& state, const LinearArgs& args) {
  switch (static_cast<Epilogue>(args.epilogue)) {
    case Epilogue::PUSH:
      return state.transport != nullptr;
    case Epilogue::ADD:
    case Epilogue::SWIGLU:
      return !args.reset;
    default:
      return true;
  }
}

DISTMK_FN float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// One token: where a weight row's value goes, worked out before the partial sums are there, as every instruction behind
// them is latency. A null pointer: nothing goes there. Set one by one: the compiler would load `= {}` from memory.
struct OutputPointers {
  __nv_bfloat16 *bf16, *bf16_reset;
  float *f32, *f32_reset;
  float bias, up_bias;
  uint32_t up_rows;  // SWIGLU: the sum of a gate's up is so many rows behind the gate's

  DISTMK_FN OutputPointers() {
    bf16 = bf16_reset = nullptr;
    f32 = f32_reset = nullptr;
    bias = up_bias = 0.0f;
    up_rows = 0;
  }
  // PUSH: on `rank`, if a pointer reaches it.
  DISTMK_FN void find(const Context& context, const LinearArgs& args, uint32_t column, uint32_t rank) {
    if (const float* biases = context.at<float>(args.bias)) {
      bias = biases[column];
      if (up_rows) up_bias = biases[args.n + column];
    }
    const auto at = [&](auto* begin) { return begin ? begin + column : nullptr; };
    switch (static_cast<Epilogue>(args.epilogue)) {
      case Epilogue::PUSH:
        f32 = at(context.peer<float>(rank, args.out));
        break;
      case Epilogue::SWIGLU:
        find_bf16(context, args, args.out, column);
        break;
      default:
        f32 = at(context.at<float>(args.out));
        if (args.out_bf16)
          find_bf16(context, args, args.out_bf16, column);
        else
          f32_reset = at(context.at<float>(args.reset));
    }
  }
  DISTMK_FN void store(float value) const {
    if (bf16) LamportVector{bf16, bf16_reset}.store(0, value);  // first: this is what other tasks poll
    if (f32) publish(f32, value);
    if (f32_reset) publish_store(f32_reset, 0.0f);
  }

 private:
  DISTMK_FN void find_bf16(const Context& context, const LinearArgs& args, uint64_t operand, uint32_t column) {
    bf16 = context.at<__nv_bfloat16>(operand) + column;
    auto* reset = context.at<__nv_bfloat16>(args.reset);
    bf16_reset = reset ? reset + column : nullptr;
  }
};

template <uint32_t N_TILES>
struct EpilogueParams {
  static constexpr uint32_t TOKENS_PER_THREAD = N_TILES * N_TILE / TOKEN_GROUPS;
  Context& context;
  const LinearArgs& args;
  const float* bias;
  uint32_t num_tokens;

  DISTMK_FN EpilogueParams(Context& c, const LinearArgs& a, uint32_t tokens)
      : context(c), args(a), bias(c.at<float>(a.bias)), num_tokens(tokens) {}

  DISTMK_FN Epilogue epilogue() const { return static_cast<Epilogue>(args.epilogue); }

  // ARGMAX: the best of this thread's weight rows for its i-th token. In shared memory: in registers they would be
  // missing to all other tasks.
  DISTMK_FN static Candidate& best(uint32_t i) {
    static_assert(TOKENS_PER_THREAD * NUM_CONSUMERS * sizeof(Candidate) <= WORK_BYTES, "");
    return reinterpret_cast<Candidate*>(shared().work)[i * NUM_CONSUMERS + threadIdx.x];
  }
  // Once the tasks before have left shared memory.
  DISTMK_FN void init_candidates() const {
    if (epilogue() != Epilogue::ARGMAX) return;
#pragma unroll
    for (uint32_t i = 0; i < TOKENS_PER_THREAD; ++i) best(i) = {-INFINITY, -1};
  }

  DISTMK_FN float residual_at(uint32_t token, uint32_t column) const {
    return __ldcg(context.at<float>(args.out) + uint64_t{token} * args.out_stride + column);
  }

  DISTMK_FN static float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
  // Several tokens.
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
        if (args.out_bf16)  // first: this is what other tasks poll
          bf16_at(args.out_bf16).store(uint64_t{token} * args.out_bf16_stride + column, value);
        publish(context.at<float>(args.out) + place, value);
        if (float* reset = args.out_bf16 ? nullptr : context.at<float>(args.reset)) publish_store(reset + place, 0.0f);
    }
  }
  DISTMK_FN void store_pair(uint32_t token, uint32_t column, float gate, float up) const {
    if (bias) gate += bias[column], up += bias[args.n + column];
    bf16_at(args.out).store(uint64_t{token} * args.out_stride + column, swiglu(gate, up));
  }

 private:
  DISTMK_FN LamportVector bf16_at(uint64_t operand) const {
    return {context.at<__nv_bfloat16>(operand), context.at<__nv_bfloat16>(args.reset)};
  }
};

// The epilogue of one M block. In a SWIGLU task an M tile of 2 p rows is p gate rows, then the p up rows of the same
// columns.
template <uint32_t N_TILES>
struct BlockEpilogue {
  using Params = EpilogueParams<N_TILES>;
  MBlock block;
  uint32_t rotation;  // of token groups
  float residual[Params::TOKENS_PER_THREAD];

  // ARGMAX keeps its candidates by thread, so there a token stays the same threads'.
  DISTMK_FN BlockEpilogue(const Params& params, const MBlock& m_block)
      : block(m_block), rotation(params.epilogue() == Epilogue::ARGMAX ? 0 : m_block.begin / M_BLOCK) {
    if (N_TILES == 1) load_residual(params);  // ahead of the mainloop: with two N tiles there are too few registers
  }
  DISTMK_FN void load_residual(const Params& params) {
    const uint32_t column = block.begin + thread_row();
    const bool adds = params.epilogue() == Epilogue::ADD && column < block.end;
#pragma unroll
    for (uint32_t i = 0; i < Params::TOKENS_PER_THREAD; ++i)
      residual[i] = adds && thread_token(i, rotation) < params.num_tokens
                        ? params.residual_at(thread_token(i, rotation), column)
                        : 0.0f;
  }

  // Whether this warp's threads have a token in an N tile. With one token (ONE_TOKEN) that is pushed, each token group
  // pushes it to other ranks.
  template <bool ONE_TOKEN>
  DISTMK_FN bool has_token(const Params& params, uint32_t n_tile) const {
    const bool splits_ranks = ONE_TOKEN && params.epilogue() == Epilogue::PUSH;
    return thread_token(n_tile * N_TILE / TOKEN_GROUPS, rotation) <
           (splits_ranks ? params.context.num_ranks() : params.num_tokens);
  }

  // This warp's partial sums of an N tile, as partial[warp][token][weight row].
  DISTMK_FN void write_partials(const Accumulators<N_TILES>& acc, uint32_t n_tile, uint32_t num_tokens,
                                float* partials) const {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_token = lane % 4 * 2;
    float* out = partials + (warp * N_TILE + first_token) * PARTIAL_SUM_STRIDE + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (first_token + i % 2 >= num_tokens) continue;
#pragma unroll
      for (uint32_t m = 0; m < M_TILES_PER_BLOCK; ++m)
        out[i % 2 * PARTIAL_SUM_STRIDE + m * M_TILE + i / 2 * 8] = acc[m][n_tile][i];
    }
  }

  DISTMK_FN void find_pointers(OutputPointers& pointers, const Params& params) const {
    const uint32_t row = thread_row(), in_tile = row % M_TILE, tile = block.begin + row - in_tile;
    if (tile + in_tile >= block.end) return;
    const bool paired = params.epilogue() == Epilogue::SWIGLU;
    const uint32_t up_rows = min(M_TILE, block.end - tile) / 2;
    if (paired && in_tile >= up_rows) return;
    pointers.up_rows = paired ? up_rows : 0;
    pointers.find(params.context, params.args, (paired ? tile / 2 : tile) + in_tile, thread_token(0, rotation));
  }
  // One token.
  DISTMK_FN void finish_token(const Params& params, const OutputPointers& pointers, const float* partials) const {
    const float scale = params.args.normalized ? norm_scale(params.args, 0) : 1.0f;
    const uint32_t row = thread_row();
    float value = sum_partials(partials, row) * scale + pointers.bias;
    if (pointers.up_rows)
      value = swiglu(value, sum_partials(partials, row + pointers.up_rows) * scale + pointers.up_bias);
    value += residual[0];
    pointers.store(value);
    if (params.epilogue() != Epilogue::PUSH || block.begin + row >= block.end) return;
#pragma unroll 1
    for (uint32_t rank = thread_token(0, rotation) + TOKEN_GROUPS; rank < params.context.num_ranks();
         rank += TOKEN_GROUPS)
      if (float* peer = params.context.template peer<float>(rank, params.args.out))
        publish(peer + block.begin + row, value);
  }

  // Several tokens: those of an N tile.
  DISTMK_FN void finish_tile(const Params& params, uint32_t n_tile, const float* partials) const {
    const uint32_t row = thread_row(), in_tile = row % M_TILE, tile = block.begin + row - in_tile;
    if (tile + in_tile >= block.end) return;
    const uint32_t tile_rows = min(M_TILE, block.end - tile);
    const bool paired = params.epilogue() == Epilogue::SWIGLU;
    if (paired && in_tile >= tile_rows / 2) return;
    constexpr uint32_t PER_TILE = N_TILE / TOKEN_GROUPS;
#pragma unroll
    for (uint32_t n = 0; n < PER_TILE; ++n) {
      const uint32_t i = n_tile * PER_TILE + n, token = thread_token(i, rotation);
      if (token >= params.num_tokens) break;
      const float scale = params.args.normalized ? norm_scale(params.args, token) : 1.0f;
      const float* of_token = partials + (token % N_TILE) * PARTIAL_SUM_STRIDE;
      const float value = sum_partials(of_token, row) * scale;
      if (paired)
        params.store_pair(token, tile / 2 + in_tile, value, sum_partials(of_token, row + tile_rows / 2) * scale);
      else
        params.store(i, token, tile + in_tile, value, residual[i]);
    }
  }

 private:
  DISTMK_FN static float sum_partials(const float* partials, uint32_t row) {
    float sum = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) sum += partials[warp * N_TILE * PARTIAL_SUM_STRIDE + row];
    return sum;
  }
  DISTMK_FN static float norm_scale(const LinearArgs& args, uint32_t token) {
    float squares = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) squares += shared().squares[token][warp];
    return rsqrtf(__fdividef(squares, static_cast<float>(args.k)) + args.eps);
  }
};

// ARGMAX: the best candidate of each sampled token, over the threads that keep one.
template <uint32_t N_TILES>
DISTMK_FN void write_candidates(const EpilogueParams<N_TILES>& params) {
  auto* all = reinterpret_cast<Candidate*>(shared().scratch);
  const uint32_t warp = opaque(threadIdx.x / 32), lane = threadIdx.x % 32;  // opaque: else addresses lie on the stack
  constexpr uint32_t WARPS_PER_TOKEN = M_BLOCK / 32;
#pragma unroll
  for (uint32_t i = 0; i < EpilogueParams<N_TILES>::TOKENS_PER_THREAD; ++i) {
    Candidate best = params.best(i);
    best = warp_argmax(best);
    if (lane == 0) all[thread_token(i, 0) * WARPS_PER_TOKEN + warp % WARPS_PER_TOKEN] = best;
  }
  params.context.team.sync();
  const uint32_t token = threadIdx.x;
  if (token >= MAX_ROWS) return;
  Candidate best = {-INFINITY, -1};
  const Batch* batch = params.context.batch(params.args.batch);
  if (token < params.num_tokens && (!batch || batch->rows[token].sample))
    for (uint32_t i = 0; i < WARPS_PER_TOKEN; ++i) best = better_of(best, all[token * WARPS_PER_TOKEN + i]);
  params.context.template at<Candidate>(params.args.out)[token] = best;
}

// Whether this warp has no tile in a weight row's last K block, whose stages it then skips without waiting for them. It
// waits for the split-K reduction instead: a full lap of the pipeline ahead of the other warps, the phase bits would
// alias.
DISTMK_FN bool skips_last_k_block(const LinearArgs& args) { return warp_k_begin() > (args.k_pitch - 1) % K_BLOCK; }

// Split-K reduction and stores of an M block. Each warp writes its partial sums; warps that
// store a token of the N tile wait for the partial sums of all, the others go on. The buffers hold two reductions of up
// to N_TILE / 2 tokens, one of more. From the last partial sums of the slab (of `num_rows` rows) until its triggers
// have fired the loader is throttled, where throttles_loader() says so. ONE_TOKEN: output pointers are found ahead.
template <uint32_t N_TILES, bool ONE_TOKEN>
DISTMK_FN void reduce_and_store(BlockEpilogue<N_TILES>& epilogue, const Accumulators<N_TILES>& acc,
                                const EpilogueParams<N_TILES>& params, uint32_t& reduction, uint32_t num_rows) {
  if (N_TILES > 1) epilogue.load_residual(params);
  SplitKBuffers& buffers = shared().sums;
  const bool two = params.num_tokens <= N_TILE / 2;
#pragma unroll
  for (uint32_t n_tile = 0; n_tile < N_TILES; ++n_tile, ++reduction) {
    const uint32_t last = reduction - (two ? 2 : 1), slot = buffers.slot(reduction);
    float* partials = reinterpret_cast<float*>(shared().scratch) + (two ? slot * (N_TILE / 2) * PARTIAL_SUM_STRIDE : 0);
    barrier_wait(&buffers.empty[buffers.slot(last)], buffers.parity(last));
    epilogue.write_partials(acc, n_tile, min(N_TILE, params.num_tokens - n_tile * N_TILE), partials);
    warp_arrive(&buffers.full[slot]);
    const bool stores = epilogue.template has_token<ONE_TOKEN>(params, n_tile);
    const bool throttles =
        stores && epilogue.block.end == num_rows && throttles_loader(params.context.rank_state, params.args);
    const uint32_t next_slab = throttles ? shared().num_slabs[threadIdx.x / 32].get() + 1 : 0;
    OutputPointers pointers;
    if constexpr (ONE_TOKEN) {
      if (stores) epilogue.find_pointers(pointers, params);
    }
    if (stores || skips_last_k_block(params.args)) barrier_wait(&buffers.full[slot], buffers.parity(reduction));
    if (stores) {
      mark(Mark::MET);
      if (next_slab && threadIdx.x % 32 == 0) shared().ring.throttle.set(next_slab);
      if constexpr (ONE_TOKEN)
        epilogue.finish_token(params, pointers, partials);
      else
        epilogue.finish_tile(params, n_tile, partials);
      mark(Mark::STORED);
    }
    warp_arrive(&buffers.empty[slot]);
  }
}

}  // namespace linear
}  // namespace distmk
