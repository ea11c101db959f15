// Greedy sampling: the best logit of each row over this rank's shard of the vocabulary.
#pragma once
#include "device/core/shared.cuh"
#include "device/sampling/argmax.cuh"

namespace distmk {

// A warp a row. The best goes straight to rank 0, or where no pointer reaches that, from its own place on this rank's
// heap, where the network reads it.
DISTMK_FN void body_sample(Context& context, const SampleArgs& args) {
  constexpr uint32_t IN_FLIGHT = 5;  // enough for a task on each of 132 workers at once
  const uint32_t num_rows = rows_of(context.batch(args.batch)), lane = context.team.index % 32;
  const auto* candidates = context.at<uint64_t>(args.candidates);
  auto* near = context.peer<Candidate>(0, args.out);
  auto* out = near ? near : context.at<Candidate>(args.out);
#pragma unroll 1
  for (uint32_t row = context.team.index / 32; row < num_rows; row += NUM_WARPS) {
    Candidate best = {-INFINITY, -1};
#pragma unroll 1
    for (uint32_t first = lane; first < args.num_tasks; first += 32 * IN_FLIGHT) {
      uint64_t packed[IN_FLIGHT];
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + 32 * i < args.num_tasks) packed[i] = __ldcg(candidates + (first + 32 * i) * MAX_ROWS + row);
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + 32 * i < args.num_tasks) best = better_of(best, *reinterpret_cast<const Candidate*>(&packed[i]));
    }
    best = warp_argmax(best);
    if (lane == 0) out[row] = best;
  }
  if (!near) {
    context.team.sync();
    context.put(0, args.out, out, sizeof(Candidate) * MAX_ROWS);
  }
  context.signal_rank(0);
}

}  // namespace distmk
