// Epilogue of linear layers: reduces the warps' partial accumulators (split-K within the CTA) and stores the output.
//   value[n, m] = scale[n] * sum over warps of partial[warp][n][m] + bias[m].
// n: token. m: weight row of the slab, a column of the output. scale: 1 / rms of the token if normalized, else 1.
//   STORE, ADD  out[n, m] = value or += value, in float32. out_bf16, if given, gets the same rounded to bf16.
//   SWIGLU      out[n, m] = silu(value of gate m) * value of up m, in bf16. GEGLU has gelu instead of silu.
//   PUSH        out[n, m] = value on every rank, in float32.
//   ARGMAX      out[n] = the largest value and its token id. Rows that need their logits, or all rows, also get
//               logits[n, m] = value, or softcap * tanh(value / softcap).
// `lamport_reset`, if given, is the out_bf16 of an earlier write in the rotation of buffers (or its out, without
// out_bf16). The same elements are zeroed there.
#pragma once
#include "device/core/marks.cuh"
#include "device/linear/mainloop.cuh"
#include "device/linear/output_pointers.cuh"
#include "device/sampling/argmax.cuh"
#include "runtime/pointwise.h"
#include "runtime/rms.h"
#include "runtime/row_sample.h"

namespace distmk {
namespace linear {

// Thread t stores weight row t % M_BLOCK of each M block for one group of tokens. The tokens of a group are
// TOKEN_GROUPS apart. Groups rotate from M block to M block, so that a single token is not always stored by the same
// two warps.
constexpr uint32_t TOKEN_GROUPS = NUM_CONSUMERS / M_BLOCK;
static_assert(NUM_CONSUMERS % M_BLOCK == 0 && M_BLOCK % 32 == 0 && N_TILE % TOKEN_GROUPS == 0, "");
template <uint32_t N_TILES>
constexpr uint32_t TOKENS_PER_THREAD = N_TILES * N_TILE / TOKEN_GROUPS;

DISTMK_FN uint32_t thread_row() { return own_thread() % M_BLOCK; }
DISTMK_FN uint32_t thread_token(uint32_t i, uint32_t rotation) {
  return (own_thread() / M_BLOCK + rotation) % TOKEN_GROUPS + i * TOKEN_GROUPS;
}

// 1 / rms of a token's `args.k` activations, from the warps' sums of squares (as add_squares() leaves them).
template <class Args>
DISTMK_FN float norm_scale(const Args& args, uint32_t token) {
  float squares = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) squares += shared().squares[token][warp];
  return over_rms(squares, args.k, args.eps);
}

// A token's factor of its sums, for weights whose sums have no other factor.
DISTMK_FN float token_scale(const LinearArgs& args, uint32_t token) {
  return args.applies_rms ? norm_scale(args, token) : 1.0f;
}

// Partial sums are laid out as [warp][token of the N tile][weight row of the M block].
DISTMK_FN float sum_partials(const float* partials, uint32_t row) {
  float sum = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) sum += partials[warp * N_TILE * PARTIAL_SUM_STRIDE + row];
  return sum;
}

// ARGMAX: the best of this thread's weight rows for its i-th token. It is in shared memory, because registers for it
// would be lost to all other tasks.
DISTMK_FN Candidate& thread_best(uint32_t i) {
  static_assert(
      2 * N_TILE / TOKEN_GROUPS * NUM_CONSUMERS * sizeof(Candidate) <= overlay_bytes(Overlay::THREAD_CANDIDATES), "");
  return shared().at<Overlay::THREAD_CANDIDATES, Candidate>()[i * NUM_CONSUMERS + own_thread()];
}
// Called once all earlier tasks have left shared memory.
template <uint32_t N_TILES, class Args>
DISTMK_FN void init_candidates(const EpilogueParams<Args>& params) {
  if (params.kind() != Epilogue::ARGMAX) return;
#pragma unroll
  for (uint32_t i = 0; i < TOKENS_PER_THREAD<N_TILES>; ++i) thread_best(i) = {-INFINITY, -1};
}

// ARGMAX: whether the logits of a row are stored.
template <class Args>
DISTMK_FN bool stores_logits(const EpilogueParams<Args>& params, uint32_t token) {
  const Args& args = params.args;
  if (!args.logits) return false;
  const Batch* batch = params.context.batch(args.batch);
  return args.keeps_logits || !batch || needs_logits(batch->rows[token]);
}

// The epilogue of one M block. ONE_TOKEN: for a single token, and not in an ARGMAX task.
template <uint32_t N_TILES, class Args>
struct BlockEpilogue {
  const EpilogueParams<Args>& params;
  MBlock block;
  uint32_t rotation;                           // rotation of the token groups
  float residual[TOKENS_PER_THREAD<N_TILES>];  // ADD: the output's present elements

