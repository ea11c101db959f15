// The linear task with packed weights: out[n, m] = epilogue(scale * sum over k of W[m, k] norm[k] X[n, k]). It is the
// linear task (linear.cuh) but for three things: the mainloop decodes W (packed_mainloop.cuh), the weight of a
// preceding norm multiplies X instead of W, and sums have factors. It is compiled only into the kernel of programs with
// packed weights.
#pragma once
#ifdef DISTMK_PACKED
#include "device/formats/packed_mainloop.cuh"
#include "device/linear/linear.cuh"

namespace distmk {

// In the namespace of its argument, where the epilogue finds it.
DISTMK_FN float token_scale(const PackedLinearArgs& args, uint32_t token) {
  const float scale = linear::SUM_FACTOR * args.scale;
  return args.applies_rms ? scale * linear::norm_scale(args, token) : scale;
}

namespace linear {

// Bytes of a slab's tiles. The scales of its rows are behind them.
DISTMK_FN uint64_t tiles_bytes(const StageShape& stage, uint32_t rows, uint32_t k_pitch) {
  const uint32_t num_m_tiles = (rows + M_TILE - 1) / M_TILE;
  return uint64_t{k_pitch / K_TILE} * (rows * stage.row_bytes + num_m_tiles * stage.scale_bytes);
}

// The scale of a weight row, and of its up row, in formats that have some.
template <>
struct RowFactors<PackedLinearArgs> {
  float of_gate = 1.0f, of_up = 1.0f;

  DISTMK_FN void load(const EpilogueParams<PackedLinearArgs>& params, uint32_t row, uint32_t up_rows) {
    if (!traits_of(params.args.format).has_row_scales) return;
    const float* scales = scales_of(params.context, params.args);
    of_gate = scales[row];
    of_up = scales[row + up_rows];
  }
  // Called when a task begins. Nothing else has read the scales, and epilogues would wait for them.
  DISTMK_FN static void prefetch(const Context& context, const PackedLinearArgs& args) {
    if (own_thread() == 0 && traits_of(args.format).has_row_scales)
      prefetch_bulk(scales_of(context, args), (slab_rows(args) + 3) / 4 * 4 * sizeof(float));
  }
  DISTMK_FN float gate(float scale) const { return scale * of_gate; }
  DISTMK_FN float up(float scale) const { return scale * of_up; }

