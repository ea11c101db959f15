// The linear task: out[n, m] = epilogue(sum over k of W[m, k] X[n, k]), for a slab of weight rows m and all tokens n of
// the batch. It composes the mainloop (mainloop.cuh), the B operand (activations.cuh, or fused_combine.cuh for
// attention's output) and the epilogue (epilogue.cuh). The GEMV path takes one token; the GEMM path takes up to 16
// tokens, in one or two N tiles.
#pragma once
#include "device/comm/lamport.cuh"
#include "device/core/loader.cuh"
#include "device/linear/epilogue.cuh"
#include "device/linear/fused_combine.cuh"
#include "device/linear/mainloop.cuh"

namespace distmk {
namespace linear {

// Rows of the weight slab. `Args`: as in epilogue.cuh.
template <class Args>
DISTMK_FN uint32_t slab_rows(const Args& args) {
  return is_gated(static_cast<Epilogue>(args.epilogue)) ? 2 * args.num_features : args.num_features;
}

// Each row of the batch is a token.
template <class Args>
DISTMK_FN uint32_t num_tokens(const RankState& state, const Args& args) {
  return args.batch ? state.batch(args.batch)->num_rows : 1;
}

// Whether activations can be read in whole chunks.
template <class Args>
DISTMK_FN bool is_aligned(const RankState& state, const Args& args, uint32_t num_tokens) {
  return (state.address(args.x) % 16 | args.k % CHUNK_K | (num_tokens > 1 ? args.x_stride % CHUNK_K : 0)) == 0;
}

// Whether a task takes the GEMV path: it has one token, whose activations fit in shared memory. The head is excluded,
// because its candidates take that memory.
template <class Args>
DISTMK_FN bool fits_gemv(const Args& args, uint32_t num_tokens) {
  return num_tokens == 1 && args.k_pitch <= MAX_GEMV_BLOCKS * K_BLOCK &&
         args.epilogue != static_cast<uint32_t>(Epilogue::ARGMAX);
}

// No function is called while fragments or accumulators are live, because they would be saved on the stack. Unaligned
// activations are the exception.

// Ends an M block, and zeroes the accumulators. `m_end`: the slab's last row + 1.
template <uint32_t N_TILES, bool ONE_TOKEN, class Args>
DISTMK_FN void finish_m_block(BlockEpilogue<N_TILES, Args>& epilogue, Accumulators<N_TILES>& acc,
                              ConsumerState& consumer, uint32_t m_end) {
  mark(Mark::LAST);
  reduce_and_store<N_TILES, ONE_TOKEN>(epilogue, acc, consumer.reduction_round, m_end);
  memset(acc, 0, sizeof(acc));
}

// GEMV path, for aligned activations. Its latency is mostly dependent instructions, so it has none that one token does
// not need.
DISTMK_FN void run_gemv(Context& context, const LinearArgs& args) {
  const uint32_t m_end = slab_rows(args);
  const LdmatrixLane lane;
  const EpilogueParams<LinearArgs> params{context, args, 1};
  ConsumerState consumer = consumer_state();
  Accumulators<1> acc = {};
  FragmentB<1> x;
  FusedCombine<LinearArgs> fused_partials(context, args, args.polls_x, warp_k_begin());
  PrefetchedA prefetched;
  prefetched.load(args, m_end, consumer.stage, lane);
  mark(Mark::PREPARED);
  if (args.polls_x)
    context.begin_polling();
  else if (!context.inputs_ready())
    return store_consumer_state(consumer);  // the prefetched tile has left the pipeline
  if (fused_partials.is_there())
    fused_partials.combine_to_shared(gemv_input());
  else
    stage_gemv_input(context, activations_of(context, args, 1), args.polls_x, warp_k_begin());
  context.inputs_polled();
  __syncwarp();
  mark(Mark::INPUTS);
  x.load_from_shared(args.k, warp_k_begin());
  prefetched.multiply(x, acc);
  uint32_t m_tile = prefetched.num_m_tiles;
#pragma unroll 1
  for (uint32_t m = 0; m < m_end; m += M_BLOCK) {
    BlockEpilogue<1, LinearArgs> epilogue(params, {m, min(m + M_BLOCK, m_end)});
#pragma unroll 1
    for (uint32_t k = 0; k < args.k_pitch; k += K_BLOCK) {
      const uint32_t k_end = min(k + K_BLOCK, args.k_pitch);
      if (args.applies_rms && m == 0) add_squares(x, k == 0);
      if (m + k == 0) mark(Mark::FIRST);
      mainloop_k_block<1>(x, lane, epilogue.block, k_end - k, m_tile, consumer.stage, acc);
      m_tile = 0;
      x.load_from_shared(args.k, (k_end < args.k_pitch ? k_end : 0) + warp_k_begin());
    }
    finish_m_block<1, true>(epilogue, acc, consumer, m_end);
  }
  store_consumer_state(consumer);
}

// GEMM path. With one N tile, the activations of the next K block are loaded while this block is multiplied, and the
// first A fragments are prefetched. With two, there are too few registers. With two, nothing is stored before the
// task's waits are met, and tasks that add up the outputs rely on that (completes_early() in signaler.cuh).
template <uint32_t N_TILES, bool ALIGNED>
DISTMK_FN void run(Context& context, const LinearArgs& args, uint32_t num_tokens) {
  constexpr bool PREFETCHES = N_TILES == 1 && ALIGNED;
  const uint32_t m_end = slab_rows(args);
  const Activations a = activations_of(context, args, num_tokens);
  const LdmatrixLane lane;
  const EpilogueParams<LinearArgs> params{context, args, num_tokens};
  ConsumerState consumer = consumer_state();
  Accumulators<N_TILES> acc = {};
  FragmentB<N_TILES> x;
  uint32_t m_tile = 0;
  bool polls = ALIGNED && args.polls_x;
  PrefetchedA prefetched;
  if constexpr (PREFETCHES) prefetched.load(args, m_end, consumer.stage, lane);
  mark(Mark::PREPARED);
  if (polls)
    context.begin_polling();
  else if (!context.inputs_ready())
    return store_consumer_state(consumer);
  x.template load_published<ALIGNED>(context, polls, a, warp_k_begin());
  mark(Mark::INPUTS);
  if constexpr (PREFETCHES) {
    x.zero_beyond(a.k, warp_k_begin());
    prefetched.multiply(x, acc);
    m_tile = prefetched.num_m_tiles;
  }
  init_candidates<N_TILES>(params);
#pragma unroll 1
  for (uint32_t m = 0; m < m_end; m += M_BLOCK) {
    BlockEpilogue<N_TILES, LinearArgs> epilogue(params, {m, min(m + M_BLOCK, m_end)});
#pragma unroll 1
    for (uint32_t k = 0; k < args.k_pitch; k += K_BLOCK) {
      const uint32_t k_end = min(k + K_BLOCK, args.k_pitch);
      // Behind the slab's last block, arbitrary columns are loaded and never multiplied.
      const uint32_t next_k = k_end < args.k_pitch ? k_end : epilogue.block.end < m_end ? 0 : args.k;
      FragmentB<N_TILES> next;
      if constexpr (PREFETCHES)
        next.template load_published<ALIGNED>(context, polls, a, next_k + warp_k_begin());
      else
        x.zero_beyond(a.k, k + warp_k_begin());
      if (args.applies_rms && m == 0) add_squares(x, k == 0);
      if (m + k == 0) mark(Mark::FIRST);
      mainloop_k_block<N_TILES>(x, lane, epilogue.block, k_end - k, m_tile, consumer.stage, acc);
      m_tile = 0;
      if constexpr (PREFETCHES)
        (x = next).zero_beyond(a.k, next_k + warp_k_begin());
      else if (k_end < args.k_pitch)
        x.template load_published<ALIGNED>(context, polls, a, next_k + warp_k_begin());
    }
    if constexpr (!PREFETCHES) {
      context.inputs_ready();
      x.template load<ALIGNED>(a, (epilogue.block.end < m_end ? 0 : args.k) + warp_k_begin());
    }
    polls = false;  // the first M block has seen all activations
    if (N_TILES == 1 && num_tokens == 1 && params.kind() != Epilogue::ARGMAX)
      finish_m_block<N_TILES, N_TILES == 1>(epilogue, acc, consumer, m_end);
    else
      finish_m_block<N_TILES, false>(epilogue, acc, consumer, m_end);
  }
  if (params.kind() == Epilogue::ARGMAX) {
    context.team.sync();
    write_candidates<N_TILES>(params);
  }
  store_consumer_state(consumer);
}

template <bool ALIGNED>
DISTMK_FN void run_by_tokens(Context& context, const LinearArgs& args, uint32_t num_tokens) {
  if (ALIGNED && fits_gemv(args, num_tokens))
    run_gemv(context, args);
  else if (num_tokens <= N_TILE)
    run<1, ALIGNED>(context, args, num_tokens);
  else
    run<2, ALIGNED>(context, args, num_tokens);
}

}  // namespace linear

DISTMK_FN void body_linear(Context& context, const LinearArgs& args) {
  const uint32_t num_tokens = linear::num_tokens(context.rank_state, args);
  if (linear::is_aligned(context.rank_state, args, num_tokens))
    linear::run_by_tokens<true>(context, args, num_tokens);
  else
    linear::run_by_tokens<false>(context, args, num_tokens);
  if (args.epilogue == static_cast<uint32_t>(Epilogue::PUSH) && context.rank_state.transport && context.inputs_ready())
    context.push_remote(args.out, uint64_t{num_tokens} * args.num_features * sizeof(float));
}

// The hooks that the traits of linear tasks ask for (TaskTraits).

DISTMK_FN WeightSlab weight_slab(const RankState& state, const LinearArgs& args) {
  return {reinterpret_cast<const char*>(state.address(args.weight)), linear::slab_rows(args), args.k_pitch};
}
DISTMK_FN bool throttles_signal(const RankState& state, const LinearArgs& args) {
  return linear::throttles_loader(state, args);
}
// One variant for each number of tokens.
DISTMK_FN bool find_hot_variant(const RankState& state, const LinearArgs& args, uint32_t* num_tokens) {
  *num_tokens = linear::num_tokens(state, args);
  return linear::is_aligned(state, args, *num_tokens);
}
DISTMK_FN void run_hot_variant(Context& context, const LinearArgs& args, uint32_t num_tokens) {
  linear::run_by_tokens<true>(context, args, num_tokens);
}
DISTMK_FN void reset_stale_rows(const Context& context, const LinearArgs& args, const Batch& batch) {
  if (args.out_bf16)
    reset_columns<__nv_bfloat16>(context, args, batch, args.num_features, args.out_bf16_stride);
  else if (is_gated(static_cast<Epilogue>(args.epilogue)))
    reset_columns<__nv_bfloat16>(context, args, batch, args.num_features, args.out_stride);
  else
    reset_columns<float>(context, args, batch, args.num_features, args.out_stride);
}

}  // namespace distmk