  // ARGMAX keeps candidates by thread, so its groups do not rotate. With one N tile, the residual is loaded here, ahead
  // of the mainloop. With two, there are too few registers.
  DISTMK_FN BlockEpilogue(const EpilogueParams<Args>& p, const MBlock& m_block)
      : params(p), block(m_block), rotation(p.kind() == Epilogue::ARGMAX ? 0 : m_block.begin / M_BLOCK) {
    if (N_TILES == 1) load_residual();
  }
  DISTMK_FN void load_residual() {
    const uint32_t column = block.begin + thread_row();
    const bool adds = params.kind() == Epilogue::ADD && column < block.end;
#pragma unroll
    for (uint32_t i = 0; i < TOKENS_PER_THREAD<N_TILES>; ++i) {
      const uint32_t token = thread_token(i, rotation);
      const float* out = params.context.template at<float>(params.args.out);
      residual[i] =
          adds && token < params.num_tokens ? __ldcg(out + uint64_t{token} * params.args.out_stride + column) : 0.0f;
    }
  }

  // Whether this warp's threads store anything of an N tile. If a single token is pushed, each group has its own ranks.
  template <bool ONE_TOKEN>
  DISTMK_FN bool stores(uint32_t n_tile) const {
    const bool by_rank = ONE_TOKEN && params.kind() == Epilogue::PUSH;
    return thread_token(n_tile * N_TILE / TOKEN_GROUPS, rotation) <
           (by_rank ? params.context.num_ranks() : params.num_tokens);
  }

  // Writes this warp's partial sums for the `num_tokens` tokens of an N tile.
  DISTMK_FN void write_partials(const Accumulators<N_TILES>& acc, uint32_t n_tile, uint32_t num_tokens,
                                float* partials) const {
    const uint32_t warp = own_thread() / 32, lane = own_thread() % 32, first_token = lane % 4 * 2;
    float* out = partials + (warp * N_TILE + first_token) * PARTIAL_SUM_STRIDE + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (first_token + i % 2 >= num_tokens) continue;
#pragma unroll
      for (uint32_t m = 0; m < M_TILES_PER_BLOCK; ++m)
        out[i % 2 * PARTIAL_SUM_STRIDE + m * M_TILE + i / 2 * 8] = acc[m][n_tile][i];
    }
  }

  // Resolves the pointers for this thread's weight row. In a gated task, an M tile is p gate rows and then the p up
  // rows of the same columns. The thread of a gate row stores the column; the thread of an up row stores nothing.
  template <bool ONE_TOKEN>
  DISTMK_FN void resolve(OutputPointers<Args>& pointers) const {
    const uint32_t row = thread_row(), in_tile = row % M_TILE, m_tile = block.begin + row - in_tile;
    if (m_tile + in_tile >= block.end) return;
    const bool paired = is_gated(params.kind());
    const uint32_t up_rows = min(M_TILE, block.end - m_tile) / 2;
    if (paired && in_tile >= up_rows) return;
    pointers.up_rows = paired ? up_rows : 0;
    pointers.load(params, block.begin + row, pointers.up_rows);
    pointers.template resolve<ONE_TOKEN>(params, (paired ? m_tile / 2 : m_tile) + in_tile, first_rank<ONE_TOKEN>());
  }

  // Sums and stores this thread's values of an N tile.
  template <bool ONE_TOKEN>
  DISTMK_FN void store(const OutputPointers<Args>& pointers, uint32_t n_tile, const float* partials) const {
    constexpr uint32_t NUM_TOKENS = ONE_TOKEN ? 1 : N_TILE / TOKEN_GROUPS;
    const uint32_t row = thread_row(), column = block.begin + row;
#pragma unroll
    for (uint32_t n = 0; n < NUM_TOKENS; ++n) {
      const uint32_t i = n_tile * NUM_TOKENS + n, token = ONE_TOKEN ? 0 : thread_token(i, rotation);
      if (!ONE_TOKEN && token >= params.num_tokens) break;
      const float* of_token = partials + token % N_TILE * PARTIAL_SUM_STRIDE;
      const float scale = token_scale(params.args, token);
      float value = sum_partials(of_token, row) * pointers.gate(scale) + pointers.bias;
      if (pointers.up_rows) {
        const float up = sum_partials(of_token, row + pointers.up_rows) * pointers.up(scale) + pointers.up_bias;
        value = gated<BaseE>(params.kind(), value, up);
      }
      value += residual[i];
      pointers.store(token, value);
      if (!ONE_TOKEN && params.kind() == Epilogue::ARGMAX && column < block.end) {
        thread_best(i) = better_of(thread_best(i), {value, static_cast<int32_t>(params.args.first_token + column)});
        if (stores_logits(params, token))
          params.context.template at<float>(params.args.logits)[uint64_t{token} * params.args.logits_stride + column] =
              softcapped<BaseE>(value, params.args.softcap);
      }
      if (params.kind() == Epilogue::PUSH && column < block.end) push_to_others<ONE_TOKEN>(token, column, value);
    }
  }

 private:
  // PUSH: the first rank that this thread stores to, and the store to all its other ranks.
  template <bool ONE_TOKEN>
  DISTMK_FN uint32_t first_rank() const {
    return ONE_TOKEN ? thread_token(0, rotation) : 0;
  }
  template <bool ONE_TOKEN>
  DISTMK_FN void push_to_others(uint32_t token, uint32_t column, float value) const {
    constexpr uint32_t STEP = ONE_TOKEN ? TOKEN_GROUPS : 1;
#pragma unroll 1
    for (uint32_t rank = first_rank<ONE_TOKEN>() + STEP; rank < params.context.num_ranks(); rank += STEP)
      if (float* out = params.context.template peer<float>(rank, params.args.out))
        publish(out + uint64_t{token} * params.args.num_features + column, value);
  }
};