 private:
  DISTMK_FN static const float* scales_of(const Context& context, const PackedLinearArgs& args) {
    const uint64_t tiles = tiles_bytes(traits_of(args.format).stage, slab_rows(args), args.k_pitch);
    return reinterpret_cast<const float*>(context.at<char>(args.weight) + tiles);
  }
};

// Makes activations that were loaded from column `k_begin` of X on ready for the products. keeps_squares: adds to their
// sums of squares, beginning at 0 if `is_first`.
template <bool ALIGNED, uint32_t N_TILES>
DISTMK_FN void finish_activations(const PackedLinearArgs& args, const NormFactors<ALIGNED>& norm, uint32_t k_begin,
                                  bool keeps_squares, bool is_first, FragmentB<N_TILES>& x) {
  if (ALIGNED) zero_outside(x, args.k, k_begin);
  if (keeps_squares) add_squares(x, is_first);
  if (args.norm) norm.multiply(x, k_begin);
  const FormatTraits& traits = traits_of(args.format);
  for_chunks(x, [&](uint4& chunk) { chunk = scaled_pairs(chunk, traits.even_scale, traits.odd_scale); });
  if (traits.takes_halves) for_chunks(x, [](uint4& chunk) { chunk = in_halves(chunk); });
}

// GEMV path: most K blocks of a token's activations. With a norm, its factors are in registers.
constexpr uint32_t MAX_PACKED_GEMV_BLOCKS = overlay_bytes(Overlay::GEMV_INPUT) / (K_BLOCK * sizeof(__nv_bfloat16)),
                   MAX_NORMED_GEMV_BLOCKS = 4;
DISTMK_FN bool fits_packed_gemv(const PackedLinearArgs& args, uint32_t num_tokens) {
  return num_tokens == 1 && args.k_pitch <= (args.norm ? MAX_NORMED_GEMV_BLOCKS : MAX_PACKED_GEMV_BLOCKS) * K_BLOCK &&
         args.epilogue != static_cast<uint32_t>(Epilogue::ARGMAX);
}

// Waits for a token's activations, and leaves up to BLOCKS K blocks of them in shared memory, ready for the products. A
// lane has a chunk of each block. False: the task does not run.
template <uint32_t BLOCKS, bool HAS_NORM>
DISTMK_FN bool stage_packed_gemv(Context& context, const PackedLinearArgs& args,
                                 FusedCombine<PackedLinearArgs>& fused_partials) {
  const uint32_t lane_k = own_k_begin() + own_thread() % 32 * CHUNK_K;
  ChunkFactors factors[BLOCKS];
  if constexpr (HAS_NORM)
#pragma unroll
    for (uint32_t i = 0; i < BLOCKS; ++i)
      factors[i].load(context.at<float>(args.norm) + min(i * K_BLOCK + lane_k - args.lead, args.k - CHUNK_K));
  if (args.polls_x)
    context.begin_polling();
  else if (!context.inputs_ready())
    return false;
  if (fused_partials.is_there())
    fused_partials.combine_to_shared(gemv_input());
  else
    stage_gemv_input<BLOCKS>(context, activations_of(context, args, 1), args.polls_x, own_k_begin(), args.lead);
  context.inputs_polled();
  const FormatTraits& traits = traits_of(args.format);
  float squares = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS; ++i) {
    if (i * K_BLOCK >= args.k_pitch) break;
    auto* staged = reinterpret_cast<uint4*>(gemv_input() + i * K_BLOCK + lane_k);
    uint4 chunk = i * K_BLOCK + lane_k - args.lead < args.k ? *staged : zero_chunk();
    squares += square_of(chunk);
    if constexpr (HAS_NORM) chunk = factors[i].times(chunk);
    chunk = scaled_pairs(chunk, traits.even_scale, traits.odd_scale);
    *staged = traits.takes_halves ? in_halves(chunk) : chunk;
  }
  if (args.applies_rms) {
    squares = attention::warp_sum(squares);
    if (own_thread() % 32 == 0) shared().squares[0][own_warp()] = squares;
  }
  __syncwarp();
  return true;
}
DISTMK_FN bool stage_packed_gemv(Context& context, const PackedLinearArgs& args,
                                 FusedCombine<PackedLinearArgs>& fused_partials) {
  const bool is_short = args.k_pitch <= 2 * K_BLOCK;
  if (args.norm)
    return is_short ? stage_packed_gemv<2, true>(context, args, fused_partials)
                    : stage_packed_gemv<MAX_NORMED_GEMV_BLOCKS, true>(context, args, fused_partials);
  return is_short ? stage_packed_gemv<2, false>(context, args, fused_partials)
                  : stage_packed_gemv<MAX_PACKED_GEMV_BLOCKS, false>(context, args, fused_partials);
}

// GEMV path, for aligned activations.
DISTMK_FN void run_packed_gemv(Context& context, const PackedLinearArgs& args) {
  using Args = PackedLinearArgs;
  const uint32_t m_end = slab_rows(args);
  const EpilogueParams<Args> params{context, args, 1};
  ConsumerState consumer = consumer_state();
  RowFactors<Args>::prefetch(context, args);
  static_assert(sizeof(Accumulators<1>) * NUM_CONSUMERS <= overlay_bytes(Overlay::GEMV_ACCUMULATORS), "");
  const SharedAccumulators<1> accumulators(shared().at<Overlay::GEMV_ACCUMULATORS, float4>());
  FusedCombine<Args> fused_partials(context, args, args.polls_x, own_k_begin());
  mark(Mark::PREPARED);
  if (!stage_packed_gemv(context, args, fused_partials)) return store_consumer_state(consumer);
  mark(Mark::INPUTS);
#pragma unroll 1
  for (uint32_t m = 0; m < m_end; m += M_BLOCK) {
    BlockEpilogue<1, Args> epilogue(params, {m, min(m + M_BLOCK, m_end)});
#pragma unroll 1
    for (uint32_t k = 0; k < args.k_pitch; k += K_BLOCK) {
      FragmentB<1> x;
      const auto* chunks = reinterpret_cast<const uint4*>(gemv_input() + k + own_k_begin() + lane_column());
#pragma unroll
      for (uint32_t i = 0; i < K_TILE / LOAD_K; ++i) x.chunks[0][i] = chunks[4 * i];
      if (m + k == 0) mark(Mark::FIRST);
      multiply_block<1>(args.format, x, epilogue.block, k == 0, min(K_BLOCK, args.k_pitch - k), consumer.stage,
                        accumulators);
    }
    Accumulators<1> acc;
    accumulators.load(acc);
    finish_m_block<1, true>(epilogue, acc, consumer, m_end);
  }
  store_consumer_state(consumer);
}

// GEMM path. With one N tile, the activations of the next K block are loaded while this block is multiplied. With two,
// there are too few registers, and nothing is stored before the task's waits are met (as in linear.cuh).
template <uint32_t N_TILES, bool ALIGNED>
DISTMK_FN void run_packed(Context& context, const PackedLinearArgs& args, uint32_t num_tokens) {
  using Args = PackedLinearArgs;
  constexpr bool PREFETCHES = N_TILES == 1 && ALIGNED;
  const uint32_t m_end = slab_rows(args), first = own_k_begin() - args.lead;
  const Activations a = activations_of(context, args, num_tokens);
  const EpilogueParams<Args> params{context, args, num_tokens};
  ConsumerState consumer = consumer_state();
  RowFactors<Args>::prefetch(context, args);
  static_assert(sizeof(Accumulators<2>) * NUM_CONSUMERS <= overlay_bytes(Overlay::ACCUMULATORS), "");
  const SharedAccumulators<N_TILES> accumulators(shared().at<Overlay::ACCUMULATORS, float4>());
  const NormFactors<ALIGNED> norm(context, args);
  FragmentB<N_TILES> x;
  bool polls = ALIGNED && args.polls_x;
  mark(Mark::PREPARED);
  if (polls)
    context.begin_polling();
  else if (!context.inputs_ready())
    return store_consumer_state(consumer);
  if constexpr (PREFETCHES) x.template load_published<ALIGNED>(context, polls, a, first);
  mark(Mark::INPUTS);
  init_candidates<N_TILES>(params);
#pragma unroll 1
  for (uint32_t m = 0; m < m_end; m += M_BLOCK) {
    BlockEpilogue<N_TILES, Args> epilogue(params, {m, min(m + M_BLOCK, m_end)});
#pragma unroll 1
    for (uint32_t k = 0; k < args.k_pitch; k += K_BLOCK) {
      const uint32_t k_end = min(k + K_BLOCK, args.k_pitch);
      FragmentB<N_TILES> next;
      if constexpr (PREFETCHES)  // behind the slab's last block, columns that are never multiplied
        next.template load_published<ALIGNED>(context, polls, a, (k_end < args.k_pitch ? k_end : 0) + first);
      else
        x.template load_published<ALIGNED>(context, polls, a, k + first);
      finish_activations(args, norm, k + first, args.applies_rms && m == 0, k == 0, x);
      if (m + k == 0) mark(Mark::FIRST);
      multiply_block<N_TILES>(args.format, x, epilogue.block, k == 0, k_end - k, consumer.stage, accumulators);
      if constexpr (PREFETCHES) x = next;
    }
    if constexpr (!PREFETCHES) context.inputs_ready();
    polls = false;  // the first M block has seen all activations
    Accumulators<N_TILES> acc;
    accumulators.load(acc);
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

// Whether activations can be read in whole chunks.
DISTMK_FN bool is_aligned_packed(const RankState& state, const PackedLinearArgs& args, uint32_t num_tokens) {
  return args.lead % CHUNK_K == 0 && is_aligned(state, args, num_tokens);
}

}  // namespace linear

DISTMK_FN void run_hot_variant(Context& context, const PackedLinearArgs& args, uint32_t variant);

DISTMK_FN void body_packed_linear(Context& context, const PackedLinearArgs& args) {
  const uint32_t num_tokens = linear::num_tokens(context.rank_state, args);
  if (linear::is_aligned_packed(context.rank_state, args, num_tokens))
    run_hot_variant(context, args, num_tokens > N_TILE);
  else if (num_tokens <= N_TILE)
    linear::run_packed<1, false>(context, args, num_tokens);
  else
    linear::run_packed<2, false>(context, args, num_tokens);
  if (args.epilogue == static_cast<uint32_t>(Epilogue::PUSH) && context.rank_state.transport && context.inputs_ready())
    context.push_remote(args.out, uint64_t{num_tokens} * args.num_features * sizeof(float));
}

// The hooks that the traits of the task type ask for (TaskTraits).

DISTMK_FN WeightSlab weight_slab(const RankState& state, const PackedLinearArgs& args) {
  return {reinterpret_cast<const char*>(state.address(args.weight)), linear::slab_rows(args), args.k_pitch,
          linear::traits_of(args.format).stage};
}
DISTMK_FN bool throttles_signal(const RankState& state, const PackedLinearArgs& args) {
  return linear::throttles_loader(state, args);
}
// The variants are for one N tile, and for two.
DISTMK_FN bool find_hot_variant(const RankState& state, const PackedLinearArgs& args, uint32_t* variant) {
  const uint32_t num_tokens = linear::num_tokens(state, args);
  *variant = num_tokens > N_TILE;
  return linear::is_aligned_packed(state, args, num_tokens);
}
DISTMK_FN void run_hot_variant(Context& context, const PackedLinearArgs& args, uint32_t variant) {
  const uint32_t num_tokens = linear::num_tokens(context.rank_state, args);
  if (variant)
    linear::run_packed<2, true>(context, args, num_tokens);
  else if (linear::fits_packed_gemv(args, num_tokens))
    linear::run_packed_gemv(context, args);
  else
    linear::run_packed<1, true>(context, args, num_tokens);
}
DISTMK_FN void reset_stale_rows(const Context& context, const PackedLinearArgs& args, const Batch& batch) {
  if (args.out_bf16)
    reset_columns<__nv_bfloat16>(context, args, batch, args.num_features, args.out_bf16_stride);
  else if (is_gated(static_cast<Epilogue>(args.epilogue)))
    reset_columns<__nv_bfloat16>(context, args, batch, args.num_features, args.out_stride);
  else
    reset_columns<float>(context, args, batch, args.num_features, args.out_stride);
}

}  // namespace distmk
#endif  // DISTMK_PACKED
