// Greedy sampling over this rank's shard of the vocabulary: for token n, out[n] on rank 0 = best of candidates[t][n].
// The head's tasks t have left them, each from its slab of the shard (ARGMAX in device/linear/epilogue.cuh). The
// scheduler step on rank 0 then takes the best of all ranks.
#pragma once
#include "device/core/shared.cuh"
#include "device/sampling/argmax.cuh"

namespace distmk {

// A warp takes a token. If rank 0 is not peer-mapped, the results go to this rank's own `out` and are put from there.
DISTMK_FN void body_sample(Context& context, const SampleArgs& args) {
  constexpr uint32_t IN_FLIGHT = 5;  // loads per lane: enough to load 132 tasks, one per worker of an H100, at once
  const uint32_t num_tokens = rows_of(context.batch(args.batch)), lane = context.team.index % 32;
  const auto* candidates = context.at<unsigned long long>(args.candidates);
  auto* peer = context.peer<Candidate>(0, args.out);
  auto* out = peer ? peer : context.at<Candidate>(args.out);
#pragma unroll 1
  for (uint32_t token = context.team.index / 32; token < num_tokens; token += NUM_WARPS) {
    Candidate best = {-INFINITY, -1};
#pragma unroll 1
    for (uint32_t first = lane; first < args.num_tasks; first += 32 * IN_FLIGHT) {
      unsigned long long packed[IN_FLIGHT];
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + 32 * i < args.num_tasks) packed[i] = __ldcg(candidates + (first + 32 * i) * args.num_rows + token);
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + 32 * i < args.num_tasks) best = better_of(best, *reinterpret_cast<const Candidate*>(&packed[i]));
    }
    best = warp_argmax(best);
    if (lane == 0) out[token] = best;
  }
  if (!peer) {
    context.team.sync();
    context.put(0, args.out, out, sizeof(Candidate) * args.num_rows);
  }
  context.signal_rank(0);
}

}  // namespace distmk