// Whether the loader is throttled while the task's triggers are signaled. It is if other tasks wait for the triggers
// instead of polling the output. It also is for queries, keys and values, although they are polled, because that
// measured faster.
template <class Args>
DISTMK_FN bool throttles_loader(const RankState& state, const Args& args) {
  switch (static_cast<Epilogue>(args.epilogue)) {
    case Epilogue::PUSH:
      return state.transport != nullptr;
    case Epilogue::ADD:
      DISTMK_GATED_CASES
      return !args.lamport_reset;
    default:
      return true;
  }
}

// Whether this warp has no tile in the last K block. It then waits for no stage of that block. Instead it waits for the
// split-K reduction: with a full lap of the pipeline ahead of the other warps, phase bits would alias.
template <class Args>
DISTMK_FN bool skips_last_k_block(const Args& args) {
  return warp_k_begin() > (args.k_pitch - 1) % K_BLOCK;
}

// Split-K reduction and stores of an M block. Every warp writes its partial sums. Warps that store elements of the N
// tile wait for the sums of all warps; the others go on. There is room for two reductions of up to N_TILE / 2 tokens,
// or for one of more tokens. After the slab's last M block, which ends at `m_end`, the loader is throttled.
template <uint32_t N_TILES, bool ONE_TOKEN, class Args>
DISTMK_FN void reduce_and_store(BlockEpilogue<N_TILES, Args>& epilogue, const Accumulators<N_TILES>& acc,
                                uint32_t& reduction, uint32_t m_end) {
  const EpilogueParams<Args>& params = epilogue.params;
  if (N_TILES > 1) epilogue.load_residual();
  SplitKBuffers& buffers = shared().split_k;
  const bool two = params.num_tokens <= N_TILE / 2;
  OutputPointers<Args> pointers;
#pragma unroll
  for (uint32_t n_tile = 0; n_tile < N_TILES; ++n_tile, ++reduction) {
    const uint32_t last = reduction - (two ? 2 : 1), slot = buffers.slot(reduction);
    float* partials =
        shared().at<Overlay::PARTIAL_SUMS, float>() + (two ? slot * (N_TILE / 2) * PARTIAL_SUM_STRIDE : 0);
    barrier_wait(&buffers.empty[buffers.slot(last)], buffers.parity(last));
    epilogue.write_partials(acc, n_tile, min(N_TILE, params.num_tokens - n_tile * N_TILE), partials);
    warp_arrive(&buffers.full[slot]);
    const bool stores = epilogue.template stores<ONE_TOKEN>(n_tile);
    const bool throttles =
        stores && epilogue.block.end == m_end && throttles_loader(params.context.rank_state, params.args);
    const uint32_t next_slab = throttles ? shared().num_slabs[own_thread() / 32].get() + 1 : 0;
    if (stores && n_tile == 0) epilogue.template resolve<ONE_TOKEN>(pointers);
    if (stores || skips_last_k_block(params.args)) barrier_wait(&buffers.full[slot], buffers.parity(reduction));
    if (stores) {
      mark(Mark::MET);
      if (next_slab && threadIdx.x % 32 == 0) shared().pipeline.throttle.set(next_slab);
      epilogue.template store<ONE_TOKEN>(pointers, n_tile, partials);
      mark(Mark::STORED);
    }
    warp_arrive(&buffers.empty[slot]);
  }
}

// ARGMAX: writes the best candidate of each sampled token, over the threads that keep one.
template <uint32_t N_TILES, class Args>
DISTMK_FN void write_candidates(const EpilogueParams<Args>& params) {
  auto* all = shared().at<Overlay::WARP_CANDIDATES, Candidate>();
  const uint32_t warp = opaque(threadIdx.x / 32), lane = threadIdx.x % 32;  // opaque: keeps addresses off the stack
  constexpr uint32_t WARPS_PER_TOKEN = M_BLOCK / 32;
#pragma unroll
  for (uint32_t i = 0; i < TOKENS_PER_THREAD<N_TILES>; ++i) {
    const Candidate best = warp_argmax(thread_best(i));
    if (lane == 0) all[thread_token(i, 0) * WARPS_PER_TOKEN + warp % WARPS_PER_TOKEN] = best;
  }
  params.context.team.sync();
  const uint32_t token = own_thread();
  if (token >= MAX_ROWS) return;
  Candidate best = {-INFINITY, -1};
  const Batch* batch = params.context.batch(params.args.batch);
  if (token < params.num_tokens && (!batch || batch->rows[token].sample))
    for (uint32_t i = 0; i < WARPS_PER_TOKEN; ++i) best = better_of(best, all[token * WARPS_PER_TOKEN + i]);
  params.context.template at<Candidate>(params.args.out)[token] = best;
}

}  // namespace linear
}  // namespace distmk
