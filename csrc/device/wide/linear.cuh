// Linear layers of a wide iteration: out[n, m] = epilogue(sum over k of W[m, k] X[n, k]), all rows m of a matrix
// against up to WIDE_ROWS tokens n. Composes the division into jobs (division.cuh), the rings that the loader fills
// (rings.cuh, loader.cuh), the mainloop (mainloop.cuh) and the epilogue (epilogue.cuh).
#pragma once
#include "device/wide/epilogue.cuh"
#include "device/wide/loader.cuh"

namespace distmk {
namespace wide {

// This worker's jobs with N tiles of N tokens. The loader goes through the same jobs. A function by itself, and one
// that calls nothing: else the compiler would have every product of tensor cores waited for.
template <uint32_t N>
DISTMK_NOINLINE void run_jobs(const Context& context, const WideLinearArgs& args, const Division& division) {
  JobCursor jobs(division, context.instance, context.rank_state.program->num_workers);
  uint32_t a_count = 0, b_count = 0, table = 0;
#pragma unroll 1
  for (Job job; jobs.next(job);) {
    const BlockRange blocks = Division::blocks_of(args, job.split);
    const uint32_t num_blocks = blocks.end - blocks.begin;
    const FeatureRange features = features_of(args, division, job);
    write_features(context, args, division, job, features.begin, rings().features[table]);
    multiply_job<N>(job.num_tiles, a_count, b_count, num_blocks);
    mark(Mark::MET);
    a_count += (num_blocks + BLOCKS_PER_TILE - 1) / BLOCKS_PER_TILE, b_count += max(num_blocks, 1u);
    context.team.sync();
    store_job(context, args, job, rings().features[table], features, division.num_tokens);
    table ^= 1;
    mark(Mark::STORED);
    fence_copies_to_shared();  // the A ring is filled over what was read and written here
    warp_arrive(&rings().stored);
  }
}

DISTMK_FN void run_jobs(const Context& context, const WideLinearArgs& args) {
  const Division division(args, *context.batch(args.batch));
  switch (division.tile_tokens) {
    case 32:
      return run_jobs<32>(context, args, division);
    case 64:
      return run_jobs<64>(context, args, division);
    case 128:
      return run_jobs<128>(context, args, division);
    default:
      return run_jobs<MAX_TOKENS>(context, args, division);
  }
}

}  // namespace wide

DISTMK_FN void body_wide_linear(Context& context, const WideLinearArgs& args) {
  if constexpr (!BULK_COPIES) return;  // wide programs need compute capability 9.0
  wide::Rings& rings = wide::rings();
  rings.init(threadIdx.x);
  if (threadIdx.x == 0) rings.instance = context.instance;
  context.team.sync();
  if (threadIdx.x < 32) warp_arrive(&shared().wide_entered);
  mark(Mark::PREPARED);
  wide::run_jobs(context, args);
  fence_copies();  // other workers' loaders copy what was stored
  barrier_wait(&rings.left, 0);
  context.team.sync();
  rings.invalidate(threadIdx.x);
}

}  // namespace distmk
