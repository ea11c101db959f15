// The linear_jobs task, a GEMM of a job iteration (of a row bucket above MAX_ROWS): out[n, m] = epilogue(sum over k of
// W[m, k] X[n, k]). It takes all rows m of a matrix and up to MAX_BUCKET_ROWS tokens n. It composes the division into
// jobs (job_grid.cuh), the rings that the loader fills (rings.cuh, loader.cuh), the mainloop (mainloop.cuh) and the
// epilogue (epilogue.cuh).
#pragma once
#include "device/core/end_task.cuh"
#include "device/jobs/epilogue.cuh"
#include "device/jobs/loader.cuh"
#include "device/jobs/packed_reader.cuh"

namespace distmk {
namespace jobs {

// Runs this worker's jobs, with N tiles of N tokens, as the loader plans them. This is a function of its own that calls
// nothing: otherwise the compiler would wait for every tensor-core product at once. Its state is in shared memory,
// because the stack is far away.
template <uint32_t N, class Reader>
DISTMK_NOINLINE void run_jobs() {
  Context context(own_rank_state(), {threadIdx.x, NUM_CONSUMERS});
  begin_current(context);
  uint32_t phases = 0;
  SlotPosition b;
#pragma unroll 1
  for (uint32_t round = 0;; ++round) {
    const LinearJobsArgs& args = rings().args;
    JobPlan& job = plan_of(round);
    FeatureTable& table = rings().features[round % 2];
    barrier_wait(&job.planned, plan_parity(round));
    if (!job.num_tiles) break;
    write_features(job, output_begin(N), context.at<float>(args.bias), table);  // while activations are copied
    Reader::write_factors(args, job);
    multiply_job<N, Reader>(job.num_tiles, phases, b, job.num_blocks);
    mark(Mark::MET);
    phases = WeightPosition::phases_after(phases, rings().num_tiles, job.num_tiles, num_k_tiles(job.num_blocks));
    b.skip(rings().num_slots, job.num_blocks);
    fence_copies_to_shared();  // bulk copies may fill a ring over the output; no store to global memory is outstanding
    barrier_sync<NUM_CONSUMERS>();
    store_job(context, args, job, table, rings().num_tokens);
    mark(Mark::STORED);
    warp_arrive(&job.stored);
  }
  barrier_sync<NUM_CONSUMERS>();
  rings().invalidate();
  end_task_of_body();
}

#ifdef DISTMK_PACKED
template <class F>
DISTMK_FN void run_packed_jobs() {
  return rings().tile_tokens == packed_tile_tokens_of(1) ? run_jobs<packed_tile_tokens_of(1), PackedReader<F>>()
                                                         : run_jobs<packed_tile_tokens_of(~0u), PackedReader<F>>();
}
#endif

DISTMK_FN void run_jobs() {
  barrier_wait(&plan_of(0).planned, plan_parity(0));
#ifdef DISTMK_PACKED
  switch (rings().args.format) {
#define DISTMK_CASE(Name) \
  case Name##Format::ID:  \
    return run_packed_jobs<linear::Name##Tiles>();
    DISTMK_PACKED_FORMATS(DISTMK_CASE)
#undef DISTMK_CASE
  }
#endif
  switch (rings().tile_tokens) {
    case 32:
      return run_jobs<32, WeightReader>();
    case 64:
      return run_jobs<64, WeightReader>();
    case 128:
      return run_jobs<128, WeightReader>();
    default:
      return run_jobs<MAX_TOKENS, WeightReader>();
  }
}

}  // namespace jobs

DISTMK_FN void body_linear_jobs(Context& context, const LinearJobsArgs& args) {
  if constexpr (!BULK_COPIES) return;  // job programs need compute capability 9.0
  if (!context.begin_prologue()) return;
  jobs::Rings& rings = jobs::rings();
  const uint32_t num_tokens = jobs::tokens_of(args, *context.batch(args.batch));
  rings.init();
  if (threadIdx.x == 0) rings.args = args, rings.instance = context.instance, rings.num_tokens = num_tokens;
  context.team.sync();
  if (threadIdx.x < 32) warp_arrive(&shared().product_entered);
  mark(Mark::PREPARED);
  if (!context.inputs_ready()) return;  // the loader leaves, too
  mark(Mark::INPUTS);
  if (threadIdx.x < 32) warp_arrive(&rings.ready);
  jobs::run_jobs();
}

}  // namespace distmk
